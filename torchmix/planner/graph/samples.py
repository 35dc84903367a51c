"""Samples -> (rank, microbatch) by any method, at any level; `balance.py` has the one that recipes use most.

Every bin has exactly the samples of a microbatch, since the stages of a pipeline need one shape; what costs more than
hash order is not taken.

    level   may change                              keeps
    both    rank and microbatch of a sample         nothing
    bucket  its rank                                its microbatch
    bin     its microbatch                          its rank: the batch of a rank stays what it is
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import PlanError
from torchmix.native import calls
from torchmix.native.load import array_of, run
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import (
    BalanceReport,
    CostModel,
    Placement,
    in_hash_order,
    in_rows,
    small_at_both_ends,
)
from torchmix.planner.methods import (
    BALANCE_METHODS,
    BalanceMethod,
    OwnMethod,
    deal_to_groups,
    groups_of_bins,
    lower_bound_of,
    objective_of,
    sums_of_bins,
)

Level = Literal["both", "bucket", "bin"]
Microbatches = Literal["unimodal", "descending", "keep"]


class SampleBalance(msgspec.Struct, frozen=True, kw_only=True):
    """How samples are balanced."""

    method: str | OwnMethod = "rows"
    """A key of `BALANCE_METHODS`, `none`, or the user's."""
    level: Level = "both"
    objective: str = "rows"
    microbatches: Microbatches = "unimodal"
    group_size: int | None = None
    """Ranks of a group, inside which samples are balanced; None: all ranks are one."""
    cap: int | None = None
    """Most bytes of a bin."""

    @property
    def built_in(self) -> BalanceMethod | None:
        """The row of a built-in method; None: the method is the user's."""
        return BALANCE_METHODS[self.method] if isinstance(self.method, str) else None


def place_samples(
    cost: Int64Array, memory: Int64Array, layout: Layout, options: SampleBalance
) -> tuple[Placement, BalanceReport]:
    """Place the samples of a step.

    Args:
        cost: int64 [G].
        memory: int64 [G] bytes of each sample; zeros where no cap is given.
        layout: What the samples are placed on.
        options: How.

    Raises:
        PlanError: A bin exceeds the cap, or the user's method breaks a rule.
    """
    plain = in_hash_order(len(cost), layout)
    hash_order_cost = _judged(cost, plain, layout, options)
    placement = plain if options.method == "none" else _placed(cost, memory, plain, layout, options)
    placed = _judged(cost, placement, layout, options)
    took_hash_order = placed > hash_order_cost
    if took_hash_order:
        placement, placed = plain, hash_order_cost
    if options.cap is not None:
        _check_cap(memory, placement, layout, options.cap)
    report = BalanceReport(
        cost=placed,
        hash_order_cost=hash_order_cost,
        lower_bound=lower_bound_of(
            cost, layout.dp, len(cost) // layout.row_samples, options.objective, stages=layout.pp
        ),
        took_hash_order=took_hash_order,
    )
    return placement, report


# --- The same in one native call, from the pieces on: for the methods that recipes use most.


class NativePlaces:
    """Places samples as `place_samples` does; equal bit for bit."""

    def __init__(self, cost: CostModel, options: SampleBalance) -> None:
        """Take what samples cost, and how they are balanced: by a method of `calls.PLACE_METHODS`, at level `both`."""
        self._cost = cost
        self._words = {
            "method": calls.PLACE_METHODS[str(options.method)],
            "objective": calls.PLACE_OBJECTIVES[options.objective],
            "microbatches": calls.PLACE_MICROBATCHES[options.microbatches],
        }

    @staticmethod
    def have(options: SampleBalance) -> bool:
        """Whether samples that are balanced so can be placed by it."""
        is_known = options.method in calls.PLACE_METHODS and options.objective in calls.PLACE_OBJECTIVES
        return is_known and options.level == "both" and options.group_size is None and options.cap is None

    def __call__(
        self, tokens: Int64Array, sample: Int64Array, *, num_samples: int, length: int, layout: Layout
    ) -> tuple[Placement, BalanceReport, Int64Array]:
        """Place the samples of a step.

        Args:
            tokens: [n] of each piece.
            sample: [n] sample of each piece, ascending.
            num_samples, length: Samples of the global batch, and tokens per sample.
            layout: What the samples are placed on.

        Returns:
            Also int64 [G, 3]: rank, microbatch and slot of each sample.
        """
        layout.num_microbatches(num_samples)
        placed, digested = np.empty((3, num_samples), np.int64), np.empty((num_samples, 3), np.int64)
        work = np.empty(calls.PLACE_WORK * num_samples, np.int64)
        call = calls.PlaceSamples(
            tokens=array_of(tokens, np.int64),
            sample=array_of(sample, np.int64),
            placed=array_of(placed, np.int64),
            digested=array_of(digested, np.int64),
            work=array_of(work, np.int64),
            per_token=self._cost.per_token,
            per_pair=self._cost.per_pair,
            whole_sample=self._cost.whole_sample,
            length=length,
            dp=layout.dp,
            micro_batch_size=layout.micro_batch_size,
            stages=layout.pp,
            **self._words,
        )
        run(call)
        placed.flags.writeable = False  # what is planned is not altered
        rank, microbatch, slot = placed
        report = BalanceReport(
            cost=call.cost,
            hash_order_cost=call.hash_order_cost,
            lower_bound=call.lower_bound,
            took_hash_order=bool(call.took_hash_order),
        )
        places = Placement(dp_rank_of_sample=rank, microbatch_of_sample=microbatch, slot_of_sample=slot)
        return places, report, digested


