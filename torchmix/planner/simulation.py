"""Predicted times of steps: a plan beside what jobs do without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import OptionError
from torchmix.mixture.keys import hash_columns, named_key, order_by
from torchmix.parallel.place_tree import Layout
from torchmix.planner import pack
from torchmix.planner.balance import CostModel, Placement, in_hash_order
from torchmix.planner.contexts import RunCosts, least_work, loads_in_order, place_in_contexts
from torchmix.planner.graph.items import slots_of
from torchmix.planner.methods import equal_counts, sums_of_bins
from torchmix.planner.pack import Pieces
from torchmix.planner.plan import StepPlan
from torchmix.recipe.build import nearest
from torchmix.recipe.structs import Model, Packing

# --- Dimensions of well-known models, for simulations and for recipes to copy.
#
# The numbers are those of the published configuration.

MODELS = {
    "llama3-8b": Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256),
    "llama3-70b": Model(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256),
    "llama3-405b": Model(layers=126, hidden=16384, ffn=53248, heads=128, kv_heads=8, vocab=128256),
    "mistral-7b": Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32000),
    "mixtral-8x7b": Model(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32000, experts_per_token=2),
    "qwen2.5-7b": Model(layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, vocab=152064),
    "qwen2.5-32b": Model(layers=64, hidden=5120, ffn=27648, heads=40, kv_heads=8, vocab=152064),
    "qwen2.5-72b": Model(layers=80, hidden=8192, ffn=29568, heads=64, kv_heads=8, vocab=152064),
}


def named_model(name: str) -> Model:
    """The dimensions of a model.

    Raises:
        OptionError: There is no such name; says the nearest one.
    """
    if name not in MODELS:
        raise OptionError(
            f"--model {name!r} is not one of {', '.join(MODELS)}{nearest(name, tuple(MODELS))}; other dimensions go "
            f"into the recipe's balance.model"
        )
    return MODELS[name]


# --- 1F1B: how long a pipeline takes for microbatches of unlike cost.
#
# A stage computes one thing at a time, in the order of the schedule, as soon as what it needs is there; sending costs
# nothing. Cost: one array operation for each forward and backward of each stage, over all pipelines at once.
#
# Source: the non-interleaved schedule of Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.

BACKWARD = 2.0
"""Time of a backward pass over that of its forward pass."""


def pipeline_time(forward: NDArray[np.float64], stages: int) -> NDArray[np.float64]:
    """Time of each of n pipelines.

    Args:
        forward: [n, m] cost of the forward pass of each microbatch, of all stages together; each takes an equal part.
        stages: The number of stages of each pipeline, 1 or more.

    Returns:
        [n] in the unit of `forward`.
    """
    num_pipelines, num_microbatches = forward.shape
    part = forward.T / stages
    free = np.zeros((stages, num_pipelines))
    forward_end = np.zeros((stages, num_microbatches, num_pipelines))
    backward_end = np.zeros((stages, num_microbatches, num_pipelines))
    for stage, microbatch, is_backward in schedule_1f1b(stages, num_microbatches):
        if is_backward:
            last = stage == stages - 1
            ready = forward_end[stage, microbatch] if last else backward_end[stage + 1, microbatch]
            end = np.maximum(free[stage], ready) + BACKWARD * part[microbatch]
            backward_end[stage, microbatch] = end
        else:
            ready = forward_end[stage - 1, microbatch] if stage else free[stage]
            end = np.maximum(free[stage], ready) + part[microbatch]
            forward_end[stage, microbatch] = end
        free[stage] = end
    time: NDArray[np.float64] = free.max(axis=0)
    return time


@lru_cache(maxsize=16)
def schedule_1f1b(stages: int, num_microbatches: int) -> tuple[tuple[int, int, bool], ...]:
    """(stage, microbatch, is_backward) of all passes, each after those that it needs and those before on its stage."""
    order = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, num_microbatches)
        passes = [(microbatch, False) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            if microbatch + ahead < num_microbatches:
                passes.append((microbatch + ahead, False))
            passes.append((microbatch, True))
        order.append(passes)
    done: set[tuple[int, int, bool]] = set()
    place = [0] * stages
    found: list[tuple[int, int, bool]] = []
    while len(found) < 2 * stages * num_microbatches:
        for stage in range(stages):
            while place[stage] < len(order[stage]):
                microbatch, is_backward = order[stage][place[stage]]
                if is_backward:
                    needed = (stage + 1, microbatch, True) if stage < stages - 1 else (stage, microbatch, False)
                else:
                    needed = (stage - 1, microbatch, False)
                if needed not in done and (is_backward or stage):
                    break
                place[stage] += 1
                done.add((stage, microbatch, is_backward))
                found.append((stage, microbatch, is_backward))
    return tuple(found)


# --- The same step, as jobs without a plan would place it.
#
# Each way has the documents of the step. One that fits less into a batch has the first of them, and its tokens are
# said. Cost: a few array operations; next-fit is a loop over the pieces.

ORDERS = {
    "arrival order": "documents packed one after the other as they come, the next sample begun when one does not fit, "
    "and samples dealt to ranks in turn: a data loader without a plan",
    "hash order": "the plan's samples, which are packed best-fit, dealt to ranks in turn",
    "rank sums": "the plan's samples, shared out so that the sums of the ranks are alike; each rank takes its own in "
    "any order",
    "this plan": "the plan's samples, placed as the recipe says",
}
"""Ways to place a step, and what each does."""
OF_RUNS = {
    "hash order": "samples by number in runs of one size, the shortest that holds them all, a bin closed where the "
    "next sample does not fit: Megatron's dp_balanced",
    "this plan": "runs of ranks for each microbatch anew",
}
"""Likewise, where each document is shared by a run of ranks; beside them stand fixed sizes of runs."""


def meaning_of_order(name: str, *, has_runs: bool) -> str:
    """What a way to place a step does, by its name in a simulation."""
    if name.startswith(MEGATRONS):
        return "this scheduler of the installed Megatron, as it is, judged by the recipe's cost"
    fixed = (
        "runs of this many ranks alone, planned in the same way: a fixed context-parallel size; sizes that do not hold "
        "every document of these steps are left out"
    )
    return OF_RUNS.get(name, fixed) if has_runs else ORDERS[name]


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
        cost: The cost of the backbone.
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


MEGATRONS = "Megatron's "
"""How names of Megatron's schedulers begin among the ways."""
Rival = Callable[[Int64Array, RunCosts], Int64Array]
"""Tokens int64 [n] of samples, and costs -> int64 [microbatches, P] what each rank pays."""


