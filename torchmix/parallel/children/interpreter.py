"""How a process that works for a rank starts: a new interpreter that runs the `main` of one module and nothing else.

In: this process' end of a channel is kept, the new one gets the other. Out: a running process. Must hold: it has the
flags and the `sys.path` of this interpreter; no signal that it is to ignore ends it, not even while it is being born;
one that calls `end_with_parent` never outlives this process on Linux, not even if it is stopped when this one is
killed. A loader does not call it: it removes its socket and its place in a folder as it ends.

Not multiprocessing's spawn: that imports the script that starts it, which costs seconds and hundreds of megabytes of a
training script and fails for one without an `if __name__ == "__main__"` guard; it sends pickles; and it starts a second
process. Not a fork: of a process that runs threads, gloo or CUDA it may deadlock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.spawn import get_executable
from queue import SimpleQueue
from typing import BinaryIO

THREAD_VARIABLES = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS")
"""They bound the threads of Hugging Face's tokenizers, and of libraries built with OpenMP, as some builds of numpy."""
_PR_SET_PDEATHSIG = 1
# What is imported lives as long as the process: collections of garbage that look through it are a fifth of its start.
_CODE = (
    "import gc, sys; gc.disable(); end, ignored, cpu, *sys.path = sys.argv[1:]; "
    "from %s import main; gc.freeze(); gc.enable(); main(int(end), [*map(int, ignored.split())], int(cpu))"
)


def start_interpreter(
    module: str,
    end: socket.socket,
    *,
    ignored_signals: Collection[int] = (),
    cpu: int = 0,
    log: BinaryIO | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `main(end, ignored_signals, cpu)` of a module.

    Args:
        module: Its name.
        end: The process' end of the channel; the caller closes it here.
        ignored_signals: Signals that do not end it.
        cpu: Processors that threads of libraries in it may use; 0: all.
        environment: Variables beside those of this process.
        log: Where what it prints goes; None: where this process prints.

    Raises:
        OSError: It cannot be started.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as multiprocessing does
    numbers = " ".join(str(int(number)) for number in ignored_signals)
    command = [get_executable() or sys.executable, *flags, "-c", _CODE % module]
    command += [str(end.fileno()), numbers, str(cpu), *sys.path]
    variables = {**os.environ, **_threads(cpu), **(environment or {})}

    def start() -> subprocess.Popen[bytes]:
        # A process is born with the signals blocked that its parent's thread blocks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored_signals)
        try:
            return subprocess.Popen(
                command, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return _starter().run(start)


class _Starter:
    """A thread that starts processes and lives as long as this one; for the kernel, its end is that of their parent."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._asked: SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]]
        self._asked = SimpleQueue()
        threading.Thread(target=self._run, name="torchmix-starter", daemon=True).start()

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """What `start` gives or raises there."""
        started: Future[subprocess.Popen[bytes]] = Future()
        self._asked.put((start, started))
        return started.result()

    def _run(self) -> None:
        while True:
            start, started = self._asked.get()
            try:
                started.set_result(start())
            except BaseException as error:  # carried to who has asked
                started.set_exception(error)
            del start, started


_starters: list[_Starter] = []
_lock = threading.Lock()


def _starter() -> _Starter:
    """This process' own: a fork has none of its parent's threads."""
    with _lock:
        if not _starters or _starters[-1].process != os.getpid():
            _starters[:] = [_Starter()]
        return _starters[-1]


def _threads(cpu: int) -> dict[str, str]:
    """The number of threads, for libraries that read it as they are loaded."""
    return dict.fromkeys(THREAD_VARIABLES, str(cpu)) if cpu else {}


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that has started it ends, however it does; on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def ignore_signals(numbers: Collection[int]) -> None:
    """What such a process does first."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # one that came meanwhile is forgotten
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
