"""A method of balance is a row in each half of one table."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from torchmix.errors import RecipeError
from torchmix.parallel.place_tree import Layout
from torchmix.planner.graph.samples import SampleBalance, place_samples
from torchmix.planner.methods import BALANCE_METHODS, BalanceMethod
from torchmix.recipe.modules import METHODS, MethodWords, check_balance, check_modules
from torchmix.recipe.structs import Balance, Module


def in_turn(cost: NDArray[np.int64], num_bins: int) -> NDArray[np.int64]:
    """Bins of equally many items, whatever they cost."""
    return np.arange(len(cost)) % num_bins


def test_both_halves_have_the_same_methods() -> None:
    assert set(METHODS) == {*BALANCE_METHODS, "none"}


@pytest.mark.parametrize("name", sorted(BALANCE_METHODS))
def test_each_method_fills_bins_as_its_row_says(name: str) -> None:
    method, cost = BALANCE_METHODS[name], np.random.default_rng(5).integers(1, 1000, 24)
    for deal in (method.samples, method.samples_of_rank or method.samples):
        assert np.bincount(deal(cost, 6), minlength=6).tolist() == [4] * 6
    assert set(method.items(cost, 6).tolist()) == set(range(6))


def test_a_new_method_is_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="'in_turn' is not one of rows, lpt"):
        check_balance(Balance(method="in_turn"))
    monkeypatch.setitem(METHODS, "in_turn", MethodWords(places_items=False))
    monkeypatch.setitem(BALANCE_METHODS, "in_turn", BalanceMethod(samples=in_turn, items=in_turn))
    check_balance(Balance(method="in_turn"))
    with pytest.raises(RecipeError, match="'in_turn' is not one of lpt, karmarkar_karp, zigzag, none"):
        check_modules({"vision": Module(items="image", method="in_turn")}, ())
    cost, memory = np.array([5, 9, 1, 3]), np.zeros(4, np.int64)
    placed, _ = place_samples(cost, memory, Layout(dp=2), SampleBalance(method="in_turn", level="bucket"))
    assert sorted(placed.dp_rank_of_sample.tolist()) == [0, 0, 1, 1]
