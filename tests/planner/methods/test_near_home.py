"""LPT with items at home: the limit, and how many stay."""

from __future__ import annotations

import numpy as np
import pytest

from torchmix.planner.methods import lpt, lpt_near_home, sums_of_bins


@pytest.mark.parametrize("part", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_the_limit_holds(seed: int, part: float) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        num_homes, width = int(rng.integers(1, 12)), int(rng.integers(1, 5))
        num_bins, num_items = num_homes * width, int(rng.integers(0, 400))
        cost = rng.lognormal(6, float(rng.uniform(0, 2)), num_items).astype(np.int64)
        home = rng.integers(0, num_homes, num_items)
        found = lpt_near_home(cost, home, num_bins, num_homes, part=part)
        if found is None:
            assert part < 0.05, "some room suffices"
            continue
        assert not num_items or (found.min() >= 0 and found.max() < num_bins)
        largest = int(sums_of_bins(cost, lpt(cost, num_bins), num_bins).max(initial=0))
        assert sums_of_bins(cost, found, num_bins).max(initial=0) <= largest + int(largest * part)


def test_most_items_stay_where_homes_are_alike() -> None:
    rng = np.random.default_rng(1)
    cost, home = rng.lognormal(6, 0.7, 4_000).astype(np.int64), rng.integers(0, 16, 4_000)
    plain, near = lpt(cost, 64), lpt_near_home(cost, home, 64, 16, part=0.05)
    assert near is not None
    at_home = [float((found // 4 == home).mean()) for found in (plain, near)]
    assert at_home[0] < 0.1 and at_home[1] > 0.85, at_home


def test_equal_homes_keep_all() -> None:
    cost, home = np.full(32, 5), np.arange(32) % 4
    found = lpt_near_home(cost, home, 8, 4, part=0.0)
    assert found is not None and np.array_equal(found // 2, home)
