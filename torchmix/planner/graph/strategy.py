"""Strategies: who computes what of each step, from the recipe or from a function of the user's.

A plan follows from the step and the layout alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import PlanError
from torchmix.lazy_names import imported
from torchmix.native.load import is_native
from torchmix.parallel.place_tree import ClientPlaceTree, Layout
from torchmix.parallel.topology import Topology
from torchmix.planner.balance import CostModel, EncoderCost, cost_of_recipe, encoder_cost
from torchmix.planner.contexts import RunCosts, check_runs, run_costs
from torchmix.planner.graph.dgraph import DGraph, DrawnStep, StrategyCache, StrategyStep, lock
from torchmix.planner.graph.plan_check import check_plan
from torchmix.planner.graph.samples import NativePlaces, SampleBalance
from torchmix.planner.methods import errors_of
from torchmix.planner.plan import ItemsOfModule, ModulePlan, StepPlan
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.modules import near_text_of
from torchmix.recipe.parts import Part
from torchmix.recipe.structs import Context, EncoderModel, Model, Module

Strategy = Callable[[DrawnStep], StepPlan]


class StrategyModel:
    """The recipe's dimensions, as strategies get them: of the backbone, and `model.NAME` of each module."""

    def __init__(self, part: Part) -> None:
        """`part`: of the recipe."""
        self.backbone: Model | None = part.balance.model
        self.cost = backbone_cost(part)
        self._modules = part.modules

    def __getattr__(self, name: str) -> EncoderModel | None:
        if name.startswith("_") or name not in self._modules:
            raise AttributeError(f"the recipe has no module {name!r}; it has {', '.join(self._modules) or 'none'}")
        return self._modules[name].model


def backbone_cost(part: Part) -> CostModel:
    """What samples cost by a recipe."""
    return cost_of_recipe(part.balance, boundaries=part.packing.boundaries, vocab_size=part.vocab_size)


def flops(model: StrategyModel) -> CostModel:
    """The cost of the backbone by the recipe's dimensions, for `DGraph.cost`."""
    return model.cost


def activations(model: StrategyModel) -> Callable[[Int64Array], Int64Array]:
    """Bytes of activations of the backbone, of pieces by their tokens; zeros without dimensions.

    Two bytes a number, without recomputing: per token and layer 2 (6h + 2 h_kv + 3 ffn).
    """
    dimensions = model.backbone
    if dimensions is None:
        return np.zeros_like
    kv_hidden = dimensions.hidden * (dimensions.kv_heads or dimensions.heads) // dimensions.heads
    ffn = dimensions.ffn * (dimensions.experts_per_token or 1)
    of_token = 2 * dimensions.layers * (6 * dimensions.hidden + 2 * kv_hidden + 3 * ffn)
    return lambda tokens: tokens * of_token


def vit_flops(model: EncoderModel | None) -> EncoderCost:
    """The cost of items of a module by its dimensions, for `DGraph.cost`; the size itself without them."""
    return encoder_cost(model)


def strategy_of(part: Part, layout: Layout) -> Strategy:
    """The strategy of a part: the recipe's function, or the chain that its keys stand for.

    Raises:
        RecipeError: The function cannot be imported.
        TopologyError: The recipe has runs of ranks, and those of the layout do not hold its documents.
    """
    if part.balance.strategy is not None:
        return OwnStrategy(part, layout)
    if part.balance.context is not None:
        return ContextStrategy(part, part.balance.context, layout)
    return KeyStrategy(part)


class _ModuleKeys(msgspec.Struct, frozen=True, kw_only=True):
    module: Module
    cost: EncoderCost
    cap: int | None
    near_text: Fraction | None


def strategy_cache(part: Part, sources: tuple[str, ...], sizes: Sequence[SourceSizes]) -> StrategyCache:
    """What the steps of a planner share, with the columns of the recipe's modules looked up.

    Args:
        part: The part of the recipe.
        sources: [S] sorted names.
        sizes: [S] of each.

    Raises:
        RecipeError: A module's column does not exist.
    """
    cache = StrategyCache()
    for name, module in sorted(part.modules.items()):
        key = (module.items, module.sizes, module.sources)
        cache.finders[key] = ItemsOfModule(name, module, sources, sizes)
    return cache


