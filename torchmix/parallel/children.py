"""Processes that work for a rank: how they start, what they may take, and whether they are alive."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.spawn import get_executable
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from torchmix.parallel.liveness.evidence import (
    STATE,
    Evidence,
    Patience,
    evidence_of_process,
    identity_of_process,
    stat_fields,
)
from torchmix.parallel.liveness.ring import Silence

# --- Is a process that this one has started alive? The decision, without processes or sockets.
#
#     gone       the process has ended
#     stopped    SIGSTOP, a debugger, a frozen container: lost after `silence_s`
#     running    it does not beat, or something is asked of it and nothing at all is done for that: lost after
#     `stall_s`;
#                a step that was made counts as done, and so does waiting for a processor
#
# A process that has not begun to beat imports; that may take long on a busy machine. Cost: microseconds a look.


ENDED = "has ended"
"""What is said of a process that is gone."""


class ProcessBeat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """What a process says once a second to whoever started it."""

    count: int
    """Grows with every beat."""
    is_asked: bool
    """Whether something that was asked of it is not done yet."""
    progress: int
    """Grows with whatever is done for that: a step or a request that is done, time of processors, a thread that waits
    for one, a look at something that is waited for."""


class ProcessWatch:
    """The eye of whoever started a process."""

    def __init__(self, *, patience: Patience, now_s: float) -> None:
        """`now_s` is when the process was started, by this process' monotonic clock."""
        self._patience = patience
        self._silence = Silence(poll_s=patience.poll_s, now_s=now_s)
        self._rest = Silence(poll_s=patience.poll_s, now_s=now_s)
        self._stop = Silence(poll_s=patience.poll_s, now_s=now_s)

    def look(self, beat: ProcessBeat | None, evidence: Evidence, *, now_s: float) -> str | None:
        """Judge the process.

        Args:
            beat: The latest; None if there is none yet.
            evidence: What the kernel says.
            now_s: This process' monotonic clock.

        Returns:
            How it was lost; None while it is not.
        """
        silent_s = self._silence.look(None if beat is None else beat.count, now_s=now_s)
        is_asked = beat is not None and beat.is_asked
        # A process that nobody asks may rest: each beat counts as progress.
        done = None if beat is None else (beat.progress if is_asked else ("rests", beat.count))
        rested_s = self._rest.look(done, now_s=now_s)
        if evidence == "gone":
            return ENDED
        # One that imports is silent for long, and may be stopped for a moment.
        stopped_s = self._stop.look("stopped" if evidence == "stopped" else now_s, now_s=now_s)
        if evidence == "stopped":
            return f"is stopped, for {stopped_s:.1f} s" if stopped_s >= self._patience.silence_s else None
        limit_s = self._patience.join_s if beat is None else self._patience.stall_s
        if silent_s >= limit_s:
            return f"is silent for {silent_s:.0f} s: it runs, but Python in it does not"
        if rested_s >= self._patience.stall_s and is_asked:
            return f"has done nothing for {rested_s:.0f} s for what is waited for"
        return None


# --- The beats of a process for whoever started it, and for `children.py` there.
#
# Time that the beats themselves take is no progress, nor is that of threads that only show or carry what others do; a
# busy machine does not make a process seem idle. Cost: two clocks a second, one for each of those threads, and a small
# file of /proc for each thread that does nothing else; where there are carriers, the name of each thread.

BEAT_S = 1.0
GRAIN_NS = 20_000_000
"""Time of processors that counts as progress: clocks read one after the other differ by less."""
_onlookers: set[int] = set()


@contextmanager
def onlooking() -> Iterator[None]:
    """Inside, what this thread does is no progress: it shows figures, and would do so for ever in a stuck process."""
    thread = threading.get_native_id()
    _onlookers.add(thread)
    try:
        yield
    finally:
        _onlookers.discard(thread)


