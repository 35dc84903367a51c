"""Bins of any number of items: how full they are, and the items that a cap of memory keeps out.

In: cost and memory of items, and their bins. Out: sums, and a placement that respects the cap. Must hold: a cap is
hard. Cost: 1 us an item where the cap matters.
"""

from __future__ import annotations

import heapq

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError


def sums_of_bins(values: Int64Array, bin_of_item: Int64Array, num_bins: int) -> Int64Array:
    """int64 [num_bins] sums of `values`."""
    sums = np.zeros(num_bins, np.int64)
    np.add.at(sums, bin_of_item, values)
    return sums


def lpt_within(cost: Int64Array, memory: Int64Array, num_bins: int, cap: int) -> Int64Array:
    """Longest processing time, each item to the least loaded bin that has room for it.

    Args:
        cost: int64 [n], 0 or more.
        memory: int64 [n] bytes of each item.
        num_bins: 1 or more.
        cap: Most bytes of a bin.

    Raises:
        PlanError: An item exceeds the cap, or no bin has room for one; names the item, its bytes and what would fit.
    """
    if len(memory) and memory.max() > cap:
        item = int(memory.argmax())
        raise PlanError(f"item {item} takes {int(memory[item])} bytes, the cap of one consumer is {cap}")
    room = [cap] * num_bins
    heap = [(0, number) for number in range(num_bins)]
    bin_of_item = np.empty(len(cost), np.int64)
    # Large items first where memory is short: the cost of an item rises with its bytes in every model of ours.
    for item in np.lexsort((np.arange(len(cost)), -memory, -cost)).tolist():
        needed, passed = int(memory[item]), []
        while heap and room[heap[0][1]] < needed:
            passed.append(heapq.heappop(heap))
        if not heap:
            raise PlanError(
                f"item {item} takes {needed} bytes, and the emptiest of {num_bins} consumers has room for {max(room)} "
                f"of {cap}; all items take {int(memory.sum())} bytes, so a cap of {-(-int(memory.sum()) // num_bins)} "
                f"is the least that might do"
            )
        load, number = heap[0]
        heapq.heapreplace(heap, (load + int(cost[item]), number))
        room[number] -= needed
        bin_of_item[item] = number
        for each in passed:
            heapq.heappush(heap, each)
    return bin_of_item
