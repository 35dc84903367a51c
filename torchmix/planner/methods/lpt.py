"""Longest processing time: the costliest item first, each to the bin with the least cost so far.

In: int64 costs. Out: the bin of each item. Must hold: the result is that of a heap, item by item; ties go to the lower
item, then to the lower bin. Cost: about 60 ns an item, and one sort of the bins for as many items as there are bins.
The heap alone takes 450 ns an item.

The heap's choices are made for a run of items at once. With bins sorted by load, item i goes to bin i for as long as no
bin that has just been given an item is lower than the next one. Where runs are short, the heap itself goes on.

Source: Graham 1969. The vectorised form is our own.
"""

from __future__ import annotations

import heapq

import numpy as np

from torchmix.array_types import Int64Array

SHORT_RUN = 6
"""A run of fewer items is slower than the heap."""
HEAP_RUN = 64
"""Items that the heap places before runs are tried again."""


def lpt(cost: Int64Array, num_bins: int) -> Int64Array:
    """Bin of each item.

    Args:
        cost: int64 [n], 0 or more; their sum fits 63 bits.
        num_bins: 1 or more.

    Returns:
        int64 [n] in [0, num_bins).
    """
    order = np.argsort(-cost, kind="stable")
    sorted_cost = cost[order]
    bin_of_sorted = np.empty(len(cost), np.int64)
    load = np.zeros(num_bins, np.int64)
    at = 0
    while at < len(cost):
        by_load = np.argsort(load, kind="stable")
        width = min(num_bins, len(cost) - at)
        ascending = load[by_load[:width]]
        given = ascending + sorted_cost[at : at + width]
        lowest_given = np.minimum.accumulate(given)[:-1]
        # A bin that was given an item may be equal to the next one: the heap would ask which number is lower.
        is_over = ascending[1:] >= lowest_given
        run = int(np.argmax(is_over)) + 1 if is_over.any() else width
        bins = by_load[:run]
        bin_of_sorted[at : at + run] = bins
        load[bins] = given[:run]
        at += run
        if run < min(SHORT_RUN, num_bins):
            at = _by_heap(sorted_cost, bin_of_sorted, load, at, min(at + HEAP_RUN, len(cost)))
    bin_of_item = np.empty(len(cost), np.int64)
    bin_of_item[order] = bin_of_sorted
    return bin_of_item


def _by_heap(cost: Int64Array, bin_of_item: Int64Array, load: Int64Array, start: int, stop: int) -> int:
    """Place the items from `start` to `stop`; fills `bin_of_item` and `load`, returns `stop`."""
    if start >= stop:
        return start
    heap = list(zip(load.tolist(), range(len(load)), strict=True))
    heapq.heapify(heap)
    chosen: list[int] = []
    for value in cost[start:stop].tolist():
        lowest, number = heap[0]
        heapq.heapreplace(heap, (lowest + value, number))
        chosen.append(number)
        load[number] = lowest + value
    bin_of_item[start:stop] = chosen
    return stop
