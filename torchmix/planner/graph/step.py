"""The step that a strategy is given: graphs over it, and the plan that they make together.

In: a drawn step. Out: `DGraph`, `StepPlan`. Must hold: a graph can be asked for as often as one likes. Cost: finding
items, for graphs over them.
"""

from __future__ import annotations

import msgspec

from torchmix.errors import PlanError
from torchmix.planner.graph.dgraph import UNITS, DGraph, plan_of_graphs
from torchmix.planner.graph.drawn_step import DrawnStep
from torchmix.planner.plan import StepPlan
from torchmix.recipe.build import nearest


class StrategyStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step, as strategies see it."""

    drawn: DrawnStep

    @property
    def schedule(self) -> object:
        """The recipe's mixture and schedule, for `mix`."""
        return self.drawn.schedule

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
            unit: `sample`, `document` or `image`.
            module: Name of the module, for errors.

        Raises:
            PlanError: A word or a source is unknown.
            RecipeError: A source has no such column or no such items.
        """
        if unit not in UNITS:
            raise PlanError(f"graph: unit {unit!r} is not one of {', '.join(UNITS)}{nearest(unit, UNITS)}")
        chosen = None if sources is None else tuple(sources)
        for name in chosen or ():
            if name not in self.drawn.sources and unit == "sample":
                hint = nearest(name, self.drawn.sources)
                raise PlanError(f"graph: {name!r} is no source of this part{hint}")
        if unit == "sample":
            if sizes != "tokens":
                raise PlanError(f"graph: samples are measured in tokens, not in {sizes!r}; items have other columns")
            return DGraph(step=self.drawn, unit=unit, column=sizes, sources=chosen, items=None)
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
