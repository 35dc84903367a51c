"""How long tests may take, on a machine that is quiet and on one where fifty processes share two cores.

Two kinds. A *deadline* of a wait is what a quiet machine needs with room to spare; it is stretched by how many more
processes want to run than there are cores. The *test's deadline* is long and the same for every test: whatever hangs is
a bug, of the test or of the product, and the stacks of all threads are what finds it. They are printed, those of child
processes too, then the process of the test ends: pytest-xdist reports the test and goes on in another process.

The hooks at the end are those of pytest; `tests/conftest.py` imports them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic  # not that of a test in virtual time

import pytest

from tests.support.process_table import command_of, running

LONG_S = 1200.0
"""For what is waited for once, by a call that takes a fixed number of seconds."""
TEST_S = float(os.environ.get("TORCHMIX_TEST_DEADLINE_S", "1800"))
"""For a test with all its fixtures."""
LAST_RESORT_S = 60.0
"""After the test's deadline, if a call holds the interpreter's lock all the time: the stacks of this process alone."""
STACKS_S = 30.0
"""For child processes to print theirs, at most."""
SETTLED_S = 0.25
"""Whoever has printed nothing more for so long has printed all."""
TAIL_BYTES = 20_000

_stderr = 2
"""The descriptor of what the user sees, also while output is captured."""


def stretched(seconds: float) -> float:
    """A deadline as it is just now: longer by as much as the machine has more to do than it has cores."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return seconds
    return seconds * max(1.0, load / (os.cpu_count() or 1))


class TestDeadline:
    """Watches one test after the other, in a thread, since Python runs handlers of signals between instructions of the
    main one. One thread watches all tests of a process: to start and to join one takes longer than most tests do.
    """

    __test__ = False  # no class of tests

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._test: tuple[str, float] | None = None
        """The name of the test that runs, and when it is to have ended."""
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def over(self, name: str) -> Iterator[None]:
        """Watch what happens inside."""
        self._test = name, monotonic() + self._seconds
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="test-deadline", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._test = None

    def _run(self) -> None:
        while True:
            # Ends the process where this thread cannot run for so long.
            faulthandler.dump_traceback_later(self._seconds + LAST_RESORT_S, exit=True, file=_stderr)
            test, now = self._test, monotonic()
            if test is not None and now >= test[1]:
                self._end(test[0])
            # A test that begins meanwhile has its deadline behind this.
            longest = min(self._seconds, LAST_RESORT_S / 2)
            threading.Event().wait(longest if test is None else min(longest, test[1] - now))

    def _end(self, name: str) -> None:
        _say(f"\n{name} has not ended within {self._seconds:.0f} s. Stacks of process {os.getpid()}:\n")
        faulthandler.dump_traceback(file=_stderr, all_threads=True)
        descendants = descendants_of(os.getpid())
        print_stacks([pid for pid in descendants if _prints_stacks(pid)])
        for pid in descendants:
            _say(f"\nChild process {pid}: {command_of(pid)}\n{_last_words(pid)}\n")
        for pid in reversed(descendants):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)


def descendants_of(pid: int) -> list[int]:
    """Processes that a process has started, with those that they have started, parents first."""
    children: dict[int, list[int]] = {}
    for each in running():
        children.setdefault(each.parent, []).append(each.pid)
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def print_stacks(pids: Sequence[int]) -> None:
    """Have forks of the tests print the stacks of their threads, and wait until they have where stderr is a file."""
    before = {pid: size for pid in pids if (size := _size_of_stderr(pid)) is not None}
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
    give_up_s, last = time.monotonic() + STACKS_S, before
    while time.monotonic() < give_up_s:
        time.sleep(SETTLED_S)
        now = {pid: _size_of_stderr(pid) for pid in before}
        if now == last and all(now[pid] != before[pid] for pid in before):
            return
        last = now


def _size_of_stderr(pid: int) -> int | None:
    """None where it is no file, or where the process has ended."""
    with contextlib.suppress(OSError):
        found = Path(f"/proc/{pid}/fd/2").stat()
        return found.st_size if stat.S_ISREG(found.st_mode) else None
    return None


def _prints_stacks(pid: int) -> bool:
    """Whether SIGUSR1 would not end the process: forks of the tests print their stacks then."""
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


def _last_words(pid: int) -> str:
    """The end of what a process has written to stderr, where that is a file."""
    with contextlib.suppress(OSError):
        path = Path(f"/proc/{pid}/fd/2").readlink()
        if path.is_file():
            return path.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    return "(its stderr is no file)"


def _read(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_stderr, text.encode(errors="replace"))


DEADLINE = TestDeadline(TEST_S)


def pytest_configure(config: pytest.Config) -> None:
    """Before output is captured; pytest's own use of the one timer is for runs without this."""
    global _stderr
    sys.stderr.flush()
    _stderr = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around each test, with its fixtures."""
    with DEADLINE.over(item.nodeid):
        return (yield)
