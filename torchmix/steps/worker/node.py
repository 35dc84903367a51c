"""A leader's hold on the worker of its node.

In: a road to the host, the process that has started the worker. Out: streams at the worker that is there now. Must
hold: whoever waits for a worker wakes up when its own stream is to end, and when the host has gone; several loaders of
a process share one hold, and the last one to close lets go. Cost: two small messages a stream.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

from torchmix.errors import WorkerLost
from torchmix.steps.stop_signal import StopSignal
from torchmix.steps.worker.channel import Channel, open_files_named
from torchmix.steps.worker.host import FAREWELL_S, NodeHost
from torchmix.steps.worker.messages import NewWorker, NodeLost, OpenStream, decode_host_reply, encode

_LOOK_S = 0.25


class NodeHold:
    """What the loaders of a leader share."""

    def __init__(self, road: Channel, *, replica_of: dict[int, int], host: NodeHost | None = None) -> None:
        """Hold the road to the host.

        Args:
            road: This leader's end.
            replica_of: Of all leaders that the worker serves, by global rank.
            host: The host if it is in this process.
        """
        self.replica_of = replica_of
        self._road = road
        self._host = host
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._worker: Channel | None = None
        self._generation = -1
        self._lost = ""
        self._num_users = 0

    @property
    def num_lost(self) -> int:
        """Workers that were lost since the start, as far as this leader has noticed."""
        return max(0, self._generation)

    @property
    def is_closed(self) -> bool:
        """Whether the last loader has let go, or this is a fork of the process that has it."""
        return self._num_users == 0 or os.getpid() != self._process

    def join(self) -> NodeHold:
        """One more loader."""
        self._num_users += 1
        return self

    def leave(self, farewell_s: float = FAREWELL_S) -> None:
        """One loader less; with the last one the host is told, or ended.

        Args:
            farewell_s: How long the host stays for other leaders that have not let go.
        """
        if os.getpid() != self._process or self._num_users == 0:
            return
        self._num_users -= 1
        if self._num_users:
            return
        with self._lock:
            self._road.close()
            if self._worker is not None:
                self._worker.close()
        if self._host is not None:
            self._host.end(farewell_s)

    def open_stream(self, *, newer_than: int, stop: StopSignal) -> tuple[Channel, int]:
        """A road to the worker for a stream.

        Args:
            newer_than: Generation of a worker that was lost, -1 before the first.
            stop: Ends the wait for a worker.

        Returns:
            The road, and the generation of the worker.

        Raises:
            EOFError: `stop` was set.
            WorkerLost: There is no worker, and there will be none.
            OpenFilesLimit: This process has as many open files as it may.
        """
        with open_files_named():
            ours, theirs = socket.socketpair()
        with theirs:
            try:
                while True:
                    with self._lock:
                        self._take_newer(newer_than)
                        generation = self._generation
                        if generation > newer_than and self._worker is not None:
                            with suppress(EOFError):
                                self._worker.send(encode(OpenStream()), [theirs.fileno()])
                                return Channel(ours), generation
                            newer_than = generation
                    if stop.is_set():
                        raise EOFError("the stream was stopped")
            except BaseException:
                ours.close()
                raise

    def _take_newer(self, newer_than: int) -> None:
        """Look for a worker that the host tells of, and wait a little for it where it is needed."""
        while True:
            if self._lost:
                raise WorkerLost(self._lost)
            try:
                message, descriptors = self._road.receive(0 if self._generation > newer_than else _LOOK_S)
            except TimeoutError:
                return
            except EOFError:
                self._lost = (
                    "the process that watches over this node's worker has ended, and the worker with it; restart from "
                    "the last checkpoint"
                )
                continue
            reply = decode_host_reply(message)
            if isinstance(reply, NodeLost):
                self._lost = reply.text
                continue
            if not isinstance(reply, NewWorker):
                continue
            if self._worker is not None:
                self._worker.close()
            [descriptor] = descriptors
            self._worker, self._generation = Channel(socket.socket(fileno=descriptor)), reply.generation
