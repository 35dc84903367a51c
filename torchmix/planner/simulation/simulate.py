"""Predicted times of steps: a plan beside what jobs do without one.

In: plans of steps. Out: for each way to place them the time of a step, by the costs of the samples alone. Must hold:
each assumption is in ASSUMPTIONS, which stands wherever a time does. Cost: milliseconds a step for a thousand ranks.

Two jobs are timed. In one, ranks meet at the end of the step: data parallelism with or without a pipeline. In the other
they meet in each microbatch, as with FSDP or with experts that are spread over ranks; then a microbatch takes as long
as that of the slowest rank.
"""

from __future__ import annotations

import msgspec
import numpy as np

from torchmix.planner.cost import CostModel
from torchmix.planner.plan import StepPlan
from torchmix.planner.simulation.pipeline import BACKWARD, pipeline_time
from torchmix.planner.simulation.rivals import ORDERS, ways_of
from torchmix.recipe.structs import Packing

ASSUMPTIONS = (
    "A rank computes what the plan counts, at a constant rate: the layers' matrices for each token of a sample, with "
    "padding, and attention for each pair of tokens of a document.",
    "A backward pass takes twice its forward pass. Nothing is computed again.",
    "Layers are even over the stages of the pipeline, and the output layer with them. Its schedule is 1F1B, without "
    "interleaving.",
    "Sending, reducing, the optimizer, starting kernels and waiting for data cost nothing, and so does whatever tensor "
    "and context parallelism send: work is divided by their sizes.",
    "Arrival order needs more samples for the same documents; its time is that of as many tokens as the plan's.",
    "Modules compute their items before the backbone, on ranks that meet then; the encoder's backward counts likewise.",
)
"""What every predicted time assumes."""


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
    num_steps: int = 0
    lengths: set[int] = msgspec.field(default_factory=set)
    """Tokens of a sample, of all lengths that steps had."""
    ideal: float = 0.0
    """If all ranks had equal work and pipelines no bubble."""
    even: float = 0.0
    """If all microbatches of all ranks were equal: `ideal` with the pipeline's bubble."""
    times: dict[str, Times] = msgspec.field(default_factory=lambda: {name: Times() for name in ORDERS})
    modules: dict[str, ModuleTimes] = msgspec.field(default_factory=dict)

    def add(self, plan: StepPlan) -> None:
        """Count a step."""
        stages, num_rows = plan.layout.pp, plan.num_microbatches
        ways = ways_of(plan, self.cost, self.packing, self.seed)
        ours = ways["this plan"]
        ideal = (1 + BACKWARD) * float(ours.cost.sum()) / plan.layout.dp / stages
        self.num_steps += 1
        self.lengths.add(plan.length)
        self.ideal += ideal
        self.even += ideal * (num_rows + stages - 1) / num_rows
        for name, way in ways.items():
            times, of_tokens = self.times[name], ours.tokens / max(way.tokens, 1)
            bins = way.cost.astype(np.float64)
            times.at_end += of_tokens * float(pipeline_time(bins, stages).max())
            times.each_microbatch += of_tokens * float(pipeline_time(bins.max(axis=0)[None], stages)[0])
            times.tokens += ours.tokens
        for name, module in plan.item_modules.items():
            sums, factor = self.modules.setdefault(name, ModuleTimes()), 1 + BACKWARD
            sums.hash_order += factor * module.balance.hash_order_cost
            sums.plan += factor * module.balance.cost
            sums.ideal += factor * float(module.cost_of_item.sum()) / module.num_consumers
