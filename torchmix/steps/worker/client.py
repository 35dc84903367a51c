"""The leader's side: steps of a worker process, as they come.

In: what a stream is made of, and where it begins. Out: `StepArrays` over memory that is shared with the worker. Must
hold: as many steps are asked for ahead as may wait, and no more; closing the generator, or the stop signal, ends the
process within seconds; a process that ended by itself is told with its signal. Cost: two small messages a step.

A worker that the kernel kills, most often for want of memory, becomes one error that says so.
"""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass

from torchmix.constructor.arrays import StepArrays
from torchmix.errors import WorkerLost
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.stop_signal import StopSignal
from torchmix.steps.worker.channel import Channel, open_files_named
from torchmix.steps.worker.messages import EndReply, FailedReply, Start, StepRequest, decode_reply, encode, error_of
from torchmix.steps.worker.process import start_worker
from torchmix.steps.worker.shared_arrays import MappedArrays

_LOOK_S = 1.0
"""Between two looks whether the process lives: a fork of it may hold its end of the channel."""
_END_S = 5.0
"""How long a process that was told to end may take over its step, before it is killed. It leaves nothing behind."""
_LAST_WORDS_S = 1.0
"""How long a process whose channel has ended may still count as running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """How a worker runs."""

    look_ahead: int
    """Finished steps that may wait, 1 or more."""
    ignored_signals: tuple[int, ...] = ()
    """Signals that do not end it, from its first moment on."""


def worker_steps(
    settings: StreamSettings, state: bytes, *, options: WorkerOptions, stop: StopSignal
) -> Generator[StepArrays, None, None]:
    """The steps from a state on, made by a process that lives as long as this generator.

    Args:
        settings: What the steps follow from.
        state: Where to begin.
        options: How the worker runs.
        stop: Ends the steps, whatever they are waiting for.

    Raises:
        OSError: The process cannot be started.
        OpenFilesLimit: This process or the worker has as many open files as it may.
        WorkerLost: The process has ended by itself.
        TorchmixError: A step cannot be planned or read; raised here as it was there.
    """
    with open_files_named():
        ours, theirs = socket.socketpair()
    channel = Channel(ours)
    try:
        # When the terminal interrupts all of a job, it is the leader that says when to end.
        with open_files_named():
            process = start_worker(theirs, ignored_signals={signal.SIGINT, *options.ignored_signals})
    except BaseException:
        channel.close()
        raise
    finally:
        theirs.close()
    try:
        stop.then(channel.shut_down)
        _say(channel, Start(settings=settings, state=state))
        yield from _steps(channel, process, options.look_ahead)
    except EOFError as error:
        if not stop.is_set():
            raise _lost(process) from error
    finally:
        channel.close()
        _end(process)


def _steps(channel: Channel, process: subprocess.Popen[bytes], look_ahead: int) -> Generator[StepArrays, None, None]:
    arrays = MappedArrays()
    for _ in range(look_ahead):
        _say(channel, StepRequest(released=[]))
    while True:
        message, descriptors = _receive(channel, process)
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


def _receive(channel: Channel, process: subprocess.Popen[bytes]) -> tuple[bytes, list[int]]:
    was_alive = True
    while True:
        try:
            return channel.receive(_LOOK_S)
        except TimeoutError as error:
            if not was_alive:
                raise EOFError("the worker process has ended") from error
            was_alive = process.poll() is None  # what it said before may lie in the channel: look once more


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _lost(process: subprocess.Popen[bytes]) -> WorkerLost:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_WORDS_S)
    return lost_with(process.pid, process.returncode or 0)


def lost_with(pid: int, code: int) -> WorkerLost:
    """The error for a worker that has ended by itself, with an exit code; it is negative for a signal."""
    how = f"with exit code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
    if code >= 0:
        advice = ". What it printed last says why; restart from the last checkpoint"
    elif -code == signal.SIGBUS:
        advice = (
            ": a file that it had mapped into memory was cut, or the disk failed under it. Run torchmix check, which "
            "names changed files; then restart from the last checkpoint"
        )
    else:
        advice = (
            ". If the machine ran out of memory, lower look_ahead or the recipe's read.cache; then restart from the "
            "last checkpoint"
        )
    return WorkerLost(f"the worker process {pid}, which reads for this rank, was ended {how}{advice}")
