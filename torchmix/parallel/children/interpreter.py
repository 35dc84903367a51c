"""How a process that works for a rank starts: a new interpreter that runs the `main` of one module and nothing else.

In: this process' end of a channel is kept, the new one gets the other. Out: a running process. Must hold: it has the
flags and the `sys.path` of this interpreter; no signal that it is to ignore ends it, not even while it is being born.

Not multiprocessing's spawn: that imports the script that starts it, which costs seconds and hundreds of megabytes of a
training script and fails for one without an `if __name__ == "__main__"` guard; it sends pickles; and it starts a second
process. Not a fork: of a process that runs threads, gloo or CUDA it may deadlock.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from multiprocessing.spawn import get_executable
from typing import BinaryIO

THREAD_VARIABLES = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS")
"""They bound the threads of Hugging Face's tokenizers, and of libraries built with OpenMP, as some builds of numpy."""
_CODE = (
    "import sys; end, ignored, cpu, *sys.path = sys.argv[1:]; "
    "from %s import main; main(int(end), [*map(int, ignored.split())], int(cpu))"
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
    # A process is born with the signals blocked that its parent's thread blocks.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored_signals)
    try:
        return subprocess.Popen(
            command,
            pass_fds=[end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **_threads(cpu), **(environment or {})},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _threads(cpu: int) -> dict[str, str]:
    """The number of threads, for libraries that read it as they are loaded."""
    return dict.fromkeys(THREAD_VARIABLES, str(cpu)) if cpu else {}


def ignore_signals(numbers: Collection[int]) -> None:
    """What such a process does first."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # one that came meanwhile is forgotten
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
