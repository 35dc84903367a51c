"""What a report shows, as numbers.

In: plans of steps, one after another. Out: plain values, which stand in the page as JSON beside their pictures. Must
hold: each number is the plan's, or a sum of the plan's. Cost: a few array operations a step; one plan is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.planner.balance import in_hash_order
from torchmix.planner.cost import CostModel
from torchmix.planner.graph.drawing import drawing_of
from torchmix.planner.methods.bins import sums_of_bins
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.planner.simulation.rivals import bins_of

MOST_PIECES = 24
"""Pieces of the microbatch that is drawn."""
LENGTHS = 1 << np.arange(32, dtype=np.int64)
"""Lower bounds of the classes of documents by their tokens; empty documents count in none."""


class ReportNumbers:
    """Sums over the steps added, and the step that balance changes most."""

    def __init__(self, cost: CostModel, length: int) -> None:
        """`cost`: of the backbone; `length`: tokens of a sample."""
        self._cost, self._length = cost, length
        self._steps: list[int] = []
        self._of_streams: list[dict[str, int]] = []
        self._of_step: list[tuple[float, float, float]] = []
        self._documents: dict[str, NDArray[np.int64]] = {}
        self._shown: StepPlan | None = None

    def add(self, plan: StepPlan) -> None:
        """Count a step."""
        self._steps.append(plan.step)
        self._of_streams.append(dict(zip(plan.streams, plan.delivered_tokens.tolist(), strict=True)))
        self._of_step.append((plan.fill, plan.balance.hash_order_ratio, plan.balance.ratio))
        pieces = plan.pieces
        begun = pieces.start == 0
        for number, name in enumerate(plan.sources):
            tokens = pieces.document_tokens[begun & (pieces.source == number)]
            counts = np.bincount(np.searchsorted(LENGTHS, tokens, side="right"), minlength=len(LENGTHS) + 1)[1:]
            self._documents[name] = self._documents.get(name, np.zeros(len(LENGTHS), np.int64)) + counts
        if self._shown is None or _gain(plan) > _gain(self._shown):
            self._shown = plan

    def values(self) -> dict[str, Any]:
        """The numbers of the page; there is at least one step."""
        plan = self._shown
        assert plan is not None, "there is a step"
        cost = self._cost.of_samples(plan.pieces.tokens, plan.sample, num_samples=plan.num_samples, length=plan.length)
        plain = in_hash_order(plan.num_samples, plan.layout)
        streams = sorted(set().union(*self._of_streams))  # an edit may bring some and take some
        fill, before, after = zip(*self._of_step, strict=True)
        return {
            "length": self._length,
            "steps": self._steps,
            "streams": streams,
            "delivered_tokens": [[step.get(name, 0) for name in streams] for step in self._of_streams],
            "fill": list(fill),
            "hash_order_ratio": list(before),
            "balance_ratio": list(after),
            "documents_by_length": {
                "from_tokens": LENGTHS.tolist(),
                "documents": {name: counts.tolist() for name, counts in self._documents.items()},
            },
            "shown_step": {
                "step": plan.step,
                "order_digest": plan.order_digest.hex(),
                "plan_digest": plan.plan_digest.hex(),
                "lower_bound": plan.balance.lower_bound,
                "hash_order": bins_of(cost, plain, plan.layout).tolist(),
                "plan": bins_of(cost, plan.placement, plan.layout).tolist(),
                "modules": {name: _of_module(plan, module) for name, module in plan.item_modules.items()},
            },
        }

    def drawing(self, colors: Mapping[str, str]) -> str:
        """The roads of the first pieces of a microbatch of the step that is shown, as SVG."""
        assert self._shown is not None, "there is a step"
        return drawing_of(self._shown, 0, most_pieces=MOST_PIECES, colors=colors)


def _gain(plan: StepPlan) -> float:
    return plan.balance.hash_order_cost / max(plan.balance.cost, 1)


def _of_module(plan: StepPlan, module: ItemPlan) -> Mapping[str, Any]:
    """Cost of the bins of each consumer, in rows by replica: consumers of a replica side by side, bin by bin."""

    def grid(consumer: NDArray[np.int64]) -> list[list[int]]:
        place = consumer * module.num_bins + module.bin_of_item
        sums = sums_of_bins(module.cost_of_item, place, module.num_consumers * module.num_bins)
        found: list[list[int]] = sums.reshape(plan.layout.dp, -1).tolist()
        return found

    return {
        "unit": module.unit,
        "axis": module.axis,
        "num_items": len(module.items),
        "num_bins": module.num_bins,
        "hash_order": grid(np.arange(len(module.items)) % module.num_consumers),
        "plan": grid(module.consumer_of_item),
    }
