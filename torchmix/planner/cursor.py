"""Where a run stands: everything that the coming steps depend on besides the recipe and the catalog.

A cursor is a value that no step alters; what a policy has decided for a step follows from the recipe and the records at
least `lag` steps before it, so how far steps are prepared ahead changes nothing. Cost: one record each `every` steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, Protocol

import msgspec

from torchmix.errors import PlanError, StateError
from torchmix.mixture.draw import Position
from torchmix.mixture.policy_log import LOG_START, StepRecord
from torchmix.mixture.shares import Begun, BegunStage
from torchmix.planner.drawing import NOT_DECIDED, DrawnTokens
from torchmix.planner.eras import NO_ERAS, Eras
from torchmix.planner.pack import Pieces
from torchmix.recipe.changes import Deciding


class DecisionRecords(Protocol):
    """The log, as far as planning reads it."""

    def record(self, step: int) -> tuple[StepRecord, str]:
        """The record of a step, later than in the call before, with the digest of the log up to it; waits for it."""

    def is_known(self, step: int) -> bool:
        """Whether `record` of this step, no earlier than in the call before, would not wait."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """What holds from the step after the last one on."""

    shares: Mapping[str, int] = msgspec.field(default_factory=lambda: NOT_DECIDED)
    """The share of each child of the group, sum 2^32; empty: the schedule's."""
    length: int = 0
    """Records of the log that this follows from: all up to the last step of decision."""
    digest: str = LOG_START
    """The digest of these records."""


UNDECIDED = Decided()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A logged change of what holds, from the next draw of `step` on."""

    step: int
    kind: Literal["ran_out", "stage"]
    """`ran_out`: a stream has given its `max_epochs`. `stage`: an entry of the schedule has begun, whose place is an
    epoch of a stream."""
    name: str
    """The stream's name."""
    epochs: int = 0
    """The whole epochs of the stream at which a stage begins; 0 of a run-out."""


class Cursor(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything that the coming steps depend on besides the recipe and the catalog."""

    step: int
    """The step to plan next."""
    position: Position
    pool: Pieces
    order_digest: bytes
    """Order digest of all steps before `step`."""
    decisions: tuple[Decision, ...]
    drawn: DrawnTokens
    """Totals of all draws in the steps before `step`."""
    decided: Decided = UNDECIDED
    """What a policy has decided for the step before `step`."""
    eras: Eras = NO_ERAS
    """Edits of streams' rows that an epoch follows from which is not over."""


def gone_by(decisions: Collection[Decision]) -> frozenset[str]:
    """Names of the streams that have run out."""
    return frozenset(decision.name for decision in decisions if decision.kind == "ran_out")


def begun_by(decisions: Collection[Decision]) -> Begun:
    """The stages at an epoch that have begun."""
    return tuple(BegunStage(one.name, one.epochs, one.step) for one in decisions if one.kind == "stage")


def decided_at(step: int, before: Decided, deciding: Deciding, records: DecisionRecords) -> Decided:
    """What holds in a step.

    Args:
        step: From 0.
        before: What held in the step before it.
        deciding: The recipe's.
        records: The log.

    Raises:
        StateError: `before` has another number of records than a run comes to.
        PlanError: The log does not fit the recipe.
    """
    after = deciding.step_of(step)
    if after is None:
        return before
    missing = after + 1 - before.length
    if before.length and missing != deciding.every_steps:
        raise StateError(
            f"the state before step {step} follows from {before.length} steps of the log, and a run's from "
            f"{after + 1 - deciding.every_steps} by then; use another checkpoint"
        )
    record, digest = records.record(after)
    if record.step != after:
        raise PlanError(f"record {after} of the log is of step {record.step}: the log is damaged")
    if record.shares is not None and tuple(sorted(record.shares)) != deciding.children:
        raise PlanError(
            f"the log gives shares of {sorted(record.shares)} after step {after}, and the group has "
            f"{list(deciding.children)}: the log is of another recipe"
        )
    shares = before.shares if record.shares is None else record.shares
    return Decided(shares=shares, length=after + 1, digest=digest)
