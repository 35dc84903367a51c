"""What the processes of a node say to each other.

In and out: Structs, as msgpack. Three roads lead to a worker: from the host, which started it and gives it its members;
from each member, which opens streams; and a road for each stream, on which a leader says where to begin and then asks
for steps one by one, ahead of need. The worker answers each request with a step, with the end of the stream, or with
why it failed. Must hold: nothing in a message is executable. Cost: some microseconds a step.
"""

from __future__ import annotations

import msgspec

from torchmix.parallel.array_form import ArrayForm
from torchmix.parallel.children.judge import ProcessBeat
from torchmix.parallel.error_form import ErrorForm
from torchmix.steps.replica_steps import StreamSettings


class AddMember(msgspec.Struct, frozen=True, kw_only=True, tag="member"):
    """Host to worker: a leader to serve; the worker's end of its road comes along as a descriptor."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Member to host, first: who it is."""

    rank: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Host to member, first."""

    replica_of: dict[int, int]
    """Replica of each member, by global rank."""


class NewWorker(msgspec.Struct, frozen=True, kw_only=True, tag="worker"):
    """Host to member: a worker to use from now on; the member's end of the road to it comes along as a descriptor."""

    generation: int
    """Workers that the node has had before."""
    pid: int


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """Host to member: there is no worker, and there will be none."""

    text: str


class OpenStream(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Member to worker: a stream; the worker's end of its road comes along as a descriptor."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader says first about a stream."""

    settings: StreamSettings
    """What the steps follow from."""
    state: bytes
    """Before the first step that is asked for."""
    consumer: int
    """Which of the leaders of the node this is, by its global rank."""
    replica_of: dict[int, int]
    """Replica of each leader of the node, by global rank; they ask for the same steps."""
    look_ahead: int
    """Finished steps that may wait."""
    resumes_at: bytes = b""
    """After the loss of a worker: the state before the oldest step that another leader of the node may still miss."""


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
    rows: list[str]
    """Names of the arrays that maps give beside ids."""
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
HostReply = Welcome | NewWorker | NodeLost
encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_request = msgspec.msgpack.Decoder(StepRequest).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_beat = msgspec.msgpack.Decoder(ProcessBeat).decode
decode_host_reply = msgspec.msgpack.Decoder(HostReply).decode


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