def _placed(
    cost: Int64Array, memory: Int64Array, plain: Placement, layout: Layout, options: SampleBalance
) -> Placement:
    if options.group_size is not None and options.group_size < layout.dp and options.level != "bin":
        return _in_groups(cost, memory, plain, layout, options)
    built_in = options.built_in
    if options.level == "both" and built_in is not None and built_in.whole is not None:
        return built_in.whole(cost, layout, microbatches=options.microbatches)
    num_rows = layout.num_microbatches(len(cost))
    if options.level == "bucket":
        rank, row = _other_ranks(cost, memory, plain.microbatch_of_sample, layout, options), plain.microbatch_of_sample
        return _placement(rank, row, num_rows)
    if options.level == "bin":
        rank, row = plain.dp_rank_of_sample, _other_rows(cost, memory, plain.dp_rank_of_sample, layout, options)
    else:
        bin_of_sample = _shared_out(cost, memory, layout.dp, num_rows, layout.micro_batch_size, options)
        if built_in is None:
            rank, row = np.divmod(bin_of_sample, num_rows)
        else:  # bins of like cost go to the same microbatch of all ranks
            of_bin = in_rows(
                sums_of_bins(cost, bin_of_sample, layout.dp * num_rows), Layout(dp=layout.dp), microbatches="keep"
            )
            rank, row = of_bin.dp_rank_of_sample[bin_of_sample], of_bin.microbatch_of_sample[bin_of_sample]
    return _placement(rank, _in_time(cost, rank, row, layout.dp, num_rows, options.microbatches), num_rows)


def _other_ranks(
    cost: Int64Array, memory: Int64Array, row: Int64Array, layout: Layout, options: SampleBalance
) -> Int64Array:
    """Rank of each sample; those of a row stay together."""
    rank = np.empty(len(cost), np.int64)
    total = np.zeros(layout.dp, np.int64)
    for number in range(int(row.max()) + 1):
        mine = np.flatnonzero(row == number)
        bucket = _shared_out(cost[mine], memory[mine], layout.dp, 1, layout.micro_batch_size, options)
        if options.built_in is not None:
            # The costliest bucket of the row goes to the rank with the least cost so far.
            sums = sums_of_bins(cost[mine], bucket, layout.dp)
            rank_of_bucket = np.empty(layout.dp, np.int64)
            rank_of_bucket[np.argsort(-sums, kind="stable")] = np.argsort(total, kind="stable")
            bucket = rank_of_bucket[bucket]
        total += sums_of_bins(cost[mine], bucket, layout.dp)
        rank[mine] = bucket
    return rank


def _other_rows(
    cost: Int64Array, memory: Int64Array, rank: Int64Array, layout: Layout, options: SampleBalance
) -> Int64Array:
    """Row of each sample; those of a rank stay there. Costly rows of all ranks come first, and so meet."""
    row = np.empty(len(cost), np.int64)
    num_rows = len(cost) // layout.row_samples
    for number in range(layout.dp):
        mine = np.flatnonzero(rank == number)
        built_in = options.built_in
        if built_in is not None and built_in.samples_of_rank is not None:
            found = built_in.samples_of_rank(cost[mine], num_rows)
        else:
            found = _shared_out(cost[mine], memory[mine], 1, num_rows, layout.micro_batch_size, options)
        if built_in is not None:
            place = np.empty(num_rows, np.int64)
            place[np.argsort(-sums_of_bins(cost[mine], found, num_rows), kind="stable")] = np.arange(num_rows)
            found = place[found]
        row[mine] = found
    return row