def ways_of_runs(plan: StepPlan, costs: RunCosts, rivals: Mapping[str, Rival]) -> dict[str, Placed]:
    """The step of samples of any length in runs of ranks: planned, in runs of each fixed size that holds them, and as
    the rivals place it."""
    tokens, total = plan.pieces.tokens, int(plan.pieces.tokens.sum())
    assert plan.contexts is not None, "of a recipe with runs of ranks"
    found = {"hash order": Placed(cost=loads_in_order(tokens, costs).T, tokens=total)}
    for size in costs.sizes:
        if costs.num_ranks % size == 0 and int(costs.padded(tokens, size).max()) <= costs.rank_tokens * size:
            contexts, _ = place_in_contexts(tokens, replace(costs, sizes=(size,)))
            found[f"runs of {size}"] = Placed(cost=contexts.load_of_ranks(costs.num_ranks).T, tokens=total)
    for name, place in rivals.items():
        found[name] = Placed(cost=place(tokens, costs).T, tokens=total)
    found["this plan"] = Placed(cost=plan.contexts.load_of_ranks(costs.num_ranks).T, tokens=total)
    return found


def bins_of(cost: Int64Array, placement: Placement, layout: Layout) -> Int64Array:
    """int64 [dp, microbatches] cost of each bin."""
    num_rows = layout.num_microbatches(len(cost))
    place = placement.dp_rank_of_sample * num_rows + placement.microbatch_of_sample
    return sums_of_bins(cost, place, layout.dp * num_rows).reshape(layout.dp, num_rows)


def num_real(plan: StepPlan) -> int:
    """Samples of a step without the masked ones, which have the highest numbers."""
    return plan.capacity_tokens // plan.length


def work_of_samples(plan: StepPlan, cost: CostModel) -> int:
    """Cost of the samples of a step; masked ones are none that the step asks for."""
    of_sample = cost.of_samples(plan.pieces.tokens, plan.sample, num_samples=num_real(plan), length=plan.length)
    return int(of_sample.sum())


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
    """Tokens and sample of each piece, packed as they come, up to the step's number of samples, without masked ones.

    Returns:
        int64 [k], and int64 [k] ascending in [0, G).
    """
    pieces, num_samples = plan.pieces, num_real(plan)
    tie = hash_columns(named_key(seed, "arrival", plan.step), pieces.stream, pieces.epoch, pieces.row, pieces.start)
    if packing.method == "concat":
        cut = pack.concat(Pieces.empty(), pieces, tie, num_samples=num_samples, length=plan.length)
        return cut.pieces.tokens, cut.sample
    tokens = pieces.tokens[order_by(np.zeros_like(tie), tie, major_bits=0)]
    if packing.method == "pad":
        return tokens, np.arange(len(tokens))
    sample = next_fit(pack.aligned(tokens, packing.align_tokens), plan.length)
    inside = sample < num_samples
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


