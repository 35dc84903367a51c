"""Samples -> (rank, microbatch): who computes what, when.

In: the cost of each sample of a global batch. Out: its data-parallel rank, microbatch and slot in it, and a report.
Must hold: every sample is placed once; every rank has the same number of samples; samples are not changed. Cost: 0.4 us
a sample.

Each microbatch of a synchronous step takes as long as its slowest rank. So samples of similar cost go into the same
microbatch on all ranks (method `rows`). Equal sums per rank alone gain almost nothing.
"""

from __future__ import annotations

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.parallel.layout import Layout


class Placement(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where each sample goes. Arrays int64 [G]."""

    dp_rank_of_sample: Int64Array
    microbatch_of_sample: Int64Array
    slot_of_sample: Int64Array
    """Index in the microbatch; samples of a microbatch are in ascending order."""


class BalanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a step: the sum over microbatches of the slowest rank's cost."""

    cost: int
    """Cost of the placement."""
    hash_order_cost: int
    """Cost without balancing: samples in the order of their numbers, which are a hash."""
    lower_bound: int
    """No placement of these samples is cheaper than this."""
    took_hash_order: bool = False
    """Whether the method's placement was dearer than hash order, which was taken instead."""
    left_text: bool = False
    """Whether items could not stay near their text within the tolerance, and were placed without a look at it."""

    @property
    def ratio(self) -> float:
        """Cost over its lower bound, 1 or more."""
        return self.cost / self.lower_bound

    @property
    def hash_order_ratio(self) -> float:
        """The value of `ratio` without balancing."""
        return self.hash_order_cost / self.lower_bound


def in_hash_order(num_samples: int, layout: Layout) -> Placement:
    """Place samples by their number, microbatch by microbatch."""
    layout.num_microbatches(num_samples)
    sample = np.arange(num_samples, dtype=np.int64)
    return Placement(
        dp_rank_of_sample=sample // layout.micro_batch_size % layout.dp,
        microbatch_of_sample=sample // layout.row_samples,
        slot_of_sample=sample % layout.micro_batch_size,
    )


def in_rows(cost_of_sample: Int64Array, layout: Layout, *, microbatches: str = "unimodal") -> Placement:
    """Place samples of like cost into the same microbatch of all ranks.

    Samples are sorted by cost and cut into blocks of dp samples. This minimises the sum, over blocks, of the largest
    cost in a block (an exchange argument). Inside a block the most expensive sample goes to the rank with the lowest
    cost in this microbatch so far, then with the lowest cost in the step. With micro_batch_size 1 no placement has
    cheaper rows. The microbatches are then ordered with the small ones at both ends. That order is best for a 1F1B
    pipeline, and all orders are equal without one.

    Args:
        cost_of_sample: int64 [G]; ties go to the lower sample number, then the lower rank.
        layout: What the samples are placed on.
        microbatches: `unimodal`, with small ones at both ends; else the costliest row is the first.
    """
    num_samples = len(cost_of_sample)
    num_microbatches, dp = layout.num_microbatches(num_samples), layout.dp
    by_cost = np.argsort(-cost_of_sample, kind="stable")
    costs = cost_of_sample[by_cost].tolist()
    load = [(0, 0)] * dp  # cost in this microbatch, cost in the step
    dealt: list[int] = []
    for start in range(0, num_samples, dp):
        if start % layout.row_samples == 0:
            load = [(0, total) for _, total in load]
        least_loaded = sorted(range(dp), key=load.__getitem__)
        for dp_rank, cost in zip(least_loaded, costs[start : start + dp], strict=True):
            here, total = load[dp_rank]
            load[dp_rank] = here + cost, total + cost
        dealt += least_loaded
    rank, microbatch = np.empty(num_samples, np.int64), np.empty(num_samples, np.int64)
    rank[by_cost] = dealt
    in_time = small_at_both_ends(num_microbatches) if microbatches == "unimodal" else np.arange(num_microbatches)
    microbatch[by_cost] = np.repeat(in_time, layout.row_samples)
    bin_of_sample = rank * num_microbatches + microbatch
    slot = np.empty(num_samples, np.int64)
    slot[np.argsort(bin_of_sample, kind="stable")] = np.arange(num_samples) % layout.micro_batch_size
    return Placement(dp_rank_of_sample=rank, microbatch_of_sample=microbatch, slot_of_sample=slot)


def small_at_both_ends(count: int) -> Int64Array:
    """Microbatch of each row, for rows in descending order of cost: the most expensive row is in the middle."""
    rows = np.arange(count, dtype=np.int64)
    in_time = np.concatenate([rows[1::2][::-1], rows[0::2]])
    microbatch_of_row = np.empty(count, np.int64)
    microbatch_of_row[in_time] = rows
    return microbatch_of_row


def report(cost_of_sample: Int64Array, placement: Placement, layout: Layout) -> BalanceReport:
    """Cost of a placement against its lower bound and against hash order."""
    plain = in_hash_order(len(cost_of_sample), layout)
    total = int(cost_of_sample.sum())
    return BalanceReport(
        cost=_slowest_rank_sum(cost_of_sample, placement, layout.dp),
        hash_order_cost=_slowest_rank_sum(cost_of_sample, plain, layout.dp),
        lower_bound=max(-(-total // layout.dp), int(cost_of_sample.max()), 1),
    )


def _slowest_rank_sum(cost_of_sample: Int64Array, placement: Placement, dp: int) -> int:
    num_microbatches = int(placement.microbatch_of_sample.max()) + 1
    bins = np.zeros(num_microbatches * dp, np.int64)
    np.add.at(bins, placement.microbatch_of_sample * dp + placement.dp_rank_of_sample, cost_of_sample)
    return int(bins.reshape(num_microbatches, dp).max(axis=1).sum())
