"""What a leader and its worker process say to each other.

In and out: Structs, as msgpack. The leader says where to start, and then asks for steps one by one, ahead of need; the
worker answers each request with a step, with the end of the stream, or with why it failed. Must hold: nothing in a
message is executable. Cost: some microseconds a step.
"""

from __future__ import annotations

import msgspec

from torchmix.parallel.array_form import ArrayForm
from torchmix.parallel.error_form import ErrorForm
from torchmix.steps.replica_steps import StreamSettings


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader says first."""

    settings: StreamSettings
    """What the steps follow from."""
    state: bytes
    """Where to begin."""


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One more step, please."""

    released: list[int]
    """Arenas that nobody at the leader refers to any more."""


class Arena(msgspec.Struct, frozen=True, kw_only=True):
    """Memory for the arrays of one step at a time, shared from now on; its descriptor comes with the message."""

    number: int
    num_bytes: int


class SharedArray(msgspec.Struct, frozen=True, kw_only=True):
    """An array in an arena."""

    form: ArrayForm
    arena: int
    start_bytes: int


class InlineArray(msgspec.Struct, frozen=True, kw_only=True):
    """A small array."""

    form: ArrayForm
    values: bytes


class StepReply(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A step, as `StepArrays`."""

    step: int
    num_tokens_global: int
    num_masked_tokens: int
    header: bytes
    modules: list[str]
    """Names of the arrays that are of modules."""
    shared: list[SharedArray]
    inline: list[InlineArray]
    new: list[Arena]
    """Not known to the leader before; as many descriptors come along, in this order."""
    dropped: list[int]
    """Arenas that will not be used again."""


class EndReply(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """There are no more steps."""


class FailedReply(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The step that was asked for could not be made."""

    error: ErrorForm


Reply = StepReply | EndReply | FailedReply
encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_request = msgspec.msgpack.Decoder(StepRequest).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


class InWorker(Exception):
    """The cause of an error that was raised in a worker process: its traceback there, as text."""


def failed_reply(error: Exception) -> FailedReply:
    """What the leader must know to raise the same error."""
    return FailedReply(error=ErrorForm.of(error, with_traceback=True))


def error_of(reply: FailedReply) -> Exception:
    """The error to raise, with where it happened as its cause."""
    error = reply.error.error()
    error.__cause__ = InWorker(f"in the worker process:\n{reply.error.traceback}")
    return error