def _shared_out(
    cost: Int64Array, memory: Int64Array, num_buckets: int, bins: int, items_per_bin: int, options: SampleBalance
) -> Int64Array:
    """Bin of each sample, with equal counts."""
    method, num_bins = options.method, num_buckets * bins
    if isinstance(method, OwnMethod):
        return method(cost, memory, num_buckets=num_buckets, bins=bins, items_per_bin=items_per_bin, cap=options.cap)
    return BALANCE_METHODS[method].samples(cost, num_bins)


def _in_groups(
    cost: Int64Array, memory: Int64Array, plain: Placement, layout: Layout, options: SampleBalance
) -> Placement:
    """Samples are dealt to groups of neighbouring ranks by cost, then balanced inside each."""
    assert options.group_size is not None
    group_of_rank = groups_of_bins(layout.dp, options.group_size)
    num_rows = len(cost) // layout.row_samples
    if options.level == "bucket":
        group = np.empty(len(cost), np.int64)
        for number in range(num_rows):
            mine = np.flatnonzero(plain.microbatch_of_sample == number)
            group[mine] = deal_to_groups(cost[mine], group_of_rank)
    else:
        group = deal_to_groups(cost, group_of_rank)
    rank, row = np.empty(len(cost), np.int64), np.empty(len(cost), np.int64)
    for number in range(int(group_of_rank.max()) + 1):
        mine, ranks = np.flatnonzero(group == number), np.flatnonzero(group_of_rank == number)
        inner = Layout(dp=len(ranks), micro_batch_size=layout.micro_batch_size, pp=layout.pp)
        ungrouped = SampleBalance(
            method=options.method, level=options.level, microbatches=options.microbatches, cap=options.cap
        )
        if options.level == "bucket":
            rank[mine] = ranks[
                _other_ranks(cost[mine], memory[mine], plain.microbatch_of_sample[mine], inner, ungrouped)
            ]
            row[mine] = plain.microbatch_of_sample[mine]
            continue
        placed = _placed(cost[mine], memory[mine], in_hash_order(len(mine), inner), inner, ungrouped)
        rank[mine], row[mine] = ranks[placed.dp_rank_of_sample], placed.microbatch_of_sample
    return _placement(rank, row, num_rows)


def _in_time(
    cost: Int64Array, rank: Int64Array, row: Int64Array, dp: int, num_rows: int, microbatches: Microbatches
) -> Int64Array:
    """Microbatch of each sample: rows in the order in which they are computed."""
    if microbatches == "keep":
        return row
    of_row = sums_of_bins(cost, row * dp + rank, num_rows * dp).reshape(num_rows, dp).max(axis=1)
    place = np.arange(num_rows) if microbatches == "descending" else small_at_both_ends(num_rows)
    microbatch_of_row = np.empty(num_rows, np.int64)
    microbatch_of_row[np.argsort(-of_row, kind="stable")] = place
    return microbatch_of_row[row]


def _placement(rank: Int64Array, microbatch: Int64Array, num_rows: int) -> Placement:
    place = rank * num_rows + microbatch
    order = np.argsort(place, kind="stable")
    slot = np.empty(len(place), np.int64)
    slot[order] = np.arange(len(place)) - np.searchsorted(place[order], place[order])
    return Placement(dp_rank_of_sample=rank, microbatch_of_sample=microbatch, slot_of_sample=slot)


def _judged(cost: Int64Array, placement: Placement, layout: Layout, options: SampleBalance) -> int:
    num_rows = len(cost) // layout.row_samples
    place = placement.dp_rank_of_sample * num_rows + placement.microbatch_of_sample
    bins = sums_of_bins(cost, place, layout.dp * num_rows).reshape(layout.dp, num_rows)
    return objective_of(bins, options.objective, stages=layout.pp)


def _check_cap(memory: Int64Array, placement: Placement, layout: Layout, cap: int) -> None:
    num_rows = len(memory) // layout.row_samples
    place = placement.dp_rank_of_sample * num_rows + placement.microbatch_of_sample
    held = sums_of_bins(memory, place, layout.dp * num_rows)
    if held.max() > cap:
        rank, microbatch = divmod(int(held.argmax()), num_rows)
        sample = int(np.flatnonzero(place == held.argmax())[memory[place == held.argmax()].argmax()])
        raise PlanError(
            f"microbatch {microbatch} of rank {rank} takes {int(held.max())} bytes, its sample {sample} alone "
            f"{int(memory[sample])}; the cap is {cap}, and a microbatch has {layout.micro_batch_size} samples: raise "
            f"the cap, or lower micro_batch_size or batch.length"
        )
