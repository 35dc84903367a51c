"""Ways to balance the steps of a run, or to share documents over ranks, tried on the same samples: which would take the
least predicted time.

What is tried changes the placement of samples alone, so every way trains on the same global batches in the same order.
Times are those of `simulation.py`, with all that it assumes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from torchmix.array_types import Int64Array
from torchmix.parallel.place_tree import Layout
from torchmix.planner.contexts import RunCosts, least_work, place_in_contexts
from torchmix.planner.graph.samples import SampleBalance, place_samples
from torchmix.planner.methods import BALANCE_METHODS, OwnMethod
from torchmix.planner.simulation import BACKWARD, bins_of, pipeline_time

Meet = Literal["step", "microbatch"]
LEVELS: tuple[Literal["both", "bucket", "bin"], ...] = ("both", "bucket", "bin")
ORDERS_IN_TIME: tuple[Literal["unimodal", "descending", "keep"], ...] = ("unimodal", "descending", "keep")


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How samples are balanced, and into microbatches of how many samples."""

    method: str
    level: Literal["both", "bucket", "bin"] = "both"
    objective: Literal["rows", "max", "rank", "pipeline"] = "rows"
    """What decides whether a step stays in hash order instead."""
    microbatches: Literal["unimodal", "descending", "keep"] = "unimodal"
    group_size: int | None = None
    micro_batch_size: int = 1

    def differs_from(self, other: Way) -> int:
        """How many of its settings are others."""
        return sum(getattr(self, name) != getattr(other, name) for name in self.__struct_fields__)


class Tried(msgspec.Struct, kw_only=True):
    """What one way has come to, over the steps added."""

    way: Way
    time: float = 0.0
    """Sum of the predicted times, in the unit of costs."""
    most_bin_tokens: int = 0
    """Most tokens of a microbatch, padding included."""
    hash_order_steps: int = 0
    """Steps in which the way was worse than hash order by the objective, so that hash order was used."""


def ways_to_try(
    today: Way, layout: Layout, meet: Meet, *, num_samples: Sequence[int], micro_batch_sizes: Sequence[int]
) -> list[Way]:
    """Today's way first, then all others, each once.

    Args:
        today: The recipe's settings; its method may be one of the user's, which is tried as it is.
        layout: Ranks.
        meet: As for `Tuning`; the others are judged by the time that follows from it.
        num_samples: Samples of a global batch, of each stage of a ramp.
        micro_batch_sizes: To try; those that divide no batch are left out.
    """
    sizes = [size for size in micro_batch_sizes if all(count % (layout.dp * size) == 0 for count in num_samples)]
    objective: Literal["rows", "rank", "pipeline"]
    objective = "rows" if meet == "microbatch" else "pipeline" if layout.pp > 1 else "rank"
    groups = [None, *(size for size in (today.group_size,) if size is not None)]
    found = [today, *(replace(today, micro_batch_size=size) for size in sizes)]
    for size in sizes:
        found.append(Way(method="none", micro_batch_size=size))
        for method in BALANCE_METHODS:
            for level in LEVELS:
                for order in ORDERS_IN_TIME:
                    for group in groups if level != "bin" else [None]:
                        found.append(
                            Way(
                                method=method,
                                level=level,
                                objective=objective,
                                microbatches=order,
                                group_size=group,
                                micro_batch_size=size,
                            )
                        )
    return list(dict.fromkeys(found))


class Tuning:
    """Sums over the steps added, of each way."""

    def __init__(self, ways: Sequence[Way], layout: Layout, meet: Meet) -> None:
        """Begin without steps.

        Args:
            ways: What is tried, today's way first.
            layout: Ranks; its microbatch size is that of each way instead.
            meet: Where ranks wait for each other: at the end of a `step`, or in each `microbatch` (FSDP, or experts
                that are spread over ranks).
        """
        self.meet: Meet = meet
        self.layout = layout
        self.tried = [Tried(way=way) for way in ways]
        self._todays_method = ways[0].method
        self._own = OwnMethod(self._todays_method, "balance.method") if ":" in self._todays_method else None
        self.ideal = 0.0
        """If all ranks had equal work and pipelines no bubble."""
        self.num_steps = 0

    def add(self, cost: Int64Array, length: int) -> None:
        """Count a step.

        Args:
            cost: int64 [G] of each sample of the step.
            length: Tokens of a sample.
        """
        layout = self.layout
        memory = np.zeros_like(cost)
        for one in self.tried:
            way = one.way
            ranks = dataclasses.replace(layout, micro_batch_size=way.micro_batch_size)
            options = SampleBalance(
                method=self._own or way.method if way.method == self._todays_method else way.method,
                level=way.level,
                objective=way.objective,
                microbatches=way.microbatches,
                group_size=way.group_size,
            )
            placement, report = place_samples(cost, memory, ranks, options)
            bins = bins_of(cost, placement, ranks).astype(np.float64)
            meeting = bins.max(axis=0)[None] if self.meet == "microbatch" else bins
            one.time += float(pipeline_time(meeting, layout.pp).max())
            one.most_bin_tokens = max(one.most_bin_tokens, way.micro_batch_size * length)
            one.hash_order_steps += report.took_hash_order
        self.ideal += (1 + BACKWARD) * float(cost.sum()) / layout.dp / layout.pp
        self.num_steps += 1

    def best(self) -> list[Tried]:
        """The fastest first, one of each time: times closer than a thousandth of the ideal are alike.

        Of ways with like times there is the one that changes the fewest of today's settings, then the first tried.
        """
        today = self.tried[0].way
        alike: dict[int, Tried] = {}
        for one in sorted(self.tried, key=lambda one: one.way.differs_from(today)):
            alike.setdefault(round(1000 * one.time / self.ideal), one)
        return [alike[time] for time in sorted(alike)]