class OwnPulse:
    """Beats of this process; used by the one thread that sends them."""

    def __init__(
        self,
        beat: Callable[[ProcessBeat], None],
        *,
        carriers: str = "",
        waits: Callable[[int], bool] | None = None,
    ) -> None:
        """Send the first at the first look.

        Args:
            beat: Sends one.
            carriers: How the kernel's names of threads begin whose time is no progress, as is that of threads that are
                `onlooking`; empty: there are none.
            waits: Stands in for `waits_for_processor` in tests.
        """
        self._beat, self.due_s = beat, 0.0
        """When the next one is due, by this process' monotonic clock."""
        self._carriers, self._idle_ns = carriers, dict[int, int]()
        self._waits = waits_for_processor if waits is None else waits
        self._count = self._progress = self._used_ns = self._num_signs = 0

    def look(self, *, is_asked: bool, num_signs: int = 0, threads: Collection[int] = ()) -> None:
        """Send a beat if one is due.

        Args:
            is_asked: Whether something that was asked of this process is not done yet.
            num_signs: Steps made and requests done so far, and looks at what this process waits for: a loader, a
                decision.
            threads: The kernel's numbers of the threads that do what is asked.
        """
        if time.monotonic() < self.due_s:
            return
        self.due_s = time.monotonic() + BEAT_S
        self._count += 1
        used_ns = time.process_time_ns() - time.thread_time_ns() - self._no_progress_ns()
        has_worked = used_ns - self._used_ns >= GRAIN_NS
        if has_worked or used_ns < self._used_ns:
            self._used_ns = used_ns
        if has_worked or num_signs != self._num_signs or (is_asked and any(map(self._waits, threads))):
            self._progress += 1
        self._num_signs = num_signs
        self._beat(ProcessBeat(count=self._count, is_asked=is_asked, progress=self._progress))

    def _no_progress_ns(self) -> int:
        """Time of processors that threads have used which do nothing of what is asked; those that ended, too."""
        for thread in _onlookers | (threads_named(self._carriers) if self._carriers else set()):
            with suppress(OSError):  # it has ended, or this is not Linux
                # The number of a thread's clock, as Linux makes it (posix-timers_types.h).
                self._idle_ns[thread] = time.clock_gettime_ns(~thread << 3 | 6)
        return sum(self._idle_ns.values())


def waits_for_processor(thread: int) -> bool:
    """Whether a thread of this process runs or would run if a processor were free; False where the kernel hides it."""
    fields = stat_fields(os.getpid(), thread)
    return bool(fields) and fields[STATE] == "R"


def threads_named(prefix: str) -> set[int]:
    """The kernel's numbers of this process' threads that it knows by such a name; none where it hides them."""
    found = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):
            if path.read_text().startswith(prefix):
                found.add(int(path.parent.name))
    return found


# --- A bound on the memory that a process which a rank has started may allocate.
#
# What the process has when it begins to work, its imports, is not counted; memory that it shares, as that of steps,
# and files that it maps are not either. Cost: a call.

ENVIRONMENT = {"MIMALLOC_ARENA_EAGER_COMMIT": "0"}
"""Arrow's allocator takes address space by the gigabyte; with this, what it does not use yet does not count."""


def limit_memory(pid: int, num_bytes: int) -> bool:
    """Let a process of this user, started with `ENVIRONMENT`, allocate so many more bytes; whether that could be done.

    Elsewhere than on Linux it cannot.
    """
    try:
        import resource

        status = Path(f"/proc/{pid}/status").read_text()
        held = re.search(r"^VmData:\s+(\d+) kB$", status, re.MULTILINE)
        if held is None:
            return False
        limit = (int(held[1]) << 10) + num_bytes
        resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
    except (ImportError, AttributeError, OSError, ValueError):
        return False
    return True


# --- How a process that works for a rank starts: a new interpreter that runs the `main` of one module and nothing
# else.
#
# It has the flags and the `sys.path` of this interpreter; no signal that it is to ignore ends it, not even while it is
# being born; one that calls `end_with_parent` never outlives this process on Linux, not even if it is stopped when
# this one is killed. A loader does not call it: it removes its socket and its place in a folder as it ends.
#
# Not multiprocessing's spawn: that imports the script that starts it, which costs seconds and hundreds of megabytes of
# a training script and fails for one without an `if __name__ == "__main__"` guard; it sends pickles; and it starts a
# second process. Not a fork: of a process that runs threads, gloo or CUDA it may deadlock.

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
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `main(end, ignored_signals, cpu)` of a module.

    Args:
        module: Its name.
        end: The process' end of the channel; the caller closes it here.
        ignored_signals: Signals that do not end it.
        cpu: Processors that threads of libraries in it may use; 0: all.
        environment: Variables beside those of this process.

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
            return subprocess.Popen(command, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL, env=variables)
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


