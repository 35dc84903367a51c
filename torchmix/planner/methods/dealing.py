"""Items dealt to bins in turn, costliest first: equal counts, zigzags, and groups of neighbouring bins.

In: costs. Out: the bin of each item. Must hold: counts differ by at most one, and are equal where the bins divide the
items; ties go to the lower item, then to the lower bin. Cost: one sort, and a sort of the bins for each block of items.

Where all bins hold as many items, no method is better than the spread of costs allows: few large items beside many
small ones stay apart only with bins of any size.
"""

from __future__ import annotations

import numpy as np

from torchmix.array_types import Int64Array


def by_descending_cost(cost: Int64Array) -> Int64Array:
    """Numbers of the items, costliest first; equal ones in ascending order."""
    order: Int64Array = np.argsort(-cost, kind="stable")
    return order


def zigzag(cost: Int64Array, num_bins: int) -> Int64Array:
    """Deal items forwards, then backwards, and so on: 0 1 2 2 1 0 0 1 2."""
    turn, place = np.divmod(np.arange(len(cost), dtype=np.int64), num_bins)
    bin_of_item = np.empty(len(cost), np.int64)
    bin_of_item[by_descending_cost(cost)] = np.where(turn % 2 == 0, place, num_bins - 1 - place)
    return bin_of_item


def equal_counts(cost: Int64Array, num_bins: int) -> Int64Array:
    """Longest processing time with equal counts: of each block of items the costliest goes to the least loaded bin.

    Source: the folding of balanced LPT, Coffman, Frederickson and Lueker 1984.
    """
    order = by_descending_cost(cost)
    load = np.zeros(num_bins, np.int64)
    bin_of_item = np.empty(len(cost), np.int64)
    for start in range(0, len(cost), num_bins):
        block = order[start : start + num_bins]
        least = np.argsort(load, kind="stable")[: len(block)]
        bin_of_item[block] = least
        load[least] += cost[block]
    return bin_of_item


def groups_of_bins(num_bins: int, group_size: int) -> Int64Array:
    """int64 [num_bins] group of each bin: neighbours of at most `group_size`, as even as they can be."""
    num_groups = -(-num_bins // group_size)
    groups: Int64Array = np.arange(num_bins, dtype=np.int64) * num_groups // num_bins
    return groups


def deal_to_groups(cost: Int64Array, group_of_bin: Int64Array) -> Int64Array:
    """int64 [n] group of each item: of each block of as many items as bins, each group gets as many as it has bins.

    Groups take turns inside a block, and every other block is dealt backwards, so that all get like costs.
    """
    num_bins = len(group_of_bin)
    size = np.bincount(group_of_bin)
    start = np.cumsum(size) - size
    place = (np.arange(num_bins) - start[group_of_bin]) * 2 + 1  # the middle of a bin's part of its group
    turns = group_of_bin[np.lexsort((group_of_bin, place * num_bins // size[group_of_bin]))]
    block, at = np.divmod(np.arange(len(cost), dtype=np.int64), num_bins)
    group_of_item = np.empty(len(cost), np.int64)
    group_of_item[by_descending_cost(cost)] = turns[np.where(block % 2 == 0, at, num_bins - 1 - at)]
    return group_of_item
