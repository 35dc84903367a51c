"""How a worker process starts: without the script of the process that starts it.

A spawned process imports the script that started it, under another name, so that pickled objects find their classes.
What a torchmix worker gets is torchmix's own; importing a training script there costs seconds and hundreds of
megabytes, and fails for scripts without an `if __name__ == "__main__"` guard. So the script is hidden for the moment,
some milliseconds, in which the process is made.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Collection
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import BaseProcess
from typing import Any

_main_hidden = threading.Lock()


class WorkerPopen(Popen):
    """A running process that is ended by the process that started it, and by no fork of that.

    When a process ends, multiprocessing terminates its daemonic children, also where it is a fork that has inherited
    the list of them.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._owner = os.getpid()
        super().__init__(process)

    def terminate(self) -> None:
        """Send SIGTERM."""
        if os.getpid() == self._owner:
            super().terminate()


class WorkerProcess(SpawnProcess):
    """A spawned process that does not import `__main__`."""

    ignored_signals: tuple[int, ...] = ()
    """Signals that are blocked in it from its birth on, until it calls `ignore_signals`."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end; in a fork of its parent, of which multiprocessing asks that, too, do nothing."""
        if self._parent_pid == os.getpid():  # type: ignore[attr-defined]
            super().join(timeout)

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        # As a fork ends, without the interpreter's teardown: that aborts the process where a thread that nobody waits
        # for, of pyarrow or of a tokenizer, comes back from C++ meanwhile.
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
                return WorkerPopen(process_obj)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                sys.modules["__main__"] = main


class WorkerContext(SpawnContext):
    """What makes workers. Spawn: a fork of a process that runs threads, gloo or CUDA may deadlock."""

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


def ignore_signals(numbers: Collection[int]) -> None:
    """What such a process does first."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # one that came meanwhile is forgotten
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
