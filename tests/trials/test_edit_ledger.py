"""A few of the trial's histories on every run."""

from __future__ import annotations

import pytest

from tests.trials.edit_ledger import try_history


@pytest.mark.parametrize("number", [1, 16, 19, 35])
def test_nothing_is_lost_or_repeated_over_edits(number: int) -> None:
    found = try_history(1, number)
    assert found["edits"] and found["documents"] > 0 and found["prefixes"] > 0


@pytest.mark.parametrize("number", [3, 19])
def test_streams_run_out_and_samples_grow_over_edits(number: int) -> None:
    assert try_history(5, number, ends=True)["edits"]


@pytest.mark.parametrize("number", [45])
def test_a_stream_that_comes_and_goes_inside_an_epoch(number: int) -> None:
    assert try_history(2, number)["edits"]
