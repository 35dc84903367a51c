"""The road between a leader and its worker process: one end of a pair of connected sockets.

In and out: messages of bytes, each behind its length, with the file descriptors that belong to it. Must hold: a side
that has gone, or was shut down, is an EOFError at the other, never an endless wait. Cost: two system calls a message.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait

from torchmix.errors import OpenFilesLimit

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

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message.

        Args:
            message: Of any length.
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
            self._socket.close()

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
