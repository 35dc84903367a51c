"""A few of the trial's rows on every run."""

from __future__ import annotations

import pytest

from tests.pairs.columns import is_valid
from tests.trials.triples import random_row, try_row


@pytest.mark.parametrize("number", range(4))
def test_random_rows_hold_what_the_matrix_asks(number: int) -> None:
    assert "failed" not in try_row(1, number)


def test_rows_follow_from_seed_and_number() -> None:
    assert random_row(3, 8) == random_row(3, 8) != random_row(3, 10)
    assert is_valid(random_row(3, 8))
