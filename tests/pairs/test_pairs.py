"""Every pair of values of recipes, modes, layouts and moments of a run, in small jobs with three judges."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pairs.columns import BLOCKS, COLUMNS, Block, Row, all_pairs, is_valid, pairs_of
from tests.pairs.covering import REAL, covering, read_rows, row_with
from tests.pairs.keys import NOT_HERE, kinds, kinds_in
from tests.pairs.project import make_project
from tests.pairs.refusals import PAGE, page, refused, row_of
from tests.pairs.runner import run_row
from torchmix.errors import TorchmixError
from torchmix.recipe.load import load_recipe

ROWS = read_rows()


def name_of(row: Row, real: bool) -> str:
    """A name that says what a row is about."""
    return " ".join(row[name] for name in ("mode", "layout", "life", "rows")) + " in processes" * real


@pytest.mark.parametrize(
    ("row", "real"),
    [pytest.param(*each, id=name_of(*each), marks=[pytest.mark.system] * each[1]) for each in ROWS],
)
def test_a_row_gives_what_the_files_and_the_rules_say(row: Row, real: bool, tmp_path: Path) -> None:
    verdict = run_row(row, tmp_path, real=real)
    assert verdict.tokens and verdict.spans
    assert verdict.images or row["module"] != "image" or row["parts"] == "own"
    assert verdict.items or row["module"] != "document" or row["module_sources"] == "given"


def test_every_pair_stands_in_a_row_or_cannot_stand() -> None:
    assert all(is_valid(row) for row, _ in ROWS)
    covered = {pair for row, _ in ROWS for pair in pairs_of(row)}
    missing = [pair for pair in all_pairs() if pair not in covered and row_with(dict(pair)) is not None]
    assert not missing, f"run python -m tests.pairs.covering: {missing[:5]}"


def test_rows_that_are_there_are_kept_and_one_that_is_taken_away_is_made_up_for() -> None:
    rows = [row for row, _ in ROWS]
    made = covering(rows[1:])
    assert {pair for row in made for pair in pairs_of(row)} == {pair for row in rows for pair in pairs_of(row)}
    assert len(made) <= len(rows) + 1 and sum(row in rows for row in made) > len(rows) // 2


def test_every_key_of_the_recipe_has_each_kind_of_value_in_a_row(tmp_path: Path) -> None:
    found = set()
    for number, (row, _) in enumerate(ROWS):
        found |= set(kinds_in(load_recipe(make_project(tmp_path / str(number), row).path)))
    assert kinds() - found == set(NOT_HERE), "a new key, or a new kind of value, needs a column"


@pytest.mark.parametrize("block", refused(), ids=lambda block: " ".join(block.of))
def test_what_is_not_supported_is_refused_by_name(block: Block, tmp_path: Path) -> None:
    row = row_of(block)
    assert [other for other in BLOCKS if other.holds(row)] == [block], "one fault in a row"
    with pytest.raises(TorchmixError) as error:
        run_row(row, tmp_path)
    assert re.search(block.refused, str(error.value))


def test_the_page_of_combinations_is_made_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.pairs.refusals"


def test_modes_layouts_and_lives_stand_beside_real_processes() -> None:
    real = [row for row, is_real in ROWS if is_real]
    assert len(real) == REAL and {row["mode"] for row in real} == {"node", "job", "remote", "node_remote"}
    assert {row["life"] for row in real} == set(COLUMNS["life"])
