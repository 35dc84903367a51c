"""The worker's side: what runs in the process.

In: the channel to the leader, which says what the stream is made of and where it begins. Out: a reply to each request.
Must hold: it ends when the leader says so, goes or is killed, at the latest after the step at hand; what it fails with
is the leader's to raise. Cost: that of planning, reading and building; arrays are built where the leader will find
them.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import NoReturn

from torchmix.constructor.memory import StepMemory
from torchmix.steps.local_steps import local_steps
from torchmix.steps.worker.channel import Channel
from torchmix.steps.worker.messages import EndReply, StepRequest, decode_request, decode_start, encode, failed_reply
from torchmix.steps.worker.process import ignore_signals
from torchmix.steps.worker.shared_arrays import SharedArrays

_LOOK_S = 5.0
"""Between two looks whether the leader lives: a fork of it may hold its end of the channel."""


def main(end: int, ignored: Collection[int]) -> NoReturn:
    """All that the process does.

    Args:
        end: Descriptor of its end of the channel.
        ignored: Signals that do not end it.
    """
    code = 1
    try:
        ignore_signals(ignored)
        with socket.socket(fileno=end) as ours:
            run_worker(Channel(ours))
        code = 0
    except BaseException:  # the edge of a process
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # whoever read it has gone
                stream.flush()
        # As a fork ends, without the interpreter's teardown: that aborts the process where a thread that nobody waits
        # for, of pyarrow or of a tokenizer, comes back from C++ meanwhile.
        os._exit(code)


def run_worker(channel: Channel) -> None:
    """Make steps for the leader until it asks for no more."""
    try:
        message, _ = channel.receive()
    except EOFError:
        return  # the leader has gone
    start = decode_start(message)
    requests, arrays = _Requests(channel), SharedArrays()
    memory = StepMemory(arrays.allocate)
    steps = local_steps(start.settings, start.state, memory=memory, is_stopped=requests.have_ended)
    try:
        while (request := requests.next()) is not None:
            arrays.release(request.released)
            try:
                step = next(steps, None)
            except Exception as error:  # the edge of a process: carried to the leader
                channel.send(encode(failed_reply(error)))
                return
            if step is None:
                channel.send(encode(EndReply()))
                return
            reply, descriptors = arrays.pack(step)
            channel.send(encode(reply), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
    except EOFError:
        pass  # the leader has gone
    finally:
        steps.close()


class _Requests:
    """What the leader asks for, and whether it still does."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._parent = os.getppid()
        self._waiting: deque[StepRequest] = deque()
        self._ended = False

    def next(self) -> StepRequest | None:
        """The next request; None once the leader has gone."""
        while not self._waiting and not self._ended:
            self._receive(_LOOK_S)
        return None if self._ended else self._waiting.popleft()

    def have_ended(self) -> bool:
        """Whether the leader has gone. Looks, and does not wait."""
        while not self._ended and self._receive(0):
            pass
        return self._ended

    def _receive(self, timeout_s: float) -> bool:
        """Whether a request has come."""
        try:
            message, _ = self._channel.receive(timeout_s)
        except TimeoutError:
            self._ended = os.getppid() != self._parent
            return False
        except EOFError:
            self._ended = True
            return False
        self._waiting.append(decode_request(message))
        return True
