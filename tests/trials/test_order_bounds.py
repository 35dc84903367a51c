"""A few of the trial's recipes on every run."""

from __future__ import annotations

import pytest

from tests.trials.order_bounds import try_recipe


@pytest.mark.parametrize("number", range(8))
def test_random_recipes_keep_the_bounds_of_the_order(number: int) -> None:
    found = try_recipe(5, number, steps=25)
    assert found["steps"] > 0 and 0 < found["drawn"] <= 1
