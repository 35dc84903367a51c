"""Where a run stands: everything that the coming steps depend on besides the recipe and the catalog.

A cursor is a value that no step alters; what a policy has decided for a step follows from the recipe and the records at
least `lag` steps before it, so how far steps are prepared ahead changes nothing. Cost: one record each `every` steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace

from torchmix.array_types import Int64, Int64Array
from torchmix.errors import PlanError, StateError
from torchmix.mixture.draw import Position
from torchmix.mixture.policy_log import LOG_START, StepRecord
from torchmix.mixture.shares import Begun, BegunStage
from torchmix.planner.drawing import NOT_DECIDED, DrawnTokens
from torchmix.planner.pack import NOT_LOOKED_UP, Pieces
from torchmix.recipe.changes import Deciding
from torchmix.recipe.structs import MAX_NAME_BYTES

# --- The records that a cursor is made of. A state keeps them as they are, so each number and text has its bounds.

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_BYTES)]
Fingerprint = Annotated[str, msgspec.Meta(max_length=16)]
Digest = Annotated[bytes, msgspec.Meta(max_length=8)]
Members = tuple[tuple[Name, Fingerprint], ...]
"""Members of a stream by sorted name, each with the fingerprint of its rows."""


class StreamBefore(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A stream before an edit of its rows."""

    name: Name
    epoch: Int64
    window: Int64
    offset: Int64
    members: Members
    """Those that it had; none where the edit added the stream."""
    after: Members
    """The members after the edit; none where it removed the stream. Edits in between may be forgotten."""


class Eras(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Edits of rows that still matter, in their order; and how many each stream has seen."""

    edits: tuple[tuple[StreamBefore, ...], ...] = ()
    """The streams whose rows each edit changed, and those that took rows or gave them away."""
    counts: Mapping[Name, Int64] = {}
    """By stream; those without edits are left out."""


NO_ERAS = Eras()


class DecisionRecords(Protocol):
    """The log, as far as planning reads it."""

    def record(self, step: int) -> tuple[StepRecord, str]:
        """The record of a step, later than in the call before, with the digest of the log up to it; waits for it."""

    def is_known(self, step: int) -> bool:
        """Whether `record` of this step, no earlier than in the call before, would not wait."""


class Decided(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds from the step after the last one on."""

    shares: Mapping[Name, Int64] = msgspec.field(default_factory=lambda: NOT_DECIDED)
    """The share of each child of the group, sum 2^32; empty: the schedule's."""
    length: Int64 = 0
    """Records of the log that this follows from: all up to the last step of decision."""
    digest: Fingerprint = LOG_START
    """The digest of these records."""


UNDECIDED = Decided()


class Decision(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A logged change of what holds, from the next draw of `step` on."""

    step: Int64
    kind: Literal["ran_out", "stage"]
    """`ran_out`: a stream has given its `max_epochs`. `stage`: an entry of the schedule has begun, whose place is an
    epoch of a stream."""
    name: Name
    """The stream's name."""
    epochs: Int64 = 0
    """The whole epochs of the stream at which a stage begins; 0 of a run-out."""


class RunRows(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The names that a cursor's numbers count, each once, and whose rows they are: equal in all steps of a planner."""

    streams: tuple[Name, ...] = ()
    """Sorted names."""
    fingerprints: tuple[Fingerprint, ...] = ()
    """[S] a hash of each stream's rows, see `planner.stream_order.stream_fingerprint`; empty where not known."""
    sources: tuple[Name, ...] = ()
    """Sorted names of where rows lie; left out where each stream is a source as it is."""
    members: Mapping[Name, Members] = {}
    """The members of each flat."""
    denied: Fingerprint = ""
    """Fingerprint of the documents that deny-lists name; empty where there are none."""

    @property
    def source_names(self) -> tuple[str, ...]:
        """Sorted names of the sources."""
        return self.sources or self.streams

    def members_of(self, stream: str) -> Members:
        """Members of a stream, with the fingerprints of their rows; none where these are not known."""
        fingerprint = self.fingerprints[self.streams.index(stream)]
        return self.members.get(stream, ((stream, fingerprint),)) if fingerprint else ()


class Cursor(msgspec.Struct, frozen=True, kw_only=True, eq=False, omit_defaults=True, forbid_unknown_fields=True):
    """Everything that the coming steps depend on besides the recipe and the catalog."""

    step: Int64
    """The step to plan next."""
    order_digest: Digest
    """Order digest of all steps before `step`."""
    position: Position
    pool: Pieces
    drawn: DrawnTokens
    """Totals of all draws in the steps before `step`."""
    decisions: tuple[Decision, ...] = ()
    decided: Decided = UNDECIDED
    """What a policy has decided for the step before `step`."""
    eras: Eras = NO_ERAS
    """Edits of streams' rows that an epoch follows from which is not over."""

    @staticmethod
    def of_step(step: int) -> Cursor:
        """A step's number alone: where streams stand before it is to be planned."""
        nowhere, empty = Position.start(0), Pieces.empty()
        return Cursor(step=step, order_digest=b"", position=nowhere, pool=empty, drawn=DrawnTokens()).without_catalog()

    def without_catalog(self) -> Cursor:
        """The cursor less what a planner looks up in its catalog."""
        return replace(self, pool=replace(self.pool, document_tokens=NOT_LOOKED_UP))


def column_bytes(value: Any) -> Any:
    """What msgspec writes of a column: its int64 as little-endian bytes; for `enc_hook`."""
    if isinstance(value, np.ndarray):
        return value.astype("<i8", copy=False).tobytes()
    raise NotImplementedError(f"{type(value).__name__} is no part of a cursor")


def column_of_bytes(kind: Any, value: Any) -> Int64Array:
    """The inverse of `column_bytes`, for `dec_hook`; what is no bytes of int64 does not decode."""
    return np.frombuffer(value, "<i8")


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