def run_process(
    work: Callable[[socket.socket], int], descriptor: int, ignored: Collection[int], *, cpu: int = 0
) -> NoReturn:
    """All that a process does which `start_interpreter` has started: its work, then its end, with the code of that.

    Args:
        work: Gets this end of the road to whoever started the process; gives the exit code. An exception is printed.
        descriptor: The descriptor of that end.
        ignored: Signals that do not end the process.
        cpu: Processors that threads of Arrow may use, in a process that has imported it; 0: all.
    """
    code = 1
    try:
        ignore_signals(ignored)
        arrow = sys.modules.get("pyarrow")
        if cpu and arrow is not None:
            arrow.set_cpu_count(cpu)
            arrow.set_io_thread_count(cpu)
        with socket.socket(fileno=descriptor) as end:
            code = work(end)
    except BaseException:  # the edge of a process
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # whoever read it has gone
                stream.flush()
        # As a fork ends, without the interpreter's teardown: that aborts the process where a thread that nobody waits
        # for, of pyarrow or of a tokenizer, comes back from C++ meanwhile.
        os._exit(code)


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that has started it ends, however it does; on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def ignore_signals(numbers: Collection[int]) -> None:
    """What such a process does first."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # one that came meanwhile is forgotten
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


# --- A process that this one has started: the road to it, whether it lives, and its end.
#
# Cost: a pair of sockets; a look is four small reads of /proc.

END_S = 1.0
"""How long a process that was told to end may take over its work, before it is killed."""
DEATH_S = 10.0
"""How long one that was killed may take to be gone: it needs a processor for that, too."""
LOOK_S = 0.25
"""Between two looks at it."""


class Child:
    """A process, at the other end of a pair of sockets."""

    def __init__(
        self,
        module: str,
        *,
        ignored_signals: Collection[int] = (),
        cpu: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, as `start_interpreter` does; SIGINT does not end it.

        Raises:
            OSError: It cannot be started.
        """
        self.road, theirs = socket.socketpair()
        # When the terminal interrupts all of a job, whoever has started the process says when to end.
        ignored = {int(signal.SIGINT), *ignored_signals}
        try:
            with theirs:
                self.process = start_interpreter(
                    module, theirs, ignored_signals=ignored, cpu=cpu, environment=environment
                )
        except BaseException:
            self.road.close()
            raise
        weakref.finalize(self, self.road.close).atexit = False  # a collector may come to the socket first
        self._identity = identity_of_process(self.process.pid)
        self.watch_anew()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self.process.pid

    def watch_anew(self) -> None:
        """Hold nothing against it that was before."""
        self._watch = ProcessWatch(patience=Patience(poll_s=LOOK_S), now_s=time.monotonic())

    def evidence(self) -> Evidence:
        """What the kernel says of it."""
        return "gone" if self.process.poll() is not None else evidence_of_process(self._identity)

    def judge(self, beat: ProcessBeat | None, evidence: Evidence) -> str | None:
        """How it was lost, as `ProcessWatch` sees it; None while it is not."""
        return self._watch.look(beat, evidence, now_s=time.monotonic())

    def kill(self) -> int:
        """End it by force; see `end`."""
        self.process.kill()
        return self.end(END_S)

    def end(self, patience_s: float) -> int:
        """End it, within seconds; its exit code, negative for the signal that has ended it or is to end it."""
        self.road.close()
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        try:
            return self.process.wait(DEATH_S)
        except subprocess.TimeoutExpired:  # it is inside a call of a disk that does not answer
            return -signal.SIGKILL


def text_of_end(code: int) -> str:
    """What an exit code says, which is negative for a signal."""
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def text_of_loss(reason: str, code: int) -> str:
    """How a process was lost, by what `Child.judge` says and its exit code."""
    return f"{reason} {text_of_end(code)}" if reason == ENDED else f"{reason}, and was killed"