# --- The times of a plan and of what jobs do without one.
#
# Each assumption is in ASSUMPTIONS, which stands wherever a time does. Cost: milliseconds a step for a thousand ranks.
#
# Two jobs are timed. In one, ranks meet at the end of the step: data parallelism with or without a pipeline. In the
# other they meet in each microbatch, as with FSDP or with experts that are spread over ranks; then a microbatch takes
# as long as that of the slowest rank.

ASSUMPTIONS = (
    "A rank computes what the plan counts, at a constant rate: the layers' matrices for each token of a sample, with "
    "padding, and attention for each pair of tokens of a document.",
    "A backward pass takes twice its forward pass. Nothing is computed again.",
    "Layers are even over the stages of the pipeline, and the output layer with them. Its schedule is 1F1B, without "
    "interleaving.",
    "Where ranks share documents in runs, all orders count padding, and each token that ranks exchange as the recipe "
    "prices it; all ranks meet in each microbatch, and the ideal is each document in the run that suits it best.",
    "Sending, reducing, the optimizer, starting kernels and waiting for data cost nothing, and so does whatever tensor "
    "and context parallelism send: work is divided by their sizes.",
    "Arrival order needs more samples for the same documents; its time is that of as many tokens as the plan's.",
    "Modules compute their items before the backbone, on ranks that meet then; the encoder's backward counts likewise.",
)
"""What every predicted time assumes."""


def times_of_meeting(bins: Int64Array, stages: int) -> tuple[float, float]:
    """Times of a step whose ranks meet at its end, and of one whose ranks meet in each microbatch; int64 [ranks,
    microbatches] costs, in their unit."""
    costs = bins.astype(np.float64)
    return float(pipeline_time(costs, stages).max()), float(pipeline_time(costs.max(axis=0)[None], stages)[0])


class Times(msgspec.Struct, kw_only=True):
    """Sums over steps of one way to place them, in the unit of costs."""

    at_end: float = 0.0
    """Ranks meet at the end of the step."""
    each_microbatch: float = 0.0
    """Ranks meet in each microbatch."""
    tokens: int = 0


class ModuleTimes(msgspec.Struct, kw_only=True):
    """Sums over steps of the costliest consumer of a module, in the unit of the module's costs."""

    hash_order: float = 0.0
    plan: float = 0.0
    ideal: float = 0.0


class Simulation(msgspec.Struct, kw_only=True):
    """Sums over the steps added."""

    cost: CostModel
    packing: Packing
    seed: int
    runs: RunCosts | None = None
    """Costs of runs of ranks; None where each sample is computed by one replica."""
    rivals: dict[str, Rival] = msgspec.field(default_factory=dict)
    """Others who place steps in runs of ranks, by name."""
    num_steps: int = 0
    lengths: set[int] = msgspec.field(default_factory=set)
    """Tokens of a sample, of all lengths that steps had."""
    ideal: float = 0.0
    """If all ranks had equal work, no masked samples, and pipelines no bubble."""
    even: float = 0.0
    """If all microbatches of all ranks were equal: `ideal` with the pipeline's bubble."""
    times: dict[str, Times] = msgspec.field(default_factory=dict)
    """By way. A fixed size of runs that does not hold the samples of one of the steps is none of them."""
    modules: dict[str, ModuleTimes] = msgspec.field(default_factory=dict)

    def add(self, plan: StepPlan) -> None:
        """Count a step."""
        stages, num_rows = plan.layout.pp, plan.num_microbatches
        if self.runs is None:
            ways = ways_of(plan, self.cost, self.packing, self.seed)
            work, num_ranks = float(work_of_samples(plan, self.cost)), plan.layout.dp
        else:
            ways = ways_of_runs(plan, self.runs, self.rivals)
            work, num_ranks = float(least_work(plan.pieces.tokens, self.runs)), self.runs.num_ranks
        ours = ways["this plan"]
        ideal = (1 + BACKWARD) * work / num_ranks / stages
        self.num_steps += 1
        self.lengths.add(plan.length)
        self.ideal += ideal
        self.even += ideal * (num_rows + stages - 1) / num_rows
        names = [name for name in ways if name in self.times or self.num_steps == 1]
        self.times = {name: self.times.get(name, Times()) for name in names}
        for name, times in self.times.items():
            way = ways[name]
            of_tokens = ours.tokens / max(way.tokens, 1)
            at_end, in_each = times_of_meeting(way.cost, stages)
            times.at_end += of_tokens * (at_end if self.runs is None else in_each)  # runs meet in each
            times.each_microbatch += of_tokens * in_each
            times.tokens += ours.tokens
        for name, module in plan.item_modules.items():
            sums, factor = self.modules.setdefault(name, ModuleTimes()), 1 + BACKWARD
            sums.hash_order += factor * module.balance.hash_order_cost
            sums.plan += factor * module.balance.cost
            sums.ideal += factor * float(module.cost_of_item.sum()) / module.num_consumers
