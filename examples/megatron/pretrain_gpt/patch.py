"""The four lines that make Megatron-LM's `pretrain_gpt.py` or `pretrain_vlm.py` read a torchmix recipe, in any version.

In: the text of such a script. Out: the same text with four lines more or changed; `--data-recipe` on the command
line turns torchmix on, and without it the script does what it did.

     stimer = StragglerDetector()
    +import torchmix.megatron_adapter as tmx
     ...
     if __name__ == "__main__":
    +    if tmx.enabled():
    +        get_batch, train_valid_test_datasets_provider = tmx.get_batch(globals()), tmx.provider
     ...
    -    extra_args_provider=add_modelopt_args if has_nvidia_modelopt else None,
    +    extra_args_provider=tmx.extra_args(add_modelopt_args if has_nvidia_modelopt else None),

Must hold: each line has one anchor in the script, a line that is there exactly once; if it is not, nothing is written
and the error says which line to put where by hand. Everything else of the script stays as it is, byte for byte.

    python patch.py Megatron-LM/pretrain_gpt.py                 # show the difference
    python patch.py Megatron-LM/pretrain_gpt.py --write mine.py

Cost: none.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from dataclasses import dataclass
from pathlib import Path


class AnchorMissing(ValueError):
    """A line of the script, beside which a line of torchmix belongs, is not there, or more than once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One change."""

    anchor: str
    """Regular expression of the line that must be there exactly once."""
    where: str
    """The anchor in words."""
    result: str
    """Template of what replaces it, as in `re.sub`."""


LINES = (
    Line(
        anchor=r"^(stimer = StragglerDetector\(\)|from pretrain_gpt import loss_func)$",
        where="after the imports, `stimer = StragglerDetector()` or `from pretrain_gpt import loss_func`",
        result=r"\1\nimport torchmix.megatron_adapter as tmx",
    ),
    Line(
        anchor=r"""^(if __name__ == ["']__main__["']:)$""",
        where='at the top of `if __name__ == "__main__":`',
        result=(
            r"\1\n    if tmx.enabled():"
            r"\n        get_batch, train_valid_test_datasets_provider = tmx.get_batch(globals()), tmx.provider"
        ),
    ),
    Line(
        anchor=r"^( +)extra_args_provider=(.+?),( args_defaults=.*)?$",
        where="in the call of `pretrain` or `parse_and_validate_args`, `extra_args_provider=...,`",
        result=r"\1extra_args_provider=tmx.extra_args(\2),\3",
    ),
)
NEEDED = ("get_batch", "train_valid_test_datasets_provider")
"""Functions of the script that are bound to others."""


def patched(text: str) -> str:
    """The script with torchmix's lines.

    Args:
        text: The text of a `pretrain_gpt.py`.

    Raises:
        AnchorMissing: A line that must be there exactly once is not; or the script is patched already.
    """
    if "torchmix" in text:
        raise AnchorMissing("the script names torchmix already; give an unmodified one")
    for name in NEEDED:
        if len(re.findall(rf"^def {name}\(", text, flags=re.MULTILINE)) != 1:
            raise AnchorMissing(f"the script must define `{name}` once; is it a pretrain_gpt.py?")
    for line in LINES:
        text, count = re.subn(line.anchor, line.result, text, flags=re.MULTILINE)
        if count != 1:
            change = re.sub(r"\\\d", "...", line.result.replace(r"\n", "\n"))
            raise AnchorMissing(
                f"looked for one line {line.where}, found {count}. Put this line in by hand, and tell this file where "
                f"it belongs in your version:\n{change}"
            )
    return text


def difference(before: str, after: str, name: str) -> str:
    """A unified diff."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=1
    )
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("script", type=Path, help="pretrain_gpt.py of a Megatron-LM checkout")
    parser.add_argument("--write", type=Path, metavar="FILE", help="where to put the patched copy")
    options = parser.parse_args()
    before = options.script.read_text(encoding="utf-8")
    try:
        after = patched(before)
    except AnchorMissing as error:
        print(f"{options.script}: {error}", file=sys.stderr)
        return 1
    print(difference(before, after, options.script.name), end="")
    if options.write is not None:
        options.write.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