class KeyStrategy:
    """The chain that the keys of a recipe stand for."""

    def __init__(self, part: Part) -> None:
        """`part`: of the recipe."""
        self._balance = part.balance
        self._cost = backbone_cost(part)
        self._modules = {name: _keys_of(name, module) for name, module in sorted(part.modules.items())}
        self._has_own_method = bool(own_functions(part))
        keys = part.balance
        options = SampleBalance(
            method=keys.method,
            level=keys.level,
            objective=keys.objective,
            microbatches=keys.microbatches,
            group_size=keys.group_size,
        )
        can_be_native = NativePlaces.have(options) and not self._has_own_method
        self._native = NativePlaces(self._cost, options) if can_be_native else None

    def __call__(self, drawn: DrawnStep) -> StepPlan:
        """The plan of a step; errors as those of `DGraph`."""
        if self._native is not None and is_native():
            packed = drawn.packed
            placement, report, places = self._native(
                packed.pieces.tokens,
                packed.sample,
                num_samples=drawn.num_samples,
                length=drawn.length,
                layout=drawn.layout,
            )
            backbone = ModulePlan(layout=drawn.layout, placement=placement, balance=report)
            if not self._modules:
                return drawn.planned(backbone, {}, places=places)
            step = StrategyStep(drawn=drawn)
            items = {name: self._items(step, name, each) for name, each in self._modules.items()}
            plans = {name: graph.item_plan(backbone, name) for name, graph in items.items()}
            return drawn.planned(backbone, plans, places=places)
        step, keys = StrategyStep(drawn=drawn), self._balance
        graph = step.graph("tokens").mix(step.schedule).distribute("DP", group_size=keys.group_size).cost(self._cost)
        graph = graph.balance(keys.method, level=keys.level, objective=keys.objective, microbatches=keys.microbatches)
        plan = step.plan(graph, **{name: self._items(step, name, each) for name, each in self._modules.items()})
        return check_plan(plan, drawn) if self._has_own_method else plan

    def _items(self, step: StrategyStep, name: str, keys: _ModuleKeys) -> DGraph:
        module = keys.module
        graph = step.graph(module.sizes, module.sources, unit=module.items, module=name)
        graph = graph.distribute(module.axis, group_size=module.group_size)
        graph = graph.cost(keys.cost, memory=keys.cost.bytes_of_items)
        return graph.balance(module.method, scope=module.scope, cap=keys.cap, near_text=keys.near_text)


def runs_of(part: Part, context: Context, layout: Layout) -> RunCosts:
    """Runs of ranks of a layout; errors as those of `run_costs` and `check_runs`."""
    costs = run_costs(context, backbone_cost(part), layout)
    check_runs(costs, part.batch)
    return costs


class ContextStrategy:
    """Samples of their own lengths in runs of ranks, with `balance.context`."""

    def __init__(self, part: Part, context: Context, layout: Layout) -> None:
        """Refuse layouts whose runs do not hold the documents; errors as those of `check_runs`."""
        self._cost = backbone_cost(part)
        self._costs = runs_of(part, context, layout)

    def __call__(self, drawn: DrawnStep) -> StepPlan:
        """The plan of a step."""
        step = StrategyStep(drawn=drawn, runs=self._costs)
        return step.plan(step.graph("tokens").mix(step.schedule).distribute("CP").cost(self._cost).balance())


def _keys_of(name: str, module: Module) -> _ModuleKeys:
    cap = None if module.cap is None else parse_bytes(module.cap, where=f"modules.{name}.cap")
    near = near_text_of(module, f"modules.{name}.near_text")
    return _ModuleKeys(module=module, cost=encoder_cost(module.model), cap=cap, near_text=near)


def own_functions(part: Part) -> dict[str, str]:
    """The functions of the user that place samples and items: `module:function` by the key that names each."""
    if part.balance.strategy is not None:
        return {"balance.strategy": part.balance.strategy}
    methods = {f"modules.{name}.method": module.method for name, module in sorted(part.modules.items())}
    return {key: name for key, name in {"balance.method": part.balance.method, **methods}.items() if ":" in name}


class OwnStrategy:
    """A function of the user: `strategy(step, tree, model) -> DGraph | StepPlan`."""

    def __init__(self, part: Part, layout: Layout) -> None:
        """Import the function; `RecipeError` if that fails."""
        assert part.balance.strategy is not None
        self._what = f"the strategy {part.balance.strategy}"
        self._function = imported(part.balance.strategy, "balance.strategy")
        sizes = Topology(tp=layout.tp, cp=layout.cp, pp=layout.pp, dp=layout.dp)
        self._tree = ClientPlaceTree.from_topology(sizes)
        self._model = StrategyModel(part)
        context = part.balance.context
        self._runs = None if context is None else runs_of(part, context, layout)
        self._was_asked_twice = False

    def __call__(self, drawn: DrawnStep) -> StepPlan:
        """The plan of a step.

        Raises:
            PlanError: The function fails, breaks a rule of `check_plan`, or gives another plan when it is asked again.
        """
        lock(drawn.packed)
        with errors_of(self._what, self._function, drawn.step):
            plan = self._asked(drawn)
            if not self._was_asked_twice:
                self._was_asked_twice = True
                again = self._asked(drawn)
                if again.plan_digest != plan.plan_digest:
                    raise PlanError(
                        f"it answers otherwise when it is asked again: plan digests {plan.plan_digest.hex()} and "
                        f"{again.plan_digest.hex()}; it must depend on its arguments alone"
                    )
        return plan

    def _asked(self, drawn: DrawnStep) -> StepPlan:
        found: Any = self._function(StrategyStep(drawn=drawn, runs=self._runs), self._tree, self._model)
        return check_plan(found.plan() if isinstance(found, DGraph) else found, drawn, self._runs)
