"""The worker process of a leader: how it starts, and how its death is told.

A spawned process imports the script that started it, under another name, so that pickled objects find their classes.
What a torchmix worker gets is torchmix's own; importing a training script there costs seconds and hundreds of
megabytes, and fails for scripts without an `if __name__ == "__main__"` guard. So the script is hidden for the moment,
some milliseconds, in which the process is made.

A worker that the kernel kills, most often for want of memory, shows at its queue as whatever broke first. Here it
becomes one error that says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Collection, Generator
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

from torchmix.constructor.fields import StepTensors
from torchmix.errors import TorchmixError, WorkerLost

_JOIN_S = 1.0
"""How long a process whose connections broke may still count as running."""
_main_hidden = threading.Lock()


class WorkerProcess(SpawnProcess):
    """A spawned process that does not import `__main__`."""

    ignored_signals: tuple[int, ...] = ()
    """Signals that are blocked in it from its birth on, until it calls `ignore_signals`."""

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        # As a fork ends, without the interpreter's teardown: that aborts the process where a thread that nobody waits
        # for, as that of torch's queue, comes back from C++ meanwhile.
        os._exit(super()._bootstrap(parent_sentinel))  # type: ignore[misc]

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        # A process is born with the signals blocked that its parent's thread blocks. The tracker of semaphores is
        # started before, because that unblocks some.
        blocked = getattr(process_obj, "ignored_signals", ())
        if blocked:
            resource_tracker.ensure_running()
        with _main_hidden:  # two at once would each restore what the other has hidden
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                sys.modules["__main__"] = main


class WorkerContext(SpawnContext):
    """What torch's loader makes its worker, queues and events from.

    Spawn: a fork of a process that runs threads, gloo or CUDA may deadlock.
    """

    def __init__(self, *, ignored_signals: Collection[int] = ()) -> None:
        """A context for processes that some signals do not end: from their first moment on, if `ignore_signals` with
        the same is what they do before anything else."""
        super().__init__()
        self._ignored_signals = tuple(ignored_signals)

    def Process(self, *given: Any, **named: Any) -> WorkerProcess:  # type: ignore[override]  # noqa: N802
        """Make a process; multiprocessing's name for it."""
        process = WorkerProcess(*given, **named)
        process.ignored_signals = self._ignored_signals
        return process


def ignore_signals(numbers: Collection[int], worker: int = 0) -> None:
    """A worker's `worker_init_fn`: torch has just set handlers of its own, among them one for SIGTERM."""
    del worker
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # one that came meanwhile is forgotten
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def steps_of_torch(start: Callable[[], Any]) -> Generator[StepTensors, None, None]:
    """The items of a torch loader's iterator, with or without a worker process; closing it ends the process.

    Args:
        start: Makes the iterator.

    Raises:
        WorkerLost: The process has ended by itself.
    """
    whole = start()
    del start  # it holds the loader
    workers = getattr(whole, "_workers", [])
    try:
        yield from whole
    except TorchmixError:
        raise
    except Exception as error:
        for process in workers:
            process.join(_JOIN_S)
            if process.exitcode not in (None, 0):  # else the error is its own
                raise _lost(process) from error
        raise
    finally:
        if workers:
            whole._shutdown_workers()


def _lost(process: BaseProcess) -> WorkerLost:
    code = process.exitcode or 0
    how = f"with exit code {code}" if code > 0 else f"by signal {signal.Signals(-code).name}"
    if -code == signal.SIGBUS:
        return WorkerLost(
            f"the worker process {process.pid}, which reads for this rank, was ended {how}: a file that it had mapped "
            f"into memory was cut, or the disk or /dev/shm failed under it. Run torchmix check, which names changed "
            f"files; then restart from the last checkpoint"
        )
    return WorkerLost(
        f"the worker process {process.pid}, which reads for this rank, was ended {how}. If the machine ran out of "
        f"memory, lower look_ahead or the recipe's read.cache; then restart from the last checkpoint"
    )
