"""First fit below a limit: never above LPT, near the bound with few items a bin; the bound is below every placement."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.support.native import native_or_not
from torchmix.errors import NativeError
from torchmix.native.calls import FitItems
from torchmix.native.load import array_of, num_calls, run
from torchmix.planner.methods import fitted, least_of_bins, lpt, lpt_or_fit, sums_of_bins


def costliest(cost: np.ndarray, bins: np.ndarray, num_bins: int) -> int:
    return int(sums_of_bins(cost, bins, num_bins).max())


def test_it_is_never_above_lpt_and_never_below_the_bound() -> None:
    rng = np.random.default_rng(1)
    num_better = 0
    for _ in range(150):
        num_items, num_bins = int(rng.integers(0, 90)), int(rng.integers(1, 30))
        for cost in (rng.integers(0, 6, num_items), rng.lognormal(8, 1, num_items).astype(np.int64)):
            found, plain = lpt_or_fit(cost, num_bins), lpt(cost, num_bins)
            assert found.shape == cost.shape and (not num_items or 0 <= found.min() <= found.max() < num_bins)
            least, here, there = least_of_bins(cost, num_bins), *(costliest(cost, x, num_bins) for x in (found, plain))
            assert least <= here <= there
            num_better += here < there
    assert num_better > 15


@pytest.mark.parametrize("items_of_bin", [2.6, 3, 4, 6])
def test_few_items_a_bin_come_within_two_percent_of_the_bound(items_of_bin: float) -> None:
    cost = np.random.default_rng(2).lognormal(10, 0.5, int(288 * items_of_bin)).astype(np.int64)
    assert costliest(cost, lpt_or_fit(cost, 288), 288) <= 1.02 * least_of_bins(cost, 288)


def test_the_bound_is_below_every_placement() -> None:
    rng = np.random.default_rng(4)
    num_met = 0
    for _ in range(40):
        num_items, num_bins = int(rng.integers(0, 7)), int(rng.integers(1, 4))
        cost = rng.integers(0, 9, num_items) * int(rng.integers(1, 4))
        every = [np.array(bins, np.int64) for bins in product(range(num_bins), repeat=num_items)]
        best = min(costliest(cost, bins, num_bins) for bins in every)
        assert least_of_bins(cost, num_bins) <= best
        num_met += least_of_bins(cost, num_bins) == best
    assert num_met > 30
    assert least_of_bins(np.array([8, 7, 6, 5]), 3) == 11, "two of four items share a bin"
    assert least_of_bins(np.array([60, 60, 60, 60, 30, 30, 30]), 2) == 180, "chunks are not divided"


def test_the_native_call_equals_its_reference() -> None:
    rng, before, num_none = np.random.default_rng(5), num_calls().get("tm_fit", 0), 0
    for _ in range(120):
        num_homes, width, num_items = (int(n) for n in (rng.integers(1, 9), rng.integers(1, 7), rng.integers(0, 80)))
        cost, home = rng.integers(0, 40, num_items), rng.integers(0, num_homes, num_items)
        words = {"limit": int(rng.integers(0, 200)), "takes_first": bool(rng.integers(0, 2))}
        words |= {"home": home, "num_homes": num_homes} if rng.integers(0, 2) else {}
        answers = []
        for is_native in (True, False):
            with native_or_not(is_native):
                answers.append(fitted(cost, num_homes * width, **words))
        assert (answers[0] is None) == (answers[1] is None), words
        num_none += answers[0] is None
        assert answers[0] is None or np.array_equal(*answers), words
    assert num_calls()["tm_fit"] == before + 120 and 0 < num_none < 120


@pytest.mark.parametrize(
    ("forged", "told"),
    [
        ({"cost": [3, -1]}, "entry 1: a cost below 0"),
        ({"home": [0, 2]}, "entry 1: no such home"),
        ({"home": [0, -1]}, "entry 1: no such home"),
        ({"home": [0]}, "not a place per item"),
        ({"bin": [0]}, "not a place per item"),
        ({"least": [0] * 7}, "not a node per bin"),
        ({"least": [0] * 16}, "not a node per bin"),
        ({"num_bins": 3}, "homes do not divide the bins"),
        ({"num_bins": 0}, "homes do not divide the bins"),
        ({"num_bins": 2**60}, "homes do not divide the bins"),
        ({"num_homes": 0}, "homes do not divide the bins"),
        ({"limit": -1}, "a limit out of bounds"),
        ({"limit": 2**63 - 1}, "a limit out of bounds"),
    ],
)
def test_what_is_out_of_bounds_is_refused(forged: dict[str, object], told: str) -> None:
    words: dict[str, object] = {"cost": [3, 1], "home": [0, 1], "bin": [0, 0], "least": [0] * 8}
    words |= {"num_bins": 4, "num_homes": 2, "limit": 9, "takes_first": 1} | forged
    kept = {name: np.array(value, np.int64) for name, value in words.items() if isinstance(value, list)}
    with native_or_not(True), pytest.raises(NativeError, match=told):
        run(FitItems(**{**words, **{name: array_of(array, np.int64) for name, array in kept.items()}}))
