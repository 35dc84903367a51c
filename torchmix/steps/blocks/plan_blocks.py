"""Which steps are planned before the first of them is read: a block, of small steps.

In: a planner and a cursor. Out: blocks of plans, each plan with the cursor after it. Must hold: the plans are those of
one step after the other; a block ends before a step whose decision is not known, at a change of the batch and at the
last step; what ends the plans, or fails, comes after the steps before it. Blocks begin with one step and double, so
the first step of a stream comes as soon as it would alone. Cost: that of planning. A call of the reader has a fixed
cost of about half a millisecond with hundreds of sources, which the steps of a block share.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import NamedTuple

from torchmix.errors import SourceExhausted
from torchmix.planner.cursor import Cursor
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.reader.protocol import StoppedWaiting
from torchmix.recipe.ramp import length_of_step, samples_of_step
from torchmix.steps.replay.read import RecordedPlan

BLOCK_TOKENS = 1 << 18
"""Most tokens of a block, unless it is one step."""


class PlannedStep(NamedTuple):
    """A step of a block."""

    plan: StepPlan
    after: Cursor
    plan_s: float
    """Time to plan the step."""


def plan_blocks(
    planner: Planner, cursor: Cursor, max_steps: int | None, *, recorded: RecordedPlan | None = None
) -> Generator[list[PlannedStep], None, None]:
    """Blocks of plans from the cursor on, each with at least one step.

    Args:
        planner: Plans the steps.
        cursor: Before the first one.
        max_steps: The step before which they end; None: they do not.
        recorded: Plans on disk, which are taken where there are some.

    Raises:
        TorchmixError: A step cannot be planned; the steps before it have been given.
    """
    most = 1
    while max_steps is None or cursor.step < max_steps:
        size = _size(planner, cursor.step)
        whole = max(1, BLOCK_TOKENS // (size[0] * size[1]))
        stop = cursor.step + min(most, whole)
        stop = stop if max_steps is None else min(stop, max_steps)
        block: list[PlannedStep] = []
        error: Exception | None = None
        while cursor.step < stop and _size(planner, cursor.step) == size:
            is_recorded = recorded is not None and recorded.has(cursor.step)
            if block and not is_recorded and not planner.is_decided(cursor):
                break
            began = time.perf_counter()
            try:
                plan, cursor = (recorded if recorded is not None and is_recorded else planner).step(cursor)
            except Exception as raised:  # it belongs in the place of its step
                error = raised
                break
            block.append(PlannedStep(plan, cursor, time.perf_counter() - began))
        if block:
            yield block
        if error is not None:
            if isinstance(error, StoppedWaiting) or (isinstance(error, SourceExhausted) and planner.part.one_pass):
                return
            raise error
        most *= 2


def _size(planner: Planner, step: int) -> tuple[int, int]:
    """Samples of a step, and the tokens of each."""
    return samples_of_step(planner.part.batch, step), length_of_step(planner.part.batch, step)
