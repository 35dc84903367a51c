"""Ways to place the steps of a run, tried on the same samples: the predicted time of each, its memory and its traffic.

A way is what it changes, such as `{"balance.method": "rows", "job.micro_batch_size": 2}`. The strategy that a run with
these changes would have places it, and its time is that of `simulation.py`, with all that it assumes. Placement alone
changes, so every way trains on the same global batches in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace as replace_fields
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from torchmix.errors import PlanError, TopologyError
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import encoder_cost
from torchmix.planner.contexts import least_work, run_costs
from torchmix.planner.graph.dgraph import DrawnStep
from torchmix.planner.graph.strategy import StrategyModel, activations, backbone_cost, strategy_of
from torchmix.planner.methods import BALANCE_METHODS, sums_of_bins
from torchmix.planner.plan import StepPlan
from torchmix.planner.simulation import BACKWARD, bins_of, times_of_meeting, work_of_samples
from torchmix.recipe.modules import METHODS, cost_key_of
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import lengths_of, most_length, samples_of_step, stages_of
from torchmix.recipe.structs import Model, Module

Meet = Literal["step", "microbatch"]
"""Where ranks wait for each other: at the end of a step, or in each microbatch, as with FSDP."""
Changes = Mapping[str, Any]
"""New values by key: of the recipe's `balance`, `balance.context` and `modules.NAME`, and of the `job`'s sizes."""
LEVELS = ("both", "bucket", "bin")
ORDERS_IN_TIME = ("unimodal", "descending", "keep")
NEAR_TEXT = "5%"
"""Tried where items may be computed away from their text."""


class Job(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What steps are placed by."""

    part: Part
    layout: Layout

    def value(self, key: str) -> Any:
        """What it has at a key of `Changes`."""
        found: Any = self._root(key)
        for name in key.split(".")[1:]:
            found = found[name] if isinstance(found, Mapping) else getattr(found, name)
        return found

    def changed(self, changes: Changes) -> Job:
        """With new values."""
        job = self
        for key, value in changes.items():
            room, *path = key.split(".")
            new = _replaced(job._root(key), path, value)
            if room == "job":
                job = replace(job, layout=new)
            else:
                job = replace(job, part=replace(job.part, **{room: new}))
        return job

    def only(self, changes: Changes) -> dict[str, Any]:
        """The changes that are none of its values already."""
        return {key: value for key, value in changes.items() if self.value(key) != value}

    def _root(self, key: str) -> Any:
        room = key.partition(".")[0]
        return self.layout if room == "job" else getattr(self.part, room)


def _replaced(record: Any, path: Sequence[str], value: Any) -> Any:
    if not path:
        return value
    name, *rest = path
    if isinstance(record, Mapping):
        return {**record, name: _replaced(record[name], rest, value)}
    new = {name: _replaced(getattr(record, name), rest, value)}
    return replace_fields(record, **new) if isinstance(record, Layout) else replace(record, **new)


# --- What is tried.


def ways_of_balance(today: Job, meet: Meet, micro_batch_sizes: Sequence[int]) -> list[Changes]:
    """Methods, levels and orders of microbatches, at sizes of a microbatch; those that divide no batch are left out.

    A way is judged beside hash order by the time that follows from `meet`.
    """
    layout, keys = today.layout, today.part.balance
    objective = "rows" if meet == "microbatch" else "pipeline" if layout.pp > 1 else "rank"
    groups = [None, *(size for size in (keys.group_size,) if size is not None)]
    found: list[Changes] = []
    for size in micro_batch_sizes:
        job = {"job.micro_batch_size": size}
        if not _divides(today, job):
            continue
        found += [job, {**job, "balance.strategy": None, "balance.method": "none"}]
        for method in BALANCE_METHODS:
            for level in LEVELS:
                for order in ORDERS_IN_TIME:
                    for group in groups if level != "bin" else [None]:
                        words: dict[str, Any] = {"method": method, "level": level, "microbatches": order}
                        words |= {"objective": objective, "group_size": group, "strategy": None}
                        found.append({**job, **{f"balance.{name}": word for name, word in words.items()}})
    return found


