"""Items at home below a limit: the limit, how many stay, and what is tried where few bins have room."""

from __future__ import annotations

import numpy as np
import pytest

from torchmix.planner.methods import fitted, lpt_or_fit, near_home, sums_of_bins


def some_items(seed: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Costs and homes of items, and numbers of bins and homes."""
    rng = np.random.default_rng(seed)
    num_homes, width, num_items = int(rng.integers(1, 12)), int(rng.integers(1, 5)), int(rng.integers(0, 400))
    cost = rng.lognormal(6, float(rng.uniform(0, 2)), num_items).astype(np.int64)
    return cost, rng.integers(0, num_homes, num_items), num_homes * width, num_homes


def limit_of(cost: np.ndarray, num_bins: int, part: float) -> int:
    largest = int(sums_of_bins(cost, lpt_or_fit(cost, num_bins), num_bins).max())
    return largest + int(largest * part)


@pytest.mark.parametrize("part", [0.0, 0.05, 0.5])
def test_the_limit_holds(part: float) -> None:
    num_found = 0
    for seed in range(60):
        cost, home, num_bins, num_homes = some_items(seed)
        limit = limit_of(cost, num_bins, part)
        for found in near_home(cost, home, num_bins, num_homes, limit):
            num_found += 1
            assert len(found) == len(cost) and (not len(found) or 0 <= found.min() <= found.max() < num_bins)
            assert sums_of_bins(cost, found, num_bins).max() <= limit
    assert num_found == 120 if part >= 0.5 else num_found > 20


def test_most_items_stay_where_homes_are_alike() -> None:
    rng = np.random.default_rng(1)
    cost, home = rng.lognormal(6, 0.7, 4_000).astype(np.int64), rng.integers(0, 16, 4_000)
    plain, (near, _) = lpt_or_fit(cost, 64), near_home(cost, home, 64, 16, limit_of(cost, 64, 0.05))
    at_home = [float((found // 4 == home).mean()) for found in (plain, near)]
    assert at_home[0] < 0.1 and at_home[1] > 0.85, at_home


def test_equal_homes_keep_all() -> None:
    cost, home = np.full(32, 5), np.arange(32) % 4
    assert all(np.array_equal(found // 2, home) for found in near_home(cost, home, 8, 4, 20))


def test_first_fit_finds_room_where_the_least_loaded_bins_have_none() -> None:
    """Four items a bin: gaps in all bins are smaller than an item."""
    rng = np.random.default_rng(1)
    cost, home = rng.lognormal(10, 0.3, 256).astype(np.int64), np.sort(rng.integers(0, 8, 256))
    limit = limit_of(cost, 64, 0.01)
    assert fitted(cost, 64, limit, takes_first=False, home=home, num_homes=8) is None
    [found] = near_home(cost, home, 64, 8, limit)
    assert (found // 8 == home).mean() > 0.75
