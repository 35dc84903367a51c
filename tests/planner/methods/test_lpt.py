"""LPT by runs against LPT by a heap, and the cap of memory."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from torchmix.errors import PlanError
from torchmix.planner.methods import lpt, lpt_within, sums_of_bins


def by_heap(cost: np.ndarray, num_bins: int) -> np.ndarray:
    heap = [(0, number) for number in range(num_bins)]
    found = np.empty(len(cost), np.int64)
    for item in sorted(range(len(cost)), key=lambda i: (-int(cost[i]), i)):
        load, number = heapq.heappop(heap)
        found[item] = number
        heapq.heappush(heap, (load + int(cost[item]), number))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_runs_give_what_a_heap_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(25):
        num_items, num_bins = int(rng.integers(0, 700)), int(rng.integers(1, 90))
        kinds = (
            rng.integers(0, 5, num_items),  # many ties, and zeros
            rng.lognormal(8, 2, num_items).astype(np.int64),  # few dominate
            rng.integers(10**6, 10**6 + 50, num_items),
            np.full(num_items, 7),
        )
        for cost in kinds:
            assert np.array_equal(lpt(cost.astype(np.int64), num_bins), by_heap(cost, num_bins))


def test_a_cap_holds_where_cost_alone_would_break_it() -> None:
    cost = np.array([100, 1, 1, 1, 1, 1], np.int64)
    memory = np.array([1, 10, 10, 10, 10, 10], np.int64)
    assert sums_of_bins(memory, lpt(cost, 2), 2).max() == 50
    found = lpt_within(cost, memory, 2, 31)
    assert sums_of_bins(memory, found, 2).max() <= 31


def test_what_does_not_fit_is_named() -> None:
    cost = np.array([1, 9], np.int64)
    with pytest.raises(PlanError, match="item 1 takes 64 bytes, the cap of one consumer is 63"):
        lpt_within(cost, np.array([1, 64], np.int64), 4, 63)
    with pytest.raises(
        PlanError, match=r"item \d takes 40 bytes, and the emptiest of 2 consumers has room for 23 of 63"
    ):
        lpt_within(np.ones(3, np.int64), np.full(3, 40), 2, 63)
