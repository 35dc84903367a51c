"""DGraph: who computes what of a step, said in a few chained calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from inspect import isfunction
from typing import Any, get_args

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import PlanError
from torchmix.parallel.place_tree import BroadcastAxis, GridAxis, Layout
from torchmix.planner.balance import BalanceReport, CostModel, EncoderCost, Placement
from torchmix.planner.contexts import ContextPlan, RunCosts, place_in_contexts, plan_of_runs
from torchmix.planner.graph.drawing import drawing_of, states_of
from torchmix.planner.graph.items import ItemBalance, place_items, slots_of
from torchmix.planner.graph.samples import SampleBalance, place_samples
from torchmix.planner.methods import OBJECTIVES, OwnMethod
from torchmix.planner.pack import Packed
from torchmix.planner.plan import (
    ItemPlan,
    Items,
    ItemsOfModule,
    ModulePlan,
    StepPlan,
    plan_digest,
    plan_digest_of_contexts,
    plan_digest_of_modules,
    plan_digest_of_places,
)
from torchmix.recipe.build import nearest
from torchmix.recipe.items import KINDS
from torchmix.recipe.modules import BACKBONE, DOCUMENT, METHODS
from torchmix.recipe.structs import Module

# --- A step that is drawn and packed, and not yet placed: what a strategy of balance begins with.
#
# Which pieces are in which sample is decided; a strategy cannot change it.

ItemsKey = tuple[str, str, tuple[str, ...] | None]
"""Unit, column of sizes, and sources; None: all."""


class StrategyCache(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the steps of a planner share. It decides nothing."""

    finders: dict[ItemsKey, ItemsOfModule] = msgspec.field(default_factory=dict)
    """What finds items, by unit, column and sources."""
    methods: dict[str, OwnMethod] = msgspec.field(default_factory=dict)
    """The user's methods, by name."""
    last_placed: dict[tuple[object, ...], ModulePlan] = msgspec.field(default_factory=dict)
    """The samples placed last, by all that this follows from: costs are often those of the step before."""

    def placed(self, cost: Int64Array, memory: Int64Array, layout: Layout, options: SampleBalance) -> ModulePlan:
        """Where the samples of a step are computed; arguments and errors as those of `place_samples`."""
        key = (cost.tobytes(), memory.tobytes(), layout, options)
        found = None if isinstance(options.method, OwnMethod) else self.last_placed.get(key)
        if found is None:
            placement, report = place_samples(cost, memory, layout, options)
            lock(placement)  # a strategy that wrote into it would alter the steps that follow
            found = ModulePlan(layout=layout, placement=placement, balance=report)
            self.last_placed.clear()
            self.last_placed[key] = found
        return found


class TokensOfStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tokens of each stream in a step; int64 [S] each."""

    asked: Int64Array
    """Charged to it."""
    drawn: Int64Array
    pool: Int64Array
    """Deferred to the next step."""
    delivered: Int64Array | None = None
    """In its samples; None: not summed yet."""
    num_labelled: int | None = None
    """Tokens of all streams that have a label; None: not summed yet."""


class DrawnStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step whose samples are packed."""

    step: int
    packed: Packed
    num_samples: int
    """G, with masked samples."""
    length: int
    """Tokens of a sample."""
    layout: Layout
    schedule: object
    """The recipe's mixture and schedule, which the step was drawn by."""
    shares_by: str = ""
    """The recipe's `dynamic.policy`, by which the shares of the mixture changed; empty without one."""
    sources: tuple[str, ...]
    """[S] sorted names."""
    sizes: tuple[SourceSizes, ...]
    """[S] of each source."""
    modules: Mapping[str, Module]
    """The recipe's."""
    order_digest: bytes
    """The digest of all steps up to and including this one."""
    digest_of: Callable[[Packed], bytes]
    """Called with samples: what the order digest is if this step has them."""
    make: Callable[..., StepPlan]
    """Called with `modules` and `plan_digest`: the plan."""
    kept: StrategyCache
    """What strategies of earlier steps have looked up."""
    found: dict[ItemsKey, Items] = msgspec.field(default_factory=dict)
    """Items of this step that were asked for."""

    def items(
        self, unit: str, column: str, sources: tuple[str, ...] | None = None, *, module: str | None = None
    ) -> Items:
        """The items of a kind in this step.

        Args:
            unit: `document`, or a kind of items as `image`.
            column: Column of sizes.
            sources: Names of the sources whose items count; None for all.
            module: Name of the module in the recipe, for errors.

        Raises:
            RecipeError: There is no such column, or no such source.
            PlanError: An item does not lie in one piece.
        """
        key = (unit, column, sources)
        if key not in self.kept.finders:
            about = Module(items=unit, sizes=column, sources=sources)
            self.kept.finders[key] = ItemsOfModule(module or unit, about, self.sources, self.sizes)
        if key not in self.found:
            packed = self.packed
            self.found[key] = self.kept.finders[key].of_step(packed.pieces, packed.sample, packed.sample_offset)
            lock(self.found[key])
        return self.found[key]

    def own_method(self, name: str) -> OwnMethod:
        """A method of the user's, imported once.

        Raises:
            RecipeError: It cannot be imported.
        """
        if name not in self.kept.methods:
            self.kept.methods[name] = OwnMethod(name, "method")
        method = self.kept.methods[name]
        method.step = self.step
        return method

    def planned(
        self, backbone: ModulePlan, modules: Mapping[str, ItemPlan], *, places: Int64Array | None = None
    ) -> StepPlan:
        """The plan of this step.

        Args:
            backbone: Where the samples are computed.
            modules: Where items are computed, by module.
            places: The placement of the backbone as `plan_digest_of_places` takes it, if it is made already.

        Raises:
            PlanError: The name of a module is taken.
        """
        if BACKBONE in modules:
            raise PlanError(f"{BACKBONE} is the module of samples; name the others otherwise")
        if places is not None:
            digest = plan_digest_of_places(self.order_digest, places, backbone.layout)
        elif backbone.contexts is None:
            digest = plan_digest(self.order_digest, backbone.placement, backbone.layout)
        else:
            digest = plan_digest_of_contexts(self.order_digest, backbone.contexts, backbone.layout)
        ordered = dict(sorted(modules.items()))
        return self.make(modules={BACKBONE: backbone, **ordered}, plan_digest=plan_digest_of_modules(digest, ordered))


def lock(record: msgspec.Struct) -> None:
    """Make the arrays of a record read-only, also those of the records in it."""
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        elif isinstance(value, msgspec.Struct):
            lock(value)


# --- The graph: what a strategy says, call by call.
#
# A graph is a value, and each call gives a new one; no call changes which pieces are in which sample. Cost: that of the
# method of balance.
#
#     graph = step.graph("tokens").mix(step.schedule).distribute("DP").cost(flops(model)).balance("rows")
#     plan = graph.plan()
#
# Source: MegaScale-Data (arXiv 2504.09844), sections 4.1 and 4.2, whose primitives these are. There buffers of samples
# are balanced after they are fetched; here sizes, before anything is read.

UNITS = ("sample", DOCUMENT)
"""Beside kinds of items."""
AXES = ("DP", "CP", "WORLD")
LEVELS = ("both", "bucket", "bin")
MICROBATCHES = ("unimodal", "descending", "keep")
SCOPES = ("step", "microbatch")


