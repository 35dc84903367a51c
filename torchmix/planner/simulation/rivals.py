"""The same step, as jobs without a plan would place it.

In: a plan, and what documents cost. Out: int64 [dp, microbatches] cost of each bin, by name. Must hold: each way has
the documents of the step, or the first of them where it fits less into a batch; then the tokens that it has are said.
Cost: a few array operations; next-fit is a loop over the pieces.
"""

from __future__ import annotations

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.keys import hash_columns, named_key, order_by
from torchmix.parallel.layout import Layout
from torchmix.planner import pack
from torchmix.planner.balance import Placement, in_hash_order
from torchmix.planner.cost import CostModel
from torchmix.planner.graph.items import slots_of
from torchmix.planner.methods.bins import sums_of_bins
from torchmix.planner.methods.dealing import equal_counts
from torchmix.planner.pack import Pieces
from torchmix.planner.plan import StepPlan
from torchmix.recipe.structs import Packing

ORDERS = {
    "arrival order": "documents packed one after the other as they come, the next sample begun when one does not fit, "
    "and samples dealt to ranks in turn: a data loader without a plan",
    "hash order": "the plan's samples, which are packed best-fit, dealt to ranks in turn",
    "rank sums": "the plan's samples, shared out so that the sums of the ranks are alike; each rank takes its own in "
    "any order",
    "this plan": "the plan's samples, placed as the recipe says",
}
"""Ways to place a step, and what each does."""


class Placed(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step in one of these ways."""

    cost: Int64Array
    """int64 [dp, microbatches]."""
    tokens: int
    """In the samples, without padding."""


def ways_of(plan: StepPlan, cost: CostModel, packing: Packing, seed: int) -> dict[str, Placed]:
    """The step in each of ORDERS.

    Args:
        plan: The step.
        cost: Of the backbone.
        packing: The recipe's.
        seed: The recipe's.
    """
    layout, length, tokens = plan.layout, plan.length, int(plan.pieces.tokens.sum())
    of_sample = cost.of_samples(plan.pieces.tokens, plan.sample, num_samples=plan.num_samples, length=length)
    arrived_tokens, arrived_sample = in_arrival_order(plan, packing, seed)
    of_arrived = cost.of_samples(arrived_tokens, arrived_sample, num_samples=plan.num_samples, length=length)
    plain = in_hash_order(plan.num_samples, layout)
    return {
        "arrival order": Placed(cost=bins_of(of_arrived, plain, layout), tokens=int(arrived_tokens.sum())),
        "hash order": Placed(cost=bins_of(of_sample, plain, layout), tokens=tokens),
        "rank sums": Placed(cost=bins_of(of_sample, by_rank_sums(of_sample, layout), layout), tokens=tokens),
        "this plan": Placed(cost=bins_of(of_sample, plan.placement, layout), tokens=tokens),
    }


def bins_of(cost: Int64Array, placement: Placement, layout: Layout) -> Int64Array:
    """int64 [dp, microbatches] cost of each bin."""
    num_rows = layout.num_microbatches(len(cost))
    place = placement.dp_rank_of_sample * num_rows + placement.microbatch_of_sample
    return sums_of_bins(cost, place, layout.dp * num_rows).reshape(layout.dp, num_rows)


def by_rank_sums(cost: Int64Array, layout: Layout) -> Placement:
    """Equal counts and like sums for the ranks; each takes its samples in ascending order."""
    rank = equal_counts(cost, layout.dp)
    turn = slots_of(rank)
    return Placement(
        dp_rank_of_sample=rank,
        microbatch_of_sample=turn // layout.micro_batch_size,
        slot_of_sample=turn % layout.micro_batch_size,
    )


def in_arrival_order(plan: StepPlan, packing: Packing, seed: int) -> tuple[Int64Array, Int64Array]:
    """Tokens and sample of each piece, packed as they come, up to the step's number of samples.

    Returns:
        int64 [k], and int64 [k] ascending in [0, G).
    """
    pieces = plan.pieces
    tie = hash_columns(named_key(seed, "arrival", plan.step), pieces.stream, pieces.epoch, pieces.row, pieces.start)
    if packing.method == "concat":
        cut = pack.concat(Pieces.empty(), pieces, tie, num_samples=plan.num_samples, length=plan.length)
        return cut.pieces.tokens, cut.sample
    tokens = pieces.tokens[order_by(np.zeros_like(tie), tie, major_bits=0)]
    if packing.method == "pad":
        return tokens, np.arange(len(tokens))
    sample = next_fit(pack.aligned(tokens, packing.align_tokens), plan.length)
    inside = sample < plan.num_samples
    return tokens[inside], sample[inside]


def next_fit(tokens: Int64Array, length: int) -> Int64Array:
    """int64 [n] sample of each piece: the last one, or a new one where it does not fit."""
    ends = np.cumsum(tokens)
    sample = np.empty(len(tokens), np.int64)
    first, number = 0, 0
    while first < len(tokens):
        before = int(ends[first - 1]) if first else 0
        stop = max(int(np.searchsorted(ends, before + length, side="right")), first + 1)
        sample[first:stop] = number
        first, number = stop, number + 1
    return sample
