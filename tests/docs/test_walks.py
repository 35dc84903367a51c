"""The walks of docs/architecture.md: what passes through many files meets each of them once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FILE = re.compile(r"`([\w/]+\.py)`")


def test_a_walk_stops_at_no_file_twice() -> None:
    tables = [table for table in re.split(r"\n\n", PAGE) if table.startswith("| stop | what it does |")]
    assert len(tables) == 4, "a state, a recipe, a step and a page"
    for table in tables:
        stops = [file for row in table.split("\n")[2:] for file in FILE.findall(row.split("|")[1])]
        beside = [file for row in table.split("\n")[2:] for file in FILE.findall(row.split("|")[2])]
        assert len(stops) >= 6 and len({*stops}) == len(stops), sorted(stops)
        assert not {*stops} & {*beside}, "what a stop calls is no stop of its own"
        assert all((ROOT / "torchmix" / file).is_file() for file in (*stops, *beside))