# --- Runs of ranks that share documents: how many tokens a rank may hold, and which sizes runs may have.


class ContextWay(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the runs of a step."""

    rank_tokens: int
    sizes: tuple[int, ...]
    """Ranks of a run; of one size alone, a fixed context-parallel size."""


class TriedContext(msgspec.Struct, kw_only=True):
    """What one way has come to, over the steps added."""

    way: ContextWay
    time: float = 0.0
    """Sum of the predicted times, in the unit of costs."""
    most_rank_tokens: int = 0
    """Most tokens that a rank holds in a microbatch, padding included."""
    exchanged_tokens: int = 0
    """Tokens that ranks get from other ranks of their runs, summed over ranks, padding included."""
    num_microbatches: int = 0


def context_ways_to_try(today: RunCosts, longest: int) -> list[ContextWay]:
    """Today's way first, then others, each once: half and twice the tokens of a rank, all sizes and each size alone.

    Args:
        today: Costs and room of the recipe's runs.
        longest: Most tokens of a document; ways that do not hold it are left out.
    """
    found = [ContextWay(rank_tokens=today.rank_tokens, sizes=today.sizes)]
    for rank_tokens in (today.rank_tokens, 2 * today.rank_tokens, today.rank_tokens // 2):
        fixed = [(size,) for size in today.sizes if today.num_ranks % size == 0]
        for sizes in (today.sizes, *fixed):
            costs = replace(today, rank_tokens=rank_tokens, sizes=sizes)
            if rank_tokens and costs.holds(longest, sizes[-1]):
                found.append(ContextWay(rank_tokens=rank_tokens, sizes=sizes))
    return list(dict.fromkeys(found))


class ContextTuning:
    """Sums over the steps added, of each way; all ranks meet in each microbatch."""

    def __init__(self, ways: Sequence[ContextWay], today: RunCosts) -> None:
        """Begin without steps; today's way comes first."""
        self.tried = [TriedContext(way=way) for way in ways]
        self._today = today
        self.ideal = 0.0
        """If each document were in the run that suits it best, and all ranks had equal work."""
        self.num_steps = 0

    def add(self, tokens: Int64Array) -> None:
        """Count a step. `tokens`: int64 [n] of each of its samples."""
        for one in self.tried:
            costs = replace(self._today, rank_tokens=one.way.rank_tokens, sizes=one.way.sizes)
            contexts, _ = place_in_contexts(tokens, costs)
            loads = contexts.load_of_ranks(costs.num_ranks).max(axis=1).astype(np.float64)
            one.time += float(pipeline_time(loads[None], costs.stages)[0])
            of_rank = contexts.tokens_of_bin // contexts.size_of_bin
            one.most_rank_tokens = max(one.most_rank_tokens, int(of_rank.max()))
            one.exchanged_tokens += int((contexts.tokens_of_bin * (contexts.size_of_bin - 1)).sum())
            one.num_microbatches += contexts.num_microbatches
        costs = self._today
        self.ideal += (1 + BACKWARD) * float(least_work(tokens, costs)) / costs.num_ranks / costs.stages
        self.num_steps += 1

    def best(self) -> list[TriedContext]:
        """The fastest first; of like times, as in `Tuning.best`, today's, then the one that exchanges least."""
        today = self.tried[0]
        alike: dict[int, TriedContext] = {}
        for one in sorted(self.tried, key=lambda one: (one is not today, one.exchanged_tokens)):
            alike.setdefault(round(1000 * one.time / self.ideal), one)
        return [alike[time] for time in sorted(alike)]
