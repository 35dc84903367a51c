"""Longest processing time, with items at home where that costs little: rows that stay on their rank need no network.

In: int64 costs, and the home of each item: a range of bins. Out: the bin of each item, or None. Must hold: no bin
exceeds the limit, which is the costliest bin of plain LPT and the given part more; where this greedy cannot keep it,
the result is None. Cost: some 2 us an item.

The costliest item comes first. It goes to the least loaded bin of its home if that stays within the limit, else to the
least loaded of all. Small items come last and fill what is left, so the limit mostly holds with all homes nearly full.
"""

from __future__ import annotations

import heapq
from fractions import Fraction

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.planner.methods.bins import sums_of_bins
from torchmix.planner.methods.lpt import lpt


def lpt_near_home(
    cost: Int64Array, home: Int64Array, num_bins: int, num_homes: int, *, part: float | Fraction
) -> Int64Array | None:
    """Bin of each item.

    Args:
        cost: int64 [n], 0 or more; their sum fits 62 bits.
        home: int64 [n] in [0, num_homes); home h has bins h * num_bins // num_homes to (h + 1) * num_bins // num_homes.
        num_bins: 1 or more, a multiple of `num_homes`.
        num_homes: 1 or more.
        part: How much costlier than plain LPT the costliest bin may be; 0.05 is 5 %.

    Returns:
        int64 [n] in [0, num_bins); None where the limit cannot be kept.
    """
    largest = int(sums_of_bins(cost, lpt(cost, num_bins), num_bins).max(initial=0))
    limit = largest + int(largest * Fraction(part))
    width = num_bins // num_homes
    load = [0] * num_bins
    of_home = [[(0, number) for number in range(h * width, (h + 1) * width)] for h in range(num_homes)]
    of_all = [(0, number) for number in range(num_bins)]
    found = np.empty(len(cost), np.int64)
    order = np.argsort(-cost, kind="stable")
    for item, value, at_home in zip(order.tolist(), cost[order].tolist(), home[order].tolist(), strict=True):
        lowest, number = _least(of_home[at_home], load)
        if lowest + value > limit:
            lowest, number = _least(of_all, load)
            if lowest + value > limit:
                return None
        found[item] = number
        load[number] = lowest + value
        entry = (lowest + value, number)
        heapq.heappush(of_home[number // width], entry)
        heapq.heappush(of_all, entry)
    return found


def _least(heap: list[tuple[int, int]], load: list[int]) -> tuple[int, int]:
    """The least loaded bin; entries of bins whose load has grown are dropped."""
    while load[heap[0][1]] != heap[0][0]:
        heapq.heappop(heap)
    return heap[0]
