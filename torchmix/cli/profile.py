"""`torchmix profile RECIPE`: measure what each source costs a loader.

Each source is measured in a process of its own, so that its memory is its own; nothing is written unless all could be
measured. Cost: seconds a source, which `--seconds` bounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.spawn import get_executable
from typing import Any

import msgspec

from torchmix.cli.run import open_recipe
from torchmix.cli.terminal import (
    ExitCode,
    add_explain,
    add_recipe,
    at_least,
    count_text,
    print_json,
    print_table,
    progress_bar,
)
from torchmix.errors import OptionError, SourceUnreadable
from torchmix.recipe.amounts import bytes_text
from torchmix.recipe.build import nearest
from torchmix.recipe.sources import maps_of, masked_sources
from torchmix.service.scale.loads import SourceProfile, profile_of, write_profile
from torchmix.service.scale.measure import MOST_TOKENS, measure_source

HELP = "measure what each source costs a loader"
COLUMNS = {
    "source": "a source of training, by its name",
    "busy": "time of a loader for a million of its tokens, without waiting for a processor",
    "cpu": "time of processors for a million of its tokens, of all threads",
    "read": "bytes read from its files, for each byte of ids sent",
    "sent": "bytes of ids sent, a token",
    "state": "memory of a loader for having it open, beside decoded pages",
    "windows": "its decoded pages that are kept: those of a window, and of the next one",
    "tokens": "tokens that were read to measure it",
}
ITEM_COLUMNS = {
    "source": "a source that has items",
    "items": "their kind",
    "read": "time to read the bytes of one, without waiting for a processor",
    "decode": "time of one thread to make its units, such as patches",
    "a token": "both, for each token that items stand for",
    "over text": "that over the time of a loader for as many tokens of texts: of sources without items, or else of all",
    "file": "bytes of a file, mean",
    "units": "bytes of the units of one, mean",
    "measured": "items that were decoded to measure it",
}
SECONDS = 2
_CODE = (
    "import json, sys; words, sys.path = map(json.loads, sys.argv[1:]); "
    "from torchmix.cli.main import main; sys.exit(main(words))"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside those of all verbs."""
    add_recipe(parser)
    parser.add_argument("--source", metavar="NAME", help="measure this one alone, and write nothing")
    parser.add_argument(
        "--seconds", type=at_least(1), default=SECONDS, metavar="S", help=f"time for a source at most ({SECONDS})"
    )
    parser.add_argument(
        "--tokens",
        type=at_least(1),
        default=MOST_TOKENS,
        metavar="N",
        help=f"tokens of a source at most ({MOST_TOKENS})",
    )
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Measure, and write the profile.

    Raises:
        OptionError: The recipe has no such source.
        TorchmixError: A source cannot be read.
    """
    _, folder, part, catalog = open_recipe(arguments.recipe)
    if arguments.source is not None:
        if arguments.source not in catalog.sources:
            hint = nearest(arguments.source, catalog.sources)
            raise OptionError(f"--source {arguments.source}: the recipe has no such source{hint}")
        found = measure_source(
            catalog,
            folder,
            arguments.source,
            seed=part.seed,
            masked=masked_sources(part.sources),
            maps=maps_of(part.sources),
            most_tokens=arguments.tokens,
            most_s=arguments.seconds,
        )
        values = {"name": arguments.source, **msgspec.to_builtins(found)}
        if arguments.json:
            print_json(values)
        else:
            _print([values], explain=arguments.explain)
        return ExitCode.OK
    sources: dict[str, SourceProfile] = {}
    silent = arguments.json or arguments.quiet
    with progress_bar(len(catalog.sources), unit="source", title="measuring", silent=silent) as bar:
        for name in catalog.sources:
            sources[name] = _measured_apart(arguments, name)
            bar.update()
    profile = profile_of(catalog, part.seed, sources)
    path = write_profile(catalog.directory, profile)
    rows = [{"name": name, **msgspec.to_builtins(one)} for name, one in sources.items()]
    if arguments.json:
        print_json({"file": path, "catalog": profile.catalog, "transforms": profile.transforms, "sources": rows})
    else:
        _print(rows, explain=arguments.explain)
        print(f"\nwrote {path}")
    return ExitCode.OK


def _measured_apart(arguments: argparse.Namespace, name: str) -> SourceProfile:
    """Measure a source in another process: `torchmix profile RECIPE --source NAME --json`."""
    numbers = ["--seconds", str(arguments.seconds), "--tokens", str(arguments.tokens)]
    words = ["profile", str(arguments.recipe), "--source", name, "--json", *numbers]
    executable = get_executable() or sys.executable
    command = [executable, "-c", _CODE, json.dumps(words), json.dumps(sys.path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    try:
        values = json.loads(done.stdout)
    except ValueError:
        values = {}
    if done.returncode or "name" not in values:
        reason = values.get("error", {}).get("message") or f"the process that measured it has ended:\n{done.stderr}"
        raise SourceUnreadable(f"source {name!r} cannot be measured: {reason}")
    del values["name"]
    return msgspec.convert(values, SourceProfile)


def _print(rows: Sequence[dict[str, Any]], *, explain: bool) -> None:
    cells = []
    for row in rows:
        tokens = max(1, row["tokens"])
        cells.append(
            (
                row["name"],
                f"{row['busy_ns'] / tokens:,.4g} ms",
                f"{row['cpu_ns'] / tokens:,.4g} ms",
                f"{row['read_bytes'] / max(1, row['sent_bytes']):.3g}",
                f"{row['sent_bytes'] / tokens:.3g} B",
                bytes_text(row["state_bytes"]),
                bytes_text(row["window_bytes"]),
                count_text(row["tokens"]),
            )
        )
    print_table(COLUMNS, cells, explain=explain)
    if of_items := _cells_of_items(rows):
        print()
        print_table(ITEM_COLUMNS, of_items, explain=explain)


def _cells_of_items(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each source and kind of items, those that cost most a token first."""
    texts = [row for row in rows if not row["items"]] or rows
    of_text = sum(row["busy_ns"] for row in texts) / max(1, sum(row["tokens"] for row in texts))
    lines = []
    for row in rows:
        for kind, one in row["items"].items():
            count = max(1, one["items"])
            of_token = (one["read_ns"] + one["decode_ns"]) / max(1, one["tokens"])
            cells = (
                row["name"],
                kind,
                f"{one['read_ns'] / count / 1e6:,.3g} ms",
                f"{one['decode_ns'] / count / 1e6:,.3g} ms",
                f"{of_token / 1e3:,.4g} us",
                f"{of_token / of_text:,.3g} x" if of_text else "",
                bytes_text(one["file_bytes"] // count),
                bytes_text(one["unit_bytes"] // count),
                count_text(one["items"]),
            )
            lines.append((-of_token, cells))
    return [cells for _, cells in sorted(lines)]
