"""A step that is drawn and packed, and not yet placed: what a strategy of balance begins with.

In: the samples of a step, and all that its plan says beside who computes what. Out: graphs over its samples or items,
and the finished plan. Must hold: which pieces are in which sample is decided; a strategy cannot change it. Cost: none
until a graph is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import PlanError
from torchmix.parallel.layout import Layout
from torchmix.planner.graph.samples import SampleBalance, place_samples
from torchmix.planner.items import Items, ItemsOfModule
from torchmix.planner.methods.own_method import OwnMethod
from torchmix.planner.pack import Packed
from torchmix.planner.plan import (
    ItemPlan,
    ModulePlan,
    StepPlan,
    plan_digest,
    plan_digest_of_modules,
)
from torchmix.recipe.balance.modules import BACKBONE
from torchmix.recipe.balance.structs import Module

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


class DrawnStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step whose samples are packed."""

    step: int
    packed: Packed
    num_samples: int
    """G."""
    length: int
    """Tokens of a sample."""
    layout: Layout
    schedule: object
    """The recipe's mixture and schedule, which the step was drawn by."""
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
            unit: `document` or `image`.
            column: Column of sizes.
            sources: Names of the sources whose items count; None for all.
            module: Name of the module in the recipe, for errors.

        Raises:
            RecipeError: There is no such column, or no such source.
            PlanError: An item does not lie in one piece.
        """
        key = (unit, column, sources)
        if key not in self.kept.finders:
            about = Module(items=unit, sizes=column, sources=sources)  # type: ignore[arg-type]
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

    def planned(self, backbone: ModulePlan, modules: Mapping[str, ItemPlan]) -> StepPlan:
        """The plan of this step.

        Args:
            backbone: Where the samples are computed.
            modules: Where items are computed, by module.

        Raises:
            PlanError: The name of a module is taken.
        """
        if BACKBONE in modules:
            raise PlanError(f"{BACKBONE} is the module of samples; name the others otherwise")
        digest = plan_digest(self.order_digest, backbone.placement, backbone.layout)
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