class DGraph(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The samples of a step, or the items in them, on their way to consumers."""

    step: DrawnStep
    unit: str
    """sample, document, or a kind of items as image."""
    column: str
    """The column of sizes that costs are a function of."""
    sources: tuple[str, ...] | None
    """Sources whose pieces count; None: all."""
    items: Items | None
    """The items; None for samples."""
    axis: GridAxis | None = None
    group_size: int | None = None
    costs: Int64Array | None = None
    """int64 [n] of each sample or item."""
    memory: Int64Array | None = None
    """int64 [n] bytes of each sample or item; None where nobody has said."""
    options: SampleBalance | ItemBalance | None = None
    placed: ModulePlan | ItemPlan | None = None
    """Where samples or items are computed; None before `balance`, and for items of microbatches before `plan`."""
    broadcast: str | None = None
    runs: RunCosts | None = None
    """Runs of ranks, where samples have lengths of their own."""

    def mix(self, schedule: object) -> DGraph:
        """Say by what the step was drawn.

        Args:
            schedule: `step.schedule`, or a pure function of the step, `step -> {child: share}`, which the recipe names:
                `dynamic: {policy: "module:function"}`. Its answers are logged as decisions, and replayed.

        Raises:
            PlanError: It is not the recipe's: the fold has drawn, and a strategy only places.
        """
        if isfunction(schedule):
            name = f"{schedule.__module__}:{schedule.__qualname__}"
            if name != self.step.shares_by:
                raise PlanError(
                    f"mix: the step was drawn before the strategy was asked, so the recipe names the function of the "
                    f'step: write `dynamic: {{policy: "{name}"}}`, in the place of {self.step.shares_by or "none"}'
                )
            return self
        if schedule is not self.step.schedule and schedule != self.step.schedule:
            raise PlanError(
                "mix: the step was drawn by the recipe's mixture and schedule; another schedule goes into the recipe"
            )
        return self

    def distribute(self, axis: str, group_size: int | None = None, sizes: Sequence[int] | None = None) -> DGraph:
        """Say who the consumers are.

        Args:
            axis: `DP`, `CP` or `WORLD`. Samples of one length go to `DP`, because all ranks of a replica compute the
                same ones; those of `packing.method: whole` to `CP`, because runs of DP x CP ranks share them.
            group_size: Consumers of a group, inside which items are balanced; None: all consumers.
            sizes: Of samples of `whole`: ranks of a run, some of those that the recipe allows; None: all of these.
        """
        _check_word("distribute: axis", axis, AXES)
        wanted = "DP" if self.runs is None else "CP"
        if self.unit == "sample" and axis != wanted:
            kind = "of fixed length" if self.runs is None else "of packing.method: whole"
            raise PlanError(f"distribute: samples {kind} go to {wanted}, not to {axis}; items may go there")
        if group_size is not None and (type(group_size) is not int or group_size < 1):
            raise PlanError(f"distribute: group_size={group_size!r} must be an int of at least 1")
        if sizes is None:
            return replace(self, axis=axis, group_size=group_size)
        if self.runs is None or self.unit != "sample":
            raise PlanError("distribute: sizes are of samples of packing.method: whole, which runs of ranks share")
        chosen = tuple(sorted(set(sizes)))
        if not chosen or not set(chosen) <= set(self.runs.sizes):
            raise PlanError(
                f"distribute: sizes={list(sizes)} are none or not all of {', '.join(map(str, self.runs.sizes))}, which "
                f"this job has groups for"
            )
        if self.runs.num_ranks % chosen[0]:
            raise PlanError(f"distribute: runs of {chosen[0]} ranks do not divide the {self.runs.num_ranks} ranks")
        return replace(self, axis=axis, group_size=group_size, runs=replace(self.runs, sizes=chosen))

    def cost(self, fn: Callable[[Int64Array], Any], memory: Callable[[Int64Array], Any] | None = None) -> DGraph:
        """Say what a size costs.

        Args:
            fn: Called with int64 [n] sizes, gives int64 [n]. A sample costs the sum over its pieces; `flops(model)`
                counts its padding, too, and `vit_flops(model.NAME)` the segments inside which units attend.
            memory: Likewise, bytes of activations.

        Raises:
            PlanError: A function gives floats, negative numbers, or too large ones.
        """
        runs = self.runs
        if runs is not None and self.unit == "sample":
            if not isinstance(fn, CostModel) or memory is not None:
                raise PlanError(
                    "cost: a run of ranks divides what a token and a pair of tokens cost; give flops(model), or a "
                    "CostModel of your own, and no memory: rank_tokens bounds it"
                )
            runs = replace(runs, per_token=fn.per_token, per_pair=fn.per_pair)
        costs = self._of_units(fn, "cost")
        return replace(
            self, runs=runs, costs=costs, memory=None if memory is None else self._of_units(memory, "memory")
        )

    def balance(
        self,
        method: str = "rows",
        level: str = "both",
        objective: str = "rows",
        cap: int | None = None,
        scope: str = "step",
        microbatches: str = "unimodal",
        near_text: float | Fraction | None = None,
    ) -> DGraph:
        """Place samples or items. Whatever costs more than hash order by the objective is not taken.

        Args:
            method: A key of `METHODS` of `recipe/modules.py`, such as `lpt`, or `module:function`. With items, `rows`
                is `lpt`, as items fill rows of any size.
            level: For samples: `both`, `bucket` (which rank) or `bin` (which microbatch).
            objective: `rows`, `max`, `rank` or `pipeline`.
            cap: Most bytes of a bin.
            scope: For items: those of a whole `step` together, or of each `microbatch`.
            microbatches: For samples: `unimodal`, `descending`, or `keep` what the method gives.
            near_text: For items, with `lpt`: how much costlier the costliest consumer may be so that items are computed
                in the replica of their text, 0.05 for 5 %.

        Raises:
            PlanError: A word is unknown; something is missing; the cap is too small.
        """
        words = (("level", level, LEVELS), ("objective", objective, OBJECTIVES), ("scope", scope, SCOPES))
        for name, word, valid in (*words, ("microbatches", microbatches, MICROBATCHES)):
            _check_word(f"balance: {name}", word, valid)
        if ":" not in method:
            _check_word("balance: method", method, tuple(METHODS))
        if self.axis is None or self.costs is None:
            missing = "distribute(axis)" if self.axis is None else "cost(fn)"
            raise PlanError(f"balance: call {missing} before it")
        if self.runs is not None and self.items is None:
            given = (method, level, objective, cap, scope, microbatches, near_text)
            if given != ("rows", "both", "rows", None, "step", "unimodal", None) or self.group_size is not None:
                raise PlanError("balance: samples of packing.method: whole have one schedule; call balance() alone")
            return self._in_contexts(*place_in_contexts(self._tokens(), self.runs))
        if cap is not None and self.memory is None:
            raise PlanError("balance: a cap needs cost(fn, memory=...), which says how many bytes an item takes")
        own: str | OwnMethod = self.step.own_method(method) if ":" in method else method
        if self.items is not None:
            of_items = ItemBalance(
                axis=self.axis,
                method=own,
                scope=scope,
                objective=objective,
                cap=cap,
                group_size=self.group_size,
                near_text=near_text,
            )
            return replace(self, options=of_items)
        of_samples = SampleBalance(
            method=own,
            level=level,  # type: ignore[arg-type]
            objective=objective,
            microbatches=microbatches,  # type: ignore[arg-type]
            group_size=self.group_size,
            cap=cap,
        )
        memory = np.zeros_like(self.costs) if self.memory is None else self.memory
        placed = self.step.kept.placed(self.costs, memory, self.step.layout, of_samples)
        return replace(self, options=of_samples, placed=placed)

    def in_runs(self, microbatch: Int64Array, first_rank: Int64Array, size: Int64Array) -> DGraph:
        """Place samples of `packing.method: whole` by a schedule of your own, in the place of `balance`.

        Ranks are numbered by replica, then CP slice. Samples with the same run in the same microbatch are one bin;
        ranks that no run has get empty ones.

        Args:
            microbatch: int64 [n] of each sample, from 0.
            first_rank: int64 [n] of its run, a multiple of the size.
            size: int64 [n] ranks of its run, one of those of `distribute`.

        Raises:
            PlanError: Runs overlap, are not aligned, or hold more than `rank_tokens` x size tokens with padding.
        """
        if self.runs is None or self.items is not None:
            raise PlanError("in_runs: places samples of packing.method: whole alone; balance() places others")
        if self.axis is None or self.costs is None:
            raise PlanError(f"in_runs: call {'distribute(axis)' if self.axis is None else 'cost(fn)'} before it")
        return self._in_contexts(*plan_of_runs(self._tokens(), microbatch, first_rank, size, self.runs))

    def _tokens(self) -> Int64Array:
        """int64 [n] of each sample, which is a piece."""
        return self.step.packed.pieces.tokens

    def _in_contexts(self, contexts: ContextPlan, report: BalanceReport) -> DGraph:
        return replace(self, placed=module_of_contexts(contexts, report, self.step.layout))

    def broadcast_at(self, axis: str) -> DGraph:
        """Say that the trainer sends what it gets along an axis, `TP`, `CP` or `PP`: ranks behind its first one fetch
        nothing but boundaries.

        Raises:
            PlanError: Ranks are served otherwise; the recipe's `balance.broadcast_at` says how.
        """
        _check_word("broadcast_at: axis", axis, get_args(BroadcastAxis))
        layout = self.step.layout
        if getattr(layout, axis.lower()) > 1 and layout.broadcast_at != axis:
            raise PlanError(
                f"broadcast_at: all {axis} ranks are served; write `balance: {{broadcast_at: {axis}}}` in the recipe, "
                f"which every rank knows before the first step"
            )
        return replace(self, broadcast=axis)

    def plan(self) -> StepPlan:
        """The plan of the step, of a graph over samples.

        Raises:
            PlanError: It is a graph over items, or it is not balanced.
        """
        return plan_of_graphs(self.step, self, {})

    def states(self) -> dict[str, NDArray[Any]]:
        """The road of each piece of a balanced graph over samples, as `states_of` gives it."""
        return states_of(self.plan())

    def draw(self, microbatch: int = 0) -> str:
        """One microbatch of a balanced graph over samples as SVG: its pieces from their sources to their ranks."""
        return drawing_of(self.plan(), microbatch)

    def item_plan(self, backbone: ModulePlan, name: str = "") -> ItemPlan:
        """Where the items of this graph are computed, next to a backbone; `name` is the module's, for errors.

        Raises:
            PlanError: It is a graph over samples, or it is not balanced.
        """
        if self.items is None or not isinstance(self.options, ItemBalance):
            raise PlanError(
                "a module needs a graph over items that is balanced: step.graph(column, unit=...) ... balance()"
            )
        assert self.costs is not None
        memory = np.zeros_like(self.costs) if self.memory is None else self.memory
        options = replace(self.options, name=name)
        return place_items(
            self.items, self.costs, memory, backbone.placement, self.step.layout, options, unit=self.unit
        )

    def _of_units(self, fn: Callable[[Int64Array], Any], what: str) -> Int64Array:
        if self.items is not None:
            segments = (self.items.segments,) if isinstance(fn, EncoderCost) else ()
            return _checked(fn(self.items.size, *segments), len(self.items), what)
        packed = self.step.packed
        tokens, sample = packed.pieces.tokens, packed.sample
        if self.sources is not None:
            chosen = np.isin(packed.pieces.source, [self.step.sources.index(name) for name in self.sources])
            tokens, sample = tokens[chosen], sample[chosen]
        if isinstance(fn, CostModel):
            return fn.of_samples(tokens, sample, num_samples=self.step.num_samples, length=self.step.length)
        of_piece = _checked(fn(tokens), len(tokens), what)
        sums = np.zeros(self.step.num_samples, np.int64)
        np.add.at(sums, sample, of_piece)
        return sums


def placement_of_contexts(contexts: ContextPlan, layout: Layout) -> Placement:
    """The replica of the first rank of each sample's run, its microbatch, and its place in the bin."""
    return Placement(
        dp_rank_of_sample=contexts.first_rank_of_bin[contexts.bin_of_sample] // layout.cp,
        microbatch_of_sample=contexts.microbatch_of_sample,
        slot_of_sample=slots_of(contexts.bin_of_sample),
    )


def module_of_contexts(contexts: ContextPlan, report: BalanceReport, layout: Layout) -> ModulePlan:
    """The backbone of samples in runs of ranks; its arrays are read-only from here on."""
    placement = placement_of_contexts(contexts, layout)
    lock(placement)
    lock(contexts)
    return ModulePlan(layout=layout, placement=placement, balance=report, contexts=contexts)


def plan_of_graphs(step: DrawnStep, backbone: DGraph, modules: Mapping[str, DGraph]) -> StepPlan:
    """The plan of a step from a balanced graph over its samples, and graphs over items by module.

    Raises:
        PlanError: A graph is of the wrong kind, or is not balanced.
    """
    if not isinstance(backbone.placed, ModulePlan):
        raise PlanError("the backbone needs a graph over samples that is balanced: step.graph('tokens') ... balance()")
    placed = backbone.placed
    return step.planned(placed, {name: graph.item_plan(placed, name) for name, graph in modules.items()})


def _checked(values: Any, count: int, what: str) -> Int64Array:
    found = np.asarray(values)
    if found.shape != (count,) or found.dtype.kind not in "iu":
        raise PlanError(
            f"{what}: the function gives {found.dtype} {list(found.shape)}, not a whole number for each of {count} "
            f"sizes; round floats where they are made"
        )
    if count and int(found.min()) < 0:
        raise PlanError(
            f"{what}: the function gives {int(found.min())} for entry {int(found.argmin())}; 0 is the least"
        )
    if count and int(found.max()) * count >= 1 << 62:
        raise PlanError(f"{what}: {int(found.max())} for each of {count} would exceed 62 bits; use a coarser unit")
    return found.astype(np.int64)


def _check_word(where: str, word: object, valid: tuple[str, ...]) -> None:
    if word not in valid:
        raise PlanError(f"{where} {word!r} is not one of {', '.join(valid)}{nearest(word, valid)}")


# --- The step that a strategy is given: graphs over it, and the plan that they make together.
#
# A graph can be asked for as often as one likes. Cost: finding items, for graphs over them.


class StrategyStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step, as strategies see it."""

    drawn: DrawnStep
    runs: RunCosts | None = None
    """Runs of ranks, with `packing.method: whole`."""

    @property
    def schedule(self) -> object:
        """The recipe's mixture and schedule, for `mix`."""
        return self.drawn.schedule

    @property
    def tokens(self) -> Int64Array:
        """int64 [n] tokens of each piece; with `packing.method: whole` a piece is a sample."""
        return self.drawn.packed.pieces.tokens

    def graph(
        self,
        sizes: str = "tokens",
        sources: tuple[str, ...] | list[str] | None = None,
        *,
        unit: str = "sample",
        module: str | None = None,
    ) -> DGraph:
        """A graph over the samples of the step, or over items in them.

        Args:
            sizes: The column of sizes that costs are a function of; of samples it is `tokens`.
            sources: Sources whose pieces or items count; None: all.
            unit: `sample`, `document`, or a kind of items as `image`.
            module: Name of the module, for errors.

        Raises:
            PlanError: A word or a source is unknown.
            RecipeError: A source has no such column or no such items.
        """
        units = (*UNITS, *KINDS)
        if unit not in units:
            raise PlanError(f"graph: unit {unit!r} is not one of {', '.join(units)}{nearest(unit, units)}")
        chosen = None if sources is None else tuple(sources)
        for name in chosen or ():
            if name not in self.drawn.sources and unit == "sample":
                hint = nearest(name, self.drawn.sources)
                raise PlanError(f"graph: {name!r} is no source of this part{hint}")
        if unit == "sample":
            if sizes != "tokens":
                raise PlanError(f"graph: samples are measured in tokens, not in {sizes!r}; items have other columns")
            return DGraph(step=self.drawn, unit=unit, column=sizes, sources=chosen, items=None, runs=self.runs)
        items = self.drawn.items(unit, sizes, chosen, module=module)
        return DGraph(step=self.drawn, unit=unit, column=sizes, sources=chosen, items=items)

    def plan(self, backbone: DGraph, **modules: DGraph) -> StepPlan:
        """The plan of the step.

        Args:
            backbone: A balanced graph over samples.
            **modules: Balanced graphs over items, by module.

        Raises:
            PlanError: A graph is of the wrong kind, is not balanced, or its items do not fit.
        """
        return plan_of_graphs(self.drawn, backbone, modules)
