"""A leader's hold on the worker of its node, and the steps that come from it."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Generator
from contextlib import suppress

from torchmix.constructor.arrays import BlockArrays
from torchmix.errors import WorkerLost
from torchmix.steps.ahead import StopSignal
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.state import LoaderState, StateToAsk, encode_state
from torchmix.steps.worker.keeper import FAREWELL_S, NodeKeeper, keep_waiting
from torchmix.steps.worker.messages import (
    BlockRequest,
    Channel,
    EndReply,
    FailedReply,
    NewWorker,
    NodeLost,
    OpenStream,
    Start,
    decode_keeper_reply,
    decode_reply,
    encode,
    error_of,
    open_files_named,
)
from torchmix.steps.worker.shared_arrays import MappedArrays
from torchmix.steps.worker.shared_stream import SKEW_BLOCKS

# --- A leader's hold on the worker of its node.
#
# Whoever waits for a worker wakes up when its own stream is to end, and when the keeper has gone; several loaders of a
# process share one hold, and the last one to close lets go. Cost: two small messages a stream.

_LOOK_S = 0.25


class NodeHold:
    """What the loaders of a leader share."""

    def __init__(self, road: Channel, *, replica_of: dict[int, int], keeper: NodeKeeper | None = None) -> None:
        """Hold the road to the keeper.

        Args:
            road: This leader's end.
            replica_of: The replica of each leader that the worker serves, by global rank.
            keeper: The keeper if it is in this process.
        """
        self.replica_of = replica_of
        self._road = road
        self._keeper = keeper
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

    def leave(self, farewell_s: float = FAREWELL_S, *, keeps_worker: bool = False) -> None:
        """Count one loader less. The last one ends the keeper.

        Args:
            farewell_s: How long the keeper stays for other leaders that have not let go.
            keeps_worker: A keeper of this process leaves all leaders, and its worker waits for whom it serves next:
                for the loaders of this process, which go on elsewhere one after the other. Their streams run on.
        """
        if os.getpid() != self._process or self._num_users == 0:
            return
        with self._lock:  # ranks that are threads of one process may leave at once
            self._num_users -= 1
            is_last = not self._num_users
            if self._keeper is not None and keeps_worker and self._keeper.part():
                keep_waiting(self._keeper)
                self._keeper = None
        if not is_last:
            return
        with self._lock:
            self._road.close()
            if self._worker is not None:
                self._worker.close()
        if self._keeper is not None:
            self._keeper.end(farewell_s)

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
        """Look for a worker that the keeper tells of, and wait a little for it where it is needed."""
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
            reply = decode_keeper_reply(message)
            if isinstance(reply, NodeLost):
                self._lost = reply.text
                continue
            if not isinstance(reply, NewWorker):
                continue
            if self._worker is not None:
                self._worker.close()
            [descriptor] = descriptors
            self._worker, self._generation = Channel(socket.socket(fileno=descriptor)), reply.generation


# --- The leader's side of a stream: steps as the worker of the node makes them.
#
# Cost: two small messages a block.


def worker_blocks(
    settings: StreamSettings, state: LoaderState, *, node: NodeHold, consumer: int, stop: StopSignal
) -> Generator[BlockArrays, None, None]:
    """The steps from a state on, made by the worker of the node, or by those that follow it.

    Args:
        settings: What the steps follow from.
        state: Where to begin.
        node: This leader's hold on the worker.
        consumer: This leader's global rank.
        stop: Ends the steps, whatever they are waiting for.

    Raises:
        OpenFilesLimit: This process or the worker has as many open files as it may.
        WorkerLost: Too many workers were lost, one after the other.
        TorchmixError: A step cannot be planned or read; raised here as it was there.
    """
    # Leaders are a block apart at most, since they compare each step before they take the next one.
    after: deque[StateToAsk] = deque([StateToAsk.of(state)], maxlen=SKEW_BLOCKS + 1)
    generation, resumes_at, now = -1, b"", encode_state(state)
    while True:
        try:
            channel, generation = node.open_stream(newer_than=generation, stop=stop)
        except EOFError:
            return  # stopped
        start = Start(
            settings=settings,
            state=now,
            consumer=consumer,
            replica_of=node.replica_of,
            resumes_at=resumes_at,
        )
        try:
            stop.then(channel.shut_down)
            _say(channel, start)
            for block in _blocks(channel, settings.options.look_ahead):
                after.append(block.steps[-1].header.after)
                yield block
            return
        except EOFError:
            if stop.is_set():
                return
        finally:
            channel.close()
        resumes_at, now = encode_state(after[0].state), encode_state(after[-1].state)


def _blocks(channel: Channel, look_ahead: int) -> Generator[BlockArrays, None, None]:
    arrays = MappedArrays()
    for _ in range(look_ahead):
        _say(channel, BlockRequest(released=[]))
    while True:
        message, descriptors = channel.receive()
        reply = decode_reply(message)
        if isinstance(reply, EndReply):
            return
        if isinstance(reply, FailedReply):
            raise error_of(reply)
        block = arrays.unpack(reply, descriptors)
        _say(channel, BlockRequest(released=arrays.take_released()))  # before the block is used, which may take long
        yield block


def _say(channel: Channel, message: Start | BlockRequest) -> None:
    # A worker that has ended may have said more before, up to the end of all steps: receiving tells.
    with suppress(EOFError):
        channel.send(encode(message))
