"""What each source will give in N steps, from the run's beginning or a state on, as numbers.

In: what planning ahead has found. Out: `Forecast`. Must hold: it says which of its numbers are exact. Cost: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from torchmix.planner.plan import StepPlan

LOW_FILL = 0.8
"""A batch that is filled by less is a finding."""
SIMULATED_STEPS = 1000
"""Steps that are planned in full before rates take over."""


class ModuleSums:
    """What a module computes and what of it travels, summed over the steps added."""

    def __init__(self) -> None:
        self._unit, self._num_consumers = "", 0
        self._num_steps = self._num_items = self._cost = self._lower_bound = self._hash_order_cost = 0
        self._rows = self._away = self._left_text = self._hash_order = 0

    def add(self, plan: StepPlan, name: str) -> None:
        """Count the module of a step."""
        module = plan.item_modules[name]
        self._unit, self._num_consumers = module.unit, module.num_consumers
        self._num_steps += 1
        self._num_items += len(module.items)
        self._cost += module.balance.cost
        self._lower_bound += module.balance.lower_bound
        self._hash_order_cost += module.balance.hash_order_cost
        self._rows += int(module.items.tokens.sum())
        self._away += plan.rows_that_travel(name)
        self._left_text += module.balance.left_text
        self._hash_order += module.balance.took_hash_order

    def values(self) -> dict[str, Any]:
        """The sums for a program: `rows` are what the module gives; `steps_left_text` and `steps_in_hash_order` count
        the steps that fell back."""
        return {
            "items": self._unit,
            "num_consumers": self._num_consumers,
            "num_steps": self._num_steps,
            "num_items": self._num_items,
            "balance_ratio": self._cost / self._lower_bound,
            "hash_order_ratio": self._hash_order_cost / self._lower_bound,
            "rows": self._rows,
            "rows_that_travel": self._away,
            "steps_left_text": self._left_text,
            "steps_in_hash_order": self._hash_order,
        }


class SourceForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One source over N steps."""

    name: str
    share: float
    """Part of the trained tokens, as the recipe has it, whatever runs out in these steps."""
    asked_share: float
    """The mean of the shares that are asked of it in these steps, or until the data ends; 0 once it has run out."""
    epoch_tokens: int
    """Tokens that one epoch gives, after the recipe's overflow rule."""
    first_step: int | None
    """Step of its first token in these steps, estimated also beyond N; None if the data ends before."""
    delivered_tokens: int
    """Tokens that it gives in all N steps, or until the data ends."""
    epochs: float
    """Passes over the source since step 0 until then."""
    runs_out_step: int | None
    """First step that asks for more than `max_epochs`, maybe before these; None if there is none until their end."""
    most_repeats: int
    """Most times that one document came in one of the simulated steps."""
    deviation: float
    """By how much its part of a step differs from its share, over the share: mean of the simulated steps before any
    source ran out."""
    piece_tokens: float
    """Tokens of a piece, mean of those delivered in the simulated steps; 0 if there are none."""


class StageForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Where a change of the schedule lies in the run."""

    start: int
    """The step with which it begins."""
    stop: int
    """The first step that has the new shares alone; `start` where they hold at once."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """N steps of a run."""

    start: int
    """The first of them."""
    num_steps: int
    simulated_steps: int
    """How many, the first ones, were planned, so that every number is exact."""
    stop_step: int | None
    """Step that cannot be planned, because a source ran out and the recipe says `error`, or all did."""
    stop_is_exact: bool
    """The planner itself came to `stop_step`."""
    capacity_tokens: int
    """Tokens that a step has room for, mean of all N."""
    fill: float
    """Tokens over capacity, mean of the simulated steps."""
    lowest_fill: float
    """The fill of the simulated step with the fewest tokens."""
    lowest_fill_step: int
    num_low_fills: int
    """Simulated steps below `LOW_FILL`."""
    alignment: float
    """Tokens of all documents drawn in the simulated steps over what they take when rounded up to `align_tokens`."""
    sources: tuple[SourceForecast, ...]
    """By sorted name; without cells that have no rows."""
    modules: Mapping[str, Mapping[str, Any]]
    """`ModuleSums.values` of each module, over the simulated steps, in the layout that they were planned for."""
    last: tuple[bytes, StepPlan] | None
    """The last simulated step, and the order digest before it."""
    stages: tuple[StageForecast | None, ...]
    """Each change of the schedule, maybe before these steps or behind them; None of one at an epoch that does not come
    until their end, or that a later change has overtaken."""

    def is_exact(self, step: int) -> bool:
        """What happens in this step was planned, not estimated."""
        return step < self.start + self.simulated_steps or (self.stop_is_exact and step == self.stop_step)
