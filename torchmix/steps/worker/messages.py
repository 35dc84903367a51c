"""What the processes of a node say to each other, and the sockets that it travels on."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait

import msgspec

from torchmix.errors import OpenFilesLimit, TorchmixError
from torchmix.parallel.children import ProcessBeat
from torchmix.parallel.wire import ArrayForm, ErrorForm
from torchmix.steps.replica_steps import StreamSettings

# --- What the processes of a node say to each other.
#
# In and out: Structs, as msgpack. Three roads lead to a worker: from the keeper, which started it and gives it its
# members; from each member, which opens streams; and a road for each stream, on which a leader says where to begin and
# then asks for blocks of steps one by one, ahead of need. The worker answers each request with a block, with the end of
# the stream, or with why it failed. Must hold: nothing in a message is executable. Cost: some microseconds a block.


class AddMember(msgspec.Struct, frozen=True, kw_only=True, tag="member"):
    """Keeper to worker: a leader to serve; the worker's end of its road comes along as a descriptor."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Member to keeper, first: who it is."""

    rank: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Keeper to member, first."""

    replica_of: dict[int, int]
    """Replica of each member, by global rank."""


class NewWorker(msgspec.Struct, frozen=True, kw_only=True, tag="worker"):
    """Keeper to member: a worker to use from now on; the member's end of the road to it comes along as a descriptor."""

    generation: int
    """Workers that the node has had before."""
    pid: int


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """Keeper to member: there is no worker, and there will be none."""

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
    resumes_at: bytes = b""
    """After the loss of a worker: the state before the oldest step that another leader of the node may still miss."""


class BlockRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One more block of steps, please."""

    released: list[int]
    """Arenas that nobody at the leader refers to any more."""


class Arena(msgspec.Struct, frozen=True, kw_only=True):
    """Memory for the arrays of one block at a time, shared from now on; its descriptor comes with the message."""

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


class PackedArrays(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays by name, in arenas or in the message itself."""

    shared: list[SharedArray] = []
    inline: list[InlineArray] = []


class PackedStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a step of a block has beside the fields, as `StepFacts`."""

    step: int
    num_tokens_global: int
    num_masked_tokens: int = 0
    modules: PackedArrays = PackedArrays()
    rows: PackedArrays = PackedArrays()


class BlockReply(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """Consecutive steps, as `BlockArrays`."""

    fields: PackedArrays
    steps: list[PackedStep]
    headers: bytes
    """Those of all these steps; see `encode_headers`."""
    new: list[Arena]
    """Not known to the leader before; as many descriptors come along, in this order."""
    dropped: list[int]
    """Arenas that will not be used again."""


class EndReply(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """There are no more steps."""


class FailedReply(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The step that was asked for could not be made."""

    error: ErrorForm


Reply = BlockReply | EndReply | FailedReply
KeeperReply = Welcome | NewWorker | NodeLost
encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_request = msgspec.msgpack.Decoder(BlockRequest).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_beat = msgspec.msgpack.Decoder(ProcessBeat).decode
decode_keeper_reply = msgspec.msgpack.Decoder(KeeperReply).decode


class InWorker(Exception):
    """The cause of an error that was raised in a worker process: its traceback there, as text."""


def failed_reply(error: Exception) -> FailedReply:
    """What the leader must know to raise the same error.

    An error of our own that nothing else caused, as a file that was cut, says all in its message, which a traceback
    would hide.
    """
    says_all = isinstance(error, TorchmixError) and error.__cause__ is None
    return FailedReply(error=ErrorForm.of(error, with_traceback=not says_all))


def error_of(reply: FailedReply) -> Exception:
    """The error to raise, with where it happened as its cause, if its message does not say all."""
    error = reply.error.error()
    if reply.error.traceback:
        error.__cause__ = InWorker(f"in the worker process:\n{reply.error.traceback}")
    return error


# --- The road between a leader and its worker process: one end of a pair of connected sockets.
#
# In and out: messages of bytes, each behind its length, with the file descriptors that belong to it. Must hold: a side
# that has gone, or was shut down, is an EOFError at the other, never an endless wait. Cost: two system calls a
# message.

LIMIT_ERRNOS = (errno.EMFILE, errno.ENFILE)
"""This process, or the system, has no more descriptors."""
_PREFIX = struct.Struct("<QI")
"""Bytes of the message, and its descriptors."""
_MAX_DESCRIPTORS = 250
"""Linux takes 253 at once."""


class Channel:
    """One end. One thread sends and one receives; any may shut it down."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        self._socket = end
        # Shutting down a descriptor that was closed meanwhile could hit another one's file. A collector may call it,
        # in a thread that is closing.
        self._ending = threading.RLock()
        # A collector that meets a cycle may come to the socket before the generator that would close it.
        self._give_back = weakref.finalize(self, end.close)
        self._give_back.atexit = False

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message.

        Args:
            message: A message of any length.
            descriptors: At most 250 open ones; they stay open here.

        Raises:
            EOFError: The other side has gone.
        """
        prefix = _PREFIX.pack(len(message), len(descriptors))
        try:
            # With the first byte alone: a receiver gets descriptors with the first byte that they were sent with.
            sent = socket.send_fds(self._socket, [prefix], descriptors) if descriptors else 0
            self._socket.sendall(prefix[sent:] + message)
        except OSError as error:
            raise EOFError("the other side has gone") from error

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[int]]:
        """Wait for a message.

        Returns:
            The message and its descriptors, which are the caller's to close.

        Raises:
            TimeoutError: None has begun within `timeout_s`.
            EOFError: The other side has gone, or this one was shut down.
            OpenFilesLimit: This process may not have as many descriptors.
        """
        if timeout_s is not None and not wait([self._socket], timeout_s):
            raise TimeoutError
        try:
            first, descriptors, _, _ = socket.recv_fds(self._socket, _PREFIX.size, _MAX_DESCRIPTORS)
            if not first:
                raise EOFError("the other side has gone")
            num_bytes, num_descriptors = _PREFIX.unpack(first + self._exactly(_PREFIX.size - len(first)))
            message = self._exactly(num_bytes)
        except OSError as error:
            raise EOFError("the other side has gone") from error
        if len(descriptors) < num_descriptors:  # the kernel leaves out what goes beyond the limit
            for descriptor in descriptors:
                os.close(descriptor)
            raise open_files_limit()
        return message, descriptors

    def fileno(self) -> int:
        """The socket's descriptor, for `select`; -1 once it is closed."""
        return self._socket.fileno()

    def shut_down(self) -> None:
        """Let both sides meet the end of the channel, whatever they are waiting for."""
        with self._ending, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; the other side meets the end."""
        with self._ending:
            self._give_back()

    def _exactly(self, num_bytes: int) -> bytes:
        found = bytearray(num_bytes)
        view = memoryview(found)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise EOFError("the other side has gone in the middle of a message")
            view = view[received:]
        return bytes(found)


@contextmanager
def open_files_named() -> Iterator[None]:
    """Name the limit where the system says that there are too many open files.

    Raises:
        OpenFilesLimit: In the place of the system's error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in LIMIT_ERRNOS:
            raise
        raise open_files_limit() from error


def open_files_limit() -> OpenFilesLimit:
    """The error of a process that has as many open files as it may."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return OpenFilesLimit(
        f"process {os.getpid()} has as many open files as it may, {limit} (`ulimit -n`): each step that is held, by "
        f"the trainer or for it, takes one. Let go of microbatches, lower look_ahead, or raise `ulimit -n` to 4096"
    )
