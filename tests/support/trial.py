"""The command line of a trial: a seed, a count, and one JSON, which a run continues where the last one stopped."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TryOne = Callable[[int, int], Any]
"""Seed and number -> what was found, as JSON has it."""


def trial_parser(about: str | None, *, count: int, out: str | None = None) -> argparse.ArgumentParser:
    """The options that all trials have.

    Args:
        about: What the help says.
        count: How many are tried by default.
        out: The file of what was found; None: it must be named.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--out", type=Path, default=out, required=out is None, help="one JSON")
    return parser


def continued(
    asked: argparse.Namespace,
    try_one: TryOne,
    *,
    label: str = "",
    again: Callable[[Any], bool] = lambda found: False,
    most: int | None = None,
) -> dict[str, Any]:
    """Try those that the file does not have yet, and write what was found after each.

    Args:
        asked: What `trial_parser` has parsed.
        try_one: Tries one; what it raises ends the run, which names the one.
        label: The label of what is found with other options than seed and number.
        again: Whether one that was found is tried once more.
        most: How many there are; None: any number.

    Returns:
        What the file has: by `SEED/NUMBER` and the label.
    """
    done: dict[str, Any] = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    for number in range(asked.count if most is None else min(asked.count, most)):
        key = f"{asked.seed}/{number}{label}"
        if key in done and not again(done[key]):
            continue
        try:
            done[key] = try_one(asked.seed, number)
        except BaseException:
            print(f"{key} has failed", file=sys.stderr)
            raise
        write_whole(asked.out, done)
    return done


def write_whole(path: Path, found: Any) -> None:
    """Replace a file of JSON in one step, so that a trial that is ended leaves the whole file of before."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def whole(asked: argparse.Namespace, run: Callable[[int, int], dict[str, Any]]) -> dict[str, Any]:
    """What one run of seed and count has found; it is written, and printed."""
    found = {"seed": asked.seed, "count": asked.count, **run(asked.seed, asked.count)}
    write_whole(asked.out, found)
    print(json.dumps(found, indent=1))
    return found
