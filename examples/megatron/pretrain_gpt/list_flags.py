"""Megatron's flags by its own parsers, and the page that says what becomes of those about data.

In: checkouts of Megatron-LM, one for each version; `docs/megatron_flags.json`, which says what earlier checkouts had.
Out: an error for each flag that nobody has judged: it is neither in `DATA_FLAGS` of the adapter nor among the flags
that the file says have nothing to do with data. With `--write`, the file and `docs/megatron_flags.md` as they follow.

    python list_flags.py ~/Megatron-LM                              # is every flag of this checkout judged?
    python list_flags.py 0.16=~/mlm/0.16 main=~/mlm/main --write    # the file and the page, of these versions

To judge a flag: put it into `DATA_FLAGS`, or into the file, under "not about data". Then write again.

Must hold: flags are those of `add_megatron_arguments`, asked for in a process of its own for each checkout; nothing is
written while a flag is not judged. Cost: an import of Megatron for each checkout, some 10 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchmix.megatron_adapter.flags import FlagGroup, fate_of_flag

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[2] / "docs"
RECORD, PAGE = "megatron_flags.json", "megatron_flags.md"
NOT_DATA = "not about data"
Versions = Mapping[str, Sequence[str]]
"""Version -> its flags."""


def flags_of_checkout(checkout: Path) -> list[str]:
    """The flags of a checkout's parser, in its order; those of help left out."""
    environment = {**os.environ, "MEGATRON_LM": str(checkout.resolve())}
    command = [sys.executable, str(HERE / "list_flags.py"), "--of-megatron"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{checkout}: its parser cannot be asked:\n{done.stderr[-3000:]}")
    return [str(flag) for flag in json.loads(done.stdout.splitlines()[-1])]


def print_flags_of_megatron() -> None:
    """In a process of its own: import the parser of `MEGATRON_LM`, with what a CPU lacks stood in for."""
    sys.path.insert(0, os.environ["MEGATRON_LM"])
    import cpu_device
    import cpu_imports
    import torch

    if not torch.cuda.is_available():
        cpu_imports.enable()
        cpu_device.enable()
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    print(json.dumps([flag for action in parser._actions for flag in action.option_strings]))


def unjudged(versions: Versions, not_data: Sequence[str]) -> list[str]:
    """A line for each flag that is in neither list, or in both, or that no version has."""
    data, other = set(fate_of_flag()), set(not_data)
    known = {flag for flags in versions.values() for flag in flags}
    lines = [f"{flag}: nobody has said whether it is about data" for flag in sorted(known - data - other)]
    lines += [f"{flag}: is both about data and not" for flag in sorted(data & other)]
    return lines


def of_no_version(versions: Versions) -> list[str]:
    """A line for each flag of `DATA_FLAGS` that no version has."""
    known = {flag for flags in versions.values() for flag in flags}
    return [f"{flag}: no version has it" for flag in fate_of_flag() if flag not in known]


def record_of(versions: Versions, not_data: Sequence[str]) -> dict[str, Any]:
    """What the file holds."""
    fates = fate_of_flag()
    known = {flag for flags in versions.values() for flag in flags}
    return {
        "versions": list(versions),
        "about data": {flag: [name for name, flags in versions.items() if flag in flags] for flag in sorted(fates)},
        NOT_DATA: sorted(known.intersection(not_data)),
    }


def page_of(record: Mapping[str, Any]) -> str:
    """The page, from the file and `DATA_FLAGS`."""
    every = list(record["versions"])
    rows = [("flag", "versions", "with a recipe", "")]
    fates = fate_of_flag()
    for group in dict.fromkeys(fates.values()):
        rows += [_row(flag, group, record["about data"][flag], every) for flag in group.flags.split()]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|---|---|---|")
    return HEAD.format(versions=", ".join(every)) + "\n".join(lines) + "\n"


def _row(flag: str, group: FlagGroup, has: Sequence[str], every: Sequence[str]) -> tuple[str, str, str, str]:
    return f"`{flag}`", "all" if list(has) == list(every) else ", ".join(has), group.fate, group.note


HEAD = """\
# Megatron's flags about data

What becomes of each flag of Megatron-LM that concerns data, when `--data-recipe` is given; see
[Megatron-LM](megatron.md). Versions: {versions}.

| with a recipe | means |
|---|---|
| refused | an error at the start, where the flag is given or has a value that cannot work |
| compared | an error at the start, where it differs from the recipe |
| followed | it means what it means to Megatron |
| model | it is about the model or the vocabulary; what it does to Megatron's own data has no effect |
| no effect | it steers Megatron's data builder, which does not run; the log names it at the start |

The list is made from Megatron's own parsers by
[list_flags.py](../examples/megatron/pretrain_gpt/list_flags.py), which fails on a flag that nobody has judged. All
other flags of these versions are in [megatron_flags.json](megatron_flags.json), as not about data.

"""


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "checkout", nargs="*", metavar="[VERSION=]FOLDER", help="of Megatron-LM; without a version, its folder's name"
    )
    parser.add_argument("--write", action="store_true", help="write the file and the page, of these versions")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="where the file and the page are")
    parser.add_argument("--of-megatron", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of_megatron:
        print_flags_of_megatron()
        return 0
    folders = [_named(text) for text in options.checkout]
    versions = {name: flags_of_checkout(folder) for name, folder in folders}
    not_data = json.loads((options.docs / RECORD).read_text(encoding="utf-8"))[NOT_DATA]
    faults = unjudged(versions, not_data) + (of_no_version(versions) if options.write else [])
    for line in faults:
        print(line, file=sys.stderr)
    if faults:
        return 1
    for name, flags in versions.items():
        print(f"{name}: {len(flags)} flags, all judged")
    if options.write:
        record = record_of(versions, not_data)
        (options.docs / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (options.docs / PAGE).write_text(page_of(record), encoding="utf-8")
    return 0


def _named(text: str) -> tuple[str, Path]:
    name, has_name, folder = text.partition("=")
    path = Path(folder if has_name else name).expanduser()
    return (name if has_name else path.name), path


if __name__ == "__main__":
    sys.exit(main())
