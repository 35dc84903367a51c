"""The steps of a run, planned again: shares asked and given, edits, decisions, and the documents of any step.

Planning is that of the run, so what is shown is what was trained on. Every 64th cursor is kept, so that any step is
planned within milliseconds when somebody clicks it. Cost: planning of all steps once; no data is read before a text is
asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from torchmix.mixture.policy_log import StepRecord
from torchmix.mixture.shares import SHARE_ONE
from torchmix.planner.cursor import Cursor
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.recipe.fingerprint import recipe_keys
from torchmix.steps.history import RunFold, Segment
from torchmix.steps.replay import RecordedPlan


class PlanFold:
    """The steps of a plan's folder, one after another, as `RunFold` gives those of a run."""

    edits: tuple[int, ...] = ()

    def __init__(self, recorded: RecordedPlan, planner: Planner, segment: Segment) -> None:
        """Begin at the first step of the plan; `planner` is that of the recorded plan."""
        self.recorded, self.planner, self.segment = recorded, planner, segment
        self.segments = (segment,)
        self.cursor = recorded.cursor(recorded.manifest.first_step)

    def before(self) -> Cursor:
        """The cursor of the next step."""
        return self.cursor

    def plan(self) -> StepPlan:
        """The next step; errors as `RecordedPlan.step`."""
        plan, self.cursor = self.recorded.step(self.cursor)
        return plan

    def skip_to(self, step: int) -> None:
        """Pass over the steps before one."""
        self.cursor = self.recorded.cursor(max(step, self.cursor.step))


KEPT_EVERY = 64
"""Steps between two cursors that are kept."""


class _Kept(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where planning can begin again."""

    step: int
    planner: Planner
    cursor: Cursor
    segment: Segment


class RunSteps:
    """The steps of a fold from one step on, as numbers; each can be planned again."""

    def __init__(self, fold: RunFold | PlanFold) -> None:
        """Begin where the fold stands."""
        self._fold = fold
        self._kept: list[_Kept] = []
        self.first = fold.cursor.step
        """The first step that is known."""
        self.digests: list[str] = []
        """The order digest after each step."""
        self._asked: list[dict[str, float]] = []
        self._given: list[dict[str, int]] = []
        self._fill: list[float] = []
        self._balance: list[float] = []
        self._hash_order: list[float] = []
        self._pieces: list[int] = []

    @property
    def stop(self) -> int:
        """The step behind the last one that was planned."""
        return self.first + len(self.digests)

    @property
    def num_pieces(self) -> int:
        """Pieces of all steps."""
        return sum(self._pieces)

    def plan_until(self, stop: int, *, on_step: Callable[[], object]) -> None:
        """Plan further steps; errors as `RunFold.plan`."""
        while self.stop < stop:
            before = self._fold.before()
            last = self._kept[-1] if self._kept else None
            if last is None or last.planner is not self._fold.planner or before.step - last.step >= KEPT_EVERY:
                kept = _Kept(step=before.step, planner=self._fold.planner, cursor=before, segment=self._fold.segment)
                self._kept.append(kept)
            plan = self._fold.plan()
            shares = self._fold.planner.shares_asked(before, self._fold.cursor) / SHARE_ONE
            self._asked.append(dict(zip(plan.streams, shares.tolist(), strict=True)))
            self._given.append(dict(zip(plan.streams, plan.delivered_tokens.tolist(), strict=True)))
            self._fill.append(plan.fill)
            self._balance.append(plan.balance.ratio)
            self._hash_order.append(plan.balance.hash_order_ratio)
            self._pieces.append(len(plan.pieces))
            self.digests.append(plan.order_digest.hex())
            on_step()

    def plan(self, step: int) -> tuple[StepPlan, Segment]:
        """A step that was planned before, with the recipe and catalog that the run had then.

        Raises:
            IndexError: The step was not planned.
        """
        if not self.first <= step < self.stop:
            raise IndexError(step)
        if isinstance(self._fold, PlanFold):  # by hand, other pieces may be in a step than a planner would draw
            recorded = self._fold.recorded
            return recorded.step(recorded.cursor(step))[0], self._fold.segment
        kept = self._kept[bisect_right(self._kept, step, key=lambda one: one.step) - 1]
        cursor = kept.cursor
        while cursor.step < step:
            cursor = kept.planner.skip(cursor)
        plan, _ = kept.planner.step(cursor)
        return plan, kept.segment

    def values(self) -> dict[str, Any]:
        """What all steps are, as numbers: streams by all that any step had."""
        streams = sorted(set().union(*self._given, *self._asked))
        return {
            "first": self.first,
            "streams": streams,
            "asked": [[round(step.get(name, 0.0), 6) for name in streams] for step in self._asked],
            "given": [[step.get(name, 0) for name in streams] for step in self._given],
            "fill": [round(value, 4) for value in self._fill],
            "balance": [round(value, 4) for value in self._balance],
            "hash_order": [round(value, 4) for value in self._hash_order],
            "digests": self.digests,
            "edits": self._edits(),
        }

    def _edits(self) -> list[dict[str, Any]]:
        """Where the recipe changed, and which of its keys."""
        found = []
        for before, after in zip(self._fold.segments, self._fold.segments[1:], strict=False):
            if after.step not in self._fold.edits or not self.first <= after.step < self.stop:
                continue
            old, new = (recipe_keys(one.part) for one in (before, after))
            keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
            found.append({"step": after.step, "keys": keys or ["rows of the sources"]})
        return found


def rows_of_plan(plan: StepPlan) -> list[list[Any]]:
    """The pieces of a step: sample, dp rank, microbatch, source, row, first token, tokens, tokens of the document."""
    pieces, placement = plan.pieces, plan.placement
    columns = (
        plan.sample,
        placement.dp_rank_of_sample[plan.sample],
        placement.microbatch_of_sample[plan.sample],
        np.array(plan.sources, object)[pieces.source],
        pieces.row,
        pieces.start,
        pieces.tokens,
        pieces.document_tokens,
    )
    return [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def decisions_of_records(records: list[StepRecord], lag_steps: int) -> list[dict[str, Any]]:
    """What a policy decided, from the step on that it holds for: shares in percent, or why it decided nothing."""
    return [
        {
            "step": record.step + lag_steps,
            "shares": {name: round(100 * share / SHARE_ONE, 3) for name, share in (record.shares or {}).items()},
            "fault": record.fault,
        }
        for record in records
        if record.shares is not None or record.fault
    ]


def spikes(losses: dict[str, dict[int, float]], *, most: int) -> list[int]:
    """Steps in which a source's loss rises most above the median of its twenty before, highest first; ties by step.

    A rise counts from four times the median distance of those twenty from their median on.

    Args:
        losses: Source -> step -> mean loss.
        most: How many.
    """
    rises: dict[int, float] = {}
    for by_step in losses.values():
        steps = sorted(by_step)
        values = np.array([by_step[step] for step in steps])
        for number in range(5, len(steps)):
            window = values[max(0, number - 20) : number]
            middle = np.median(window)
            rise = float(values[number] - middle)
            if rise > 4 * float(np.median(np.abs(window - middle))) + 1e-6:
                rises[steps[number]] = max(rise, rises.get(steps[number], 0.0))
    return sorted(rises, key=lambda step: (-rises[step], step))[:most]
