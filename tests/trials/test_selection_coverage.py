"""A few of the trial's recipes on every run."""

from __future__ import annotations

import pytest

from tests.trials.selection_coverage import try_recipe


@pytest.mark.parametrize("number", range(7))
def test_each_stream_gives_its_rows_once_and_nothing_else(number: int) -> None:
    found = try_recipe(5, number)
    assert "refused" in found or found["rows"]["train"] > 0