def ways_of_runs(today: Job) -> list[Changes]:
    """Runs of ranks: half and twice the tokens of a rank, with all sizes and with each size alone.

    Ways that do not hold the longest document are left out.
    """
    context, longest = today.part.balance.context, most_length(today.part.batch)
    assert context is not None, "of a recipe with runs of ranks"
    runs = run_costs(context, backbone_cost(today.part), today.layout)
    found: list[Changes] = []
    for rank_tokens in (context.rank_tokens, 2 * context.rank_tokens, context.rank_tokens // 2):
        for sizes in (None, *((size,) for size in runs.sizes if runs.num_ranks % size == 0)):
            costs = replace(runs, rank_tokens=rank_tokens, sizes=sizes or runs.sizes)
            if rank_tokens and costs.holds(longest, costs.sizes[-1]):
                of_sizes = {} if sizes is None else {"balance.context.sizes": sizes}
                found.append({"balance.strategy": None, "balance.context.rank_tokens": rank_tokens, **of_sizes})
    return found


def ways_of_module(today: Job, name: str) -> list[Changes]:
    """Methods, who computes, and whether near the text, of a module's items."""
    module = today.part.modules[name]
    axes: dict[int, str] = {today.layout.consumers_of_replica(module.axis): module.axis}
    for axis in ("DP", "CP", "WORLD") if module.decode_at != "rank" else ():
        axes.setdefault(today.layout.consumers_of_replica(axis), axis)
    found: list[Changes] = []
    for axis in axes.values():
        for method, words in METHODS.items():
            if words.places_items:
                nears = {None: 0, NEAR_TEXT: 0, module.near_text: 0} if words.keeps_near_text else {None: 0}
                found += [{"axis": axis, "method": method, "near_text": near} for near in nears]
    return [{f"modules.{name}.{key}": value for key, value in way.items()} for way in found]


def ways_of_layout(today: Job, ranks_per_node: int) -> list[Changes]:
    """Other sizes of the job for as many ranks: TP within a node and over whole heads, whole layers for each stage."""
    layout, model = today.layout, today.part.balance.model
    assert model is not None, "asked before"
    world = layout.dp * layout.tp * layout.cp * layout.pp
    found: list[Changes] = []
    for tp in _divisors(world, ranks_per_node):
        if (model.kv_heads or model.heads) % tp or model.heads % tp:
            continue
        for pp in _divisors(world // tp, model.layers):
            for cp in _divisors(world // tp // pp, world):
                whole = all(length % (2 * cp) == 0 for length in lengths_of(today.part.batch)) or cp == 1
                if model.layers % pp == 0 and whole and today.part.balance.context is None:
                    sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": world // tp // pp // cp}
                    found.append({f"job.{name}": size for name, size in sizes.items()})
    return [way for way in found if today.only(way)]


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def _divides(today: Job, changes: Changes) -> bool:
    layout = today.changed(changes).layout
    try:
        for stage in stages_of(today.part.batch):
            layout.num_microbatches(stage.samples)
    except TopologyError:
        return False
    return True


# --- What a way takes.
#
# Times are in operations: where the recipe has the dimensions of the model and of its modules, a second is so many of
# them, and the times of modules and backbone are added. With a cost that was measured, the backbone's unit is its own,
# and the time is that of the backbone alone.
#
# Memory and traffic follow from the dimensions, in two bytes a number. Memory: 18 bytes for each weight of a rank, with
# its gradient and Adam's two moments, and activations of the microbatches that the first stage has under way. Traffic,
# what a rank gets from others in a step, is summed over the layers of its stage: with TP 8 times the part of a layer's
# input that it lacks, sequence parallelism or not; with CP 3 times the keys and values that it lacks; with PP a layer's
# input and its gradient for each microbatch; with DP the gradients and weights of its part of the model, in 6 bytes.
#
# Source: Korthikanti et al. 2022 (arXiv 2205.05198) for TP and activations; Rajbhandari et al. 2020 (arXiv 1910.02054)
# for weights and DP; Liu et al. 2023 (arXiv 2310.01889) for CP.

WEIGHT_BYTES = 18
NUMBER_BYTES = 2


class Tried(msgspec.Struct, kw_only=True, eq=False):
    """What one way has come to, over all steps."""

    changes: dict[str, Any]
    """Empty: today's."""
    job: Job
    backbone: float = 0.0
    """Operations of a rank that waits for the others, or the unit of a measured cost."""
    modules: dict[str, float] = msgspec.field(default_factory=dict)
    """Likewise, of each module."""
    ideal: float = 0.0
    """The time of backbone and modules, if all ranks had equal work and pipelines no bubble."""
    are_comparable: bool = True
    """Whether backbone and modules have one unit."""
    most_tokens: int = 0
    """That a rank holds in a microbatch, padding included."""
    memory_bytes: int | None = None
    """Most of a rank; None: without dimensions, or where the number of experts is not known."""
    traffic_bytes: float | None = None
    """That a rank gets from others, mean of ranks, sum of steps; None: without dimensions."""
    hash_order_steps: int = 0
    """Steps in which hash order was cheaper by the objective, and was used."""

    @property
    def time(self) -> float:
        """Sum of the predicted times."""
        return self.backbone + (sum(self.modules.values()) if self.are_comparable else 0.0)


class Tuning:
    """Tries ways on steps that are kept. Cost: a placement for each way and step, and memory for the steps' pieces."""

    def __init__(self, today: Job, meet: Meet, steps: Sequence[DrawnStep]) -> None:
        """Try today's way.

        Args:
            today: The recipe and the job as they are.
            meet: Where ranks wait for each other.
            steps: One or more, drawn for the layout of `today`.
        """
        self._job, self.meet, self._steps = today, meet, steps
        self._known: dict[tuple[tuple[str, Any], ...], Tried] = {}
        self.today = self.tried({})

    def tried(self, changes: Changes) -> Tried:
        """What a way comes to.

        Raises:
            PlanError: A step cannot be placed so.
        """
        only = self._job.only(changes)
        key = tuple(sorted(only.items()))
        if key not in self._known:
            self._known[key] = self._try(only)
        return self._known[key]

    def over(self, ways: Iterable[Changes], *, on_each: Callable[[], object] = lambda: None) -> list[Tried]:
        """What ways come to; one that no step can be placed by, as by a module's cap, is left out."""
        found = []
        for changes in ways:
            with suppress(PlanError):
                found.append(self.tried(changes))
            on_each()
        return found

    def all_tried(self) -> list[Tried]:
        """Every way so far, today's first."""
        return list(self._known.values())

    def _try(self, changes: dict[str, Any]) -> Tried:
        job = self._job.changed(changes)
        part, layout = job.part, job.layout
        strategy, model = strategy_of(part, layout), part.balance.model
        unit = 2 * model.hidden if model is not None and cost_key_of(part.balance) == "model" else None
        units = {name: 2 * each.model.hidden if each.model else None for name, each in part.modules.items()}
        found = Tried(changes=changes, job=job, are_comparable=None not in (unit, *units.values()))
        for drawn in self._steps:
            if part.packing.method != "whole":
                samples = samples_of_step(part.batch, drawn.step)
                drawn = replace(drawn, num_samples=layout.num_places(samples))
            plan = strategy(replace(drawn, layout=layout, modules=part.modules, found=drawn.found))
            self._add(found, plan, unit or 1, {name: each or 1 for name, each in units.items()})
        return found

    def _add(self, found: Tried, plan: StepPlan, unit: float, units: Mapping[str, float]) -> None:
        part, layout = found.job.part, found.job.layout
        cost, context = backbone_cost(part), part.balance.context
        if context is None:
            of_sample = cost.of_samples(
                plan.pieces.tokens, plan.sample, num_samples=plan.num_samples, length=plan.length
            )
            bins, sharing, ranks = bins_of(of_sample, plan.placement, layout), layout.tp * layout.cp, layout.dp
            work, tokens = float(work_of_samples(plan, cost)), -(-layout.micro_batch_size * plan.length // layout.cp)
        else:
            assert plan.contexts is not None, "of a recipe with runs of ranks"
            runs = run_costs(context, cost, layout)
            bins, sharing, ranks = plan.contexts.load_of_ranks(runs.num_ranks).T, layout.tp, runs.num_ranks
            work = float(least_work(plan.pieces.tokens, runs))
            tokens = int((plan.contexts.tokens_of_bin // plan.contexts.size_of_bin).max())
        at_end, each = times_of_meeting(bins, layout.pp)
        found.backbone += (each if self.meet == "microbatch" or context is not None else at_end) * unit / sharing
        found.ideal += (1 + BACKWARD) * work * unit / ranks / layout.pp / sharing
        found.most_tokens = max(found.most_tokens, tokens)
        found.hash_order_steps += plan.balance.took_hash_order
        memory = _memory(part, layout, tokens, plan.num_microbatches)
        traffic = _traffic(part, layout, plan)
        for name, module in plan.item_modules.items():
            about = part.modules[name]
            shared = {"DP": layout.tp * layout.cp, "CP": layout.tp, "WORLD": 1}[module.axis]
            factor = (1 + BACKWARD) * units[name] / shared
            found.modules[name] = found.modules.get(name, 0.0) + factor * module.balance.cost
            if found.are_comparable:
                found.ideal += factor * float(module.cost_of_item.sum()) / module.num_consumers
            held, sent = _module_bytes(about, plan, name)
            memory = None if memory is None or held is None else memory + held // shared
            traffic = None if traffic is None or sent is None else traffic + sent
        found.memory_bytes = memory if memory is None else max(memory, found.memory_bytes or 0)
        found.traffic_bytes = traffic if traffic is None else traffic + (found.traffic_bytes or 0.0)

    def best(self) -> list[Tried]:
        """The fastest first, one of each time: times closer than a thousandth of today's ideal are alike.

        Of ways with like times there is the one that changes the fewest of today's settings, then the one with the
        least traffic, then the first tried. Where modules have a unit of their own, times of the backbone decide first.
        """
        alike: dict[tuple[int, int], Tried] = {}
        for one in sorted(self.all_tried(), key=lambda one: (len(one.changes), one.traffic_bytes or 0.0)):
            of_modules = 0
            if not one.are_comparable:
                today = self.today.modules
                of_modules = round(sum(1000 * time / (today[name] or 1.0) for name, time in one.modules.items()))
            alike.setdefault((round(1000 * one.time / self.today.ideal), of_modules), one)
        return [alike[time] for time in sorted(alike)]


def unbeaten(found: Sequence[Tried]) -> list[Tried]:
    """The ways that no other one is better than in time and traffic at once, the fastest first; times are alike as in
    `Tuning.best`."""
    if not found:
        return []
    ideal = found[0].ideal
    kept: list[Tried] = []
    for one in sorted(found, key=lambda one: (round(1000 * one.time / ideal), one.traffic_bytes or 0.0)):
        if not kept or (one.traffic_bytes or 0.0) < (kept[-1].traffic_bytes or 0.0):
            kept.append(one)
    return kept


def _kv_hidden(model: Model) -> int:
    return model.hidden * (model.kv_heads or model.heads) // model.heads


def _weights(part: Part) -> int | None:
    """Weights of a dense backbone, with embedding and output layer; None: the number of experts is not known."""
    model = part.balance.model
    if model is None or model.experts_per_token is not None:
        return None
    vocab = (part.vocab_size or 0) if model.vocab is None else model.vocab
    return model.hidden * (model.layers * (2 * model.hidden + 2 * _kv_hidden(model) + 3 * model.ffn) + 2 * vocab)


def _memory(part: Part, layout: Layout, tokens: int, num_microbatches: int) -> int | None:
    """Bytes of weights and activations of a rank of the first stage; `tokens`: of a rank in a microbatch."""
    weights, model = _weights(part), part.balance.model
    if weights is None or model is None:
        return None
    under_way = np.array([tokens * min(layout.pp, num_microbatches)])
    return (WEIGHT_BYTES * weights + int(activations(StrategyModel(part))(under_way)[0])) // (layout.tp * layout.pp)


def _traffic(part: Part, layout: Layout, plan: StepPlan) -> float | None:
    """Bytes that a rank gets from others in a step, mean of all ranks, without those of modules."""
    weights, model = _weights(part), part.balance.model
    if weights is None or model is None:
        return None
    hidden, keys, layers = model.hidden, 2 * _kv_hidden(model), model.layers / layout.pp
    if plan.contexts is None:
        padded = plan.num_samples * plan.length / layout.dp / layout.cp  # tokens of a rank
        exchanged = padded * (layout.cp - 1)
    else:
        bins, ranks = plan.contexts, layout.dp * layout.cp
        padded = float(bins.tokens_of_bin.sum()) / ranks
        exchanged = float((bins.tokens_of_bin * (bins.size_of_bin - 1)).sum()) / ranks
    of_tp = 8 * layers * padded * hidden * (layout.tp - 1) / layout.tp
    of_cp = 3 * layers * exchanged * keys / layout.tp
    of_pp = 2 * padded * hidden / layout.tp * (layout.pp - 1) / layout.pp
    replicas = layout.dp * layout.cp
    of_dp = 6 * weights / (layout.tp * layout.pp) * (replicas - 1) / replicas
    return NUMBER_BYTES * (of_tp + of_cp + of_pp) + of_dp


def _module_bytes(module: Module, plan: StepPlan, name: str) -> tuple[int | None, float | None]:
    """Bytes of activations of the consumer that holds most, and of rows that travel, with their gradients, for each
    rank; None without dimensions."""
    if module.model is None:
        return None, None
    placed, layout = plan.item_modules[name], plan.layout
    held = sums_of_bins(
        encoder_cost(module.model).bytes_of_items(placed.items.size),
        placed.consumer_of_item * placed.num_bins + placed.bin_of_item,
        placed.num_consumers * placed.num_bins,
    )
    width = module.model.out or module.model.hidden
    world = layout.dp * layout.tp * layout.cp * layout.pp
    return int(held.max(initial=0)), 2 * NUMBER_BYTES * width * plan.rows_that_travel(name) / world
