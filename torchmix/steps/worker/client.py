"""The leader's side of a stream: steps as the worker of the node makes them.

In: what a stream is made of, and where it begins. Out: `StepArrays` over memory that is shared with the worker. Must
hold: as many steps are asked for ahead as may wait, and no more; where a worker is lost, its successor goes on after
the last step that came, so every step comes once; closing the generator, or the stop signal, ends the stream at once.
Cost: two small messages a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import suppress

from torchmix.constructor.arrays import StepArrays
from torchmix.steps.header import state_after
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.stop_signal import StopSignal
from torchmix.steps.worker.channel import Channel
from torchmix.steps.worker.messages import (
    EndReply,
    FailedReply,
    Start,
    StepRequest,
    decode_reply,
    encode,
    error_of,
)
from torchmix.steps.worker.node import NodeHold
from torchmix.steps.worker.shared_arrays import MappedArrays
from torchmix.steps.worker.shared_stream import SKEW_STEPS


def worker_steps(
    settings: StreamSettings, state: bytes, *, node: NodeHold, consumer: int, look_ahead: int, stop: StopSignal
) -> Generator[StepArrays, None, None]:
    """The steps from a state on, made by the worker of the node, or by those that follow it.

    Args:
        settings: What the steps follow from.
        state: Where to begin.
        node: This leader's hold on the worker.
        consumer: This leader's global rank.
        look_ahead: Finished steps that may wait, 1 or more.
        stop: Ends the steps, whatever they are waiting for.

    Raises:
        OpenFilesLimit: This process or the worker has as many open files as it may.
        WorkerLost: Too many workers were lost, one after the other.
        TorchmixError: A step cannot be planned or read; raised here as it was there.
    """
    headers: deque[bytes] = deque(maxlen=SKEW_STEPS)
    generation, resumes_at, now = -1, b"", state
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
            look_ahead=look_ahead,
            resumes_at=resumes_at,
        )
        try:
            stop.then(channel.shut_down)
            _say(channel, start)
            for step in _steps(channel, look_ahead):
                headers.append(step.header)
                yield step
            return
        except EOFError:
            if stop.is_set():
                return
        finally:
            channel.close()
        # Leaders are SKEW_STEPS apart at most: who begins from this far back misses no step of another.
        resumes_at = state_after(headers[0]) if len(headers) == SKEW_STEPS else state
        now = state_after(headers[-1]) if headers else state


def _steps(channel: Channel, look_ahead: int) -> Generator[StepArrays, None, None]:
    arrays = MappedArrays()
    for _ in range(look_ahead):
        _say(channel, StepRequest(released=[]))
    while True:
        message, descriptors = channel.receive()
        reply = decode_reply(message)
        if isinstance(reply, EndReply):
            return
        if isinstance(reply, FailedReply):
            raise error_of(reply)
        step = arrays.unpack(reply, descriptors)
        _say(channel, StepRequest(released=arrays.take_released()))  # before the step is used, which may take long
        yield step


def _say(channel: Channel, message: Start | StepRequest) -> None:
    # A worker that has ended may have said more before, up to the end of all steps: receiving tells.
    with suppress(EOFError):
        channel.send(encode(message))
