"""The worker's side: what runs in the process.

It ends when the keeper says so, goes or is killed; what a stream fails with is its leaders' to raise; one stream does
not wait for another.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Collection
from typing import NoReturn

from torchmix.boards.board import own_board
from torchmix.parallel.children import BEAT_S, OwnPulse, ProcessBeat, end_with_parent, run_process
from torchmix.reader.page_cache import CacheRoom
from torchmix.steps.worker.messages import Channel, Start, decode_request, decode_start, encode
from torchmix.steps.worker.shared_stream import Seat, SharedStream


def main(descriptor: int, ignored: Collection[int], cpu: int) -> NoReturn:
    """See `run_process`, whose arguments these are."""
    run_process(_work, descriptor, ignored, cpu=cpu)


def _work(end: socket.socket) -> int:
    end_with_parent()
    own_board.open("node worker")
    run_worker(Channel(end))
    return 0


def run_worker(keeper: Channel) -> None:
    """Serve members until the keeper goes."""
    _Service(keeper).run()


class _Service:
    """All roads of the process, and what to do when something comes."""

    def __init__(self, keeper: Channel) -> None:
        self._keeper = keeper
        self._parent = os.getppid()
        self._selector = selectors.DefaultSelector()
        self._streams: list[SharedStream] = []
        self._room = CacheRoom()
        """Decoded pages of all parts: `read.cache` is of the node."""
        self._pulse = OwnPulse(self._send)
        self._num_signs = 0
        """Those of streams that have ended."""
        self._has_members = False
        self._has_ended = False

    def run(self) -> None:
        self._listen(self._keeper, self._from_keeper)
        while not self._has_ended and os.getppid() == self._parent:
            rest_s = max(0.0, self._pulse.due_s - time.monotonic()) if self._has_members else BEAT_S
            for key, _ in self._selector.select(rest_s):
                if key.fd in self._selector.get_map():  # an earlier one of these may have ended it
                    key.data()
            self._show()
            self._num_signs += sum(stream.num_signs for stream in self._streams if not stream.thread.is_alive())
            self._streams = [stream for stream in self._streams if stream.thread.is_alive()]
            if self._has_members:  # before, nobody reads beats
                self._pulse.look(
                    is_asked=any(stream.is_asked for stream in self._streams),
                    num_signs=self._num_signs + sum(stream.num_signs for stream in self._streams),
                    threads=[stream.maker_id for stream in self._streams if stream.is_asked],
                )

    def _show(self) -> None:
        for number, stream in enumerate(self._streams):
            name = f"{stream.part} {number}"
            if stream.thread.is_alive():
                own_board.show(name, stream.figures)
            else:
                own_board.withdraw(name)

    def _send(self, beat: ProcessBeat) -> None:
        try:
            self._keeper.send(encode(beat))
        except EOFError:
            self._has_ended = True

    def _listen(self, channel: Channel, then: Callable[[Channel], None]) -> None:
        self._selector.register(channel, selectors.EVENT_READ, lambda: then(channel))

    def _forget(self, channel: Channel) -> None:
        self._selector.unregister(channel)
        channel.close()

    def _from_keeper(self, keeper: Channel) -> None:
        try:
            _, descriptors = keeper.receive()
        except EOFError:
            self._has_ended = True
            return
        self._has_members = True
        for descriptor in descriptors:
            self._listen(Channel(socket.socket(fileno=descriptor)), self._from_member)

    def _from_member(self, member: Channel) -> None:
        try:
            _, descriptors = member.receive()
        except EOFError:
            self._forget(member)
            return
        for descriptor in descriptors:
            self._listen(Channel(socket.socket(fileno=descriptor)), self._start)

    def _start(self, channel: Channel) -> None:
        try:
            start = decode_start(channel.receive()[0])
        except EOFError:
            self._forget(channel)
            return
        stream, seat = self._seat(start, channel)
        self._selector.modify(channel, selectors.EVENT_READ, lambda: self._ask(stream, seat, channel))

    def _seat(self, start: Start, channel: Channel) -> tuple[SharedStream, Seat]:
        """A place at a stream that is there, or else at a new one."""
        for stream in self._streams:
            if (seat := stream.join(start, channel)) is not None:
                return stream, seat
        stream = SharedStream(start, self._room)
        self._streams.append(stream)
        seat = stream.join(start, channel)
        assert seat is not None, "the first leader's state is the stream's"
        return stream, seat

    def _ask(self, stream: SharedStream, seat: Seat, channel: Channel) -> None:
        try:
            request = decode_request(channel.receive()[0])
        except EOFError:
            stream.leave(seat)
            self._forget(channel)
            return
        stream.ask(seat, request)
