"""Real processes for tests: started one by one, each with its output in a file, none left behind.

In: a program and its arguments. Out: `Child`, whose exit code and output are read under a deadline. Every process leads
a session of its own; leaving `Processes` kills each session whole, stopped processes included, whatever the test did.
Nothing here sleeps to synchronise: waits poll until a deadline and fail with the output of the child that is late.
Ranks are forks of a process that has imported torch, unless a test asks for interpreters of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from tests.support.deadlines import print_stacks, stretched
from tests.support.forks import ROOT, TORCH, Fork, fork_server
from tests.support.ports import free_port
from tests.support.process_table import command_of, running

POLL_S = 0.02
COMMAND_LINE = ("-m", "tests.support.command_line")
"""Words that start the command line of torchmix, behind `python`."""
TRACKER = "multiprocessing.resource_tracker"
TRACKER_S = 10.0


def wait_until(condition: Callable[[], bool], *, deadline_s: float, what: str | Callable[[], str]) -> None:
    """Poll `condition` until it holds; an AssertionError naming `what` after `deadline_s` seconds, `stretched`."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > stretched(deadline_s):
            raise AssertionError(f"not within {deadline_s} s: {what if isinstance(what, str) else what()}")
        time.sleep(POLL_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """One started process."""

    name: str
    process: subprocess.Popen[bytes] | Fork
    stdout_path: Path
    stderr_path: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        return self.process.poll()

    def stdout(self) -> str:
        """What it has written so far."""
        return self.stdout_path.read_text(errors="replace")

    def stderr(self) -> str:
        """What it has written so far."""
        return self.stderr_path.read_text(errors="replace")

    def wait(self, *, deadline_s: float) -> int:
        """Exit code of the process, which must end within `deadline_s` seconds."""
        wait_until(
            lambda: self.returncode is not None,
            deadline_s=deadline_s,
            what=lambda: f"end of {self.name}\n{self.report()}",
        )
        assert self.returncode is not None
        return self.returncode

    def wait_for_line(self, text: str, *, deadline_s: float) -> str:
        """The first line of its stdout that contains `text`, which must come within `deadline_s` seconds."""
        began_s = time.monotonic()
        while True:
            # Read the state first: output written just before the end is then still seen.
            has_ended = self.returncode is not None
            for line in self.stdout().splitlines(keepends=True):
                if text in line and line.endswith("\n"):
                    return line.rstrip("\n")
            assert not has_ended, f"{self.name} ended without printing {text!r}\n{self.report()}"
            assert time.monotonic() - began_s < stretched(deadline_s), (
                f"no {text!r} within {deadline_s} s\n{self.report()}"
            )
            time.sleep(POLL_S)

    def send_signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        os.kill(self.pid, number)

    @property
    def session(self) -> dict[int, str]:
        """What still runs of the process and all that it has started: the command line by process id."""
        return {each.pid: command_of(each.pid) for each in running() if each.session == self.pid}

    def kill_session(self) -> None:
        """Kill the process and what it started, and reap it.

        The process of Python that removes the semaphores of those that were killed is left some time to do so.
        """
        for pid, command in self.session.items():
            if TRACKER not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.session, deadline_s=TRACKER_S, what="end of the session")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def report(self) -> str:
        """Exit code and output, for a failing test's message; with the stacks of a fork that has not ended."""
        if isinstance(self.process, Fork) and self.returncode is None:
            print_stacks([self.pid])
        return (
            f"--- {self.name}: pid {self.pid}, exit code {self.returncode}\n"
            f"--- stdout\n{self.stdout()}\n--- stderr\n{self.stderr()}"
        )


class Processes:
    """A set of processes that a test starts; as a context manager it leaves none of them behind."""

    def __init__(self, directory: Path) -> None:
        """`directory` receives the output files."""
        self._directory = directory
        self.children: list[Child] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.kill_session()

    def start(self, arguments: Sequence[str], *, name: str = "", environment: Mapping[str, str] | None = None) -> Child:
        """Start a program in the repository's root; `environment` is added to this process' own."""
        return self._keep(partial(_popen, arguments), name, environment)

    def start_python(self, *arguments: str, name: str = "", environment: Mapping[str, str] | None = None) -> Child:
        """Start this Python with `arguments`, say ("-m", "tests.support.some_program", "--flag")."""
        return self.start([sys.executable, *arguments], name=name, environment=environment)

    def fork_python(
        self,
        *arguments: str,
        after: tuple[str, ...] = TORCH,
        name: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """As `start_python`, as a fork of a process that has imported the modules `after`."""
        return self._keep(partial(fork_server(after).start, arguments, ROOT), name, environment)

    def start_ranks(
        self,
        *arguments: str,
        world_size: int,
        after: tuple[str, ...] = TORCH,
        environment: Mapping[str, str] | None = None,
    ) -> list[Child]:
        """Start a Python program once per rank with torchrun's environment, but without a launcher.

        A launcher ends the other ranks when one dies, and so would hide whether they end by themselves. The ranks are
        forks of a process that has imported the modules `after`; of none if there are none.
        """
        port = str(free_port())
        start = partial(self.fork_python, after=after) if after else self.start_python
        return [
            start(
                *arguments,
                name=f"rank-{rank}",
                environment={
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    **(environment or {}),
                },
            )
            for rank in range(world_size)
        ]

    def wait_all(self, children: Sequence[Child], *, deadline_s: float) -> None:
        """Until all have ended well; an AssertionError with the output of all as soon as one ends otherwise."""

        def have_ended() -> bool:
            codes = [child.returncode for child in children]
            assert not any(codes), f"{codes}\n{self.report()}"
            return None not in codes

        names = ", ".join(child.name for child in children)
        wait_until(have_ended, deadline_s=deadline_s, what=lambda: f"end of {names}\n{self.report()}")

    def _keep(
        self,
        start: Callable[[Mapping[str, str], Sequence[Path]], subprocess.Popen[bytes] | Fork],
        name: str,
        environment: Mapping[str, str] | None,
    ) -> Child:
        """What `start` makes of a whole environment and of empty files for its output."""
        label = name or f"process-{len(self.children)}"
        files = [self._directory / f"{label}.{len(self.children)}.{kind}" for kind in ("out", "err")]
        for path in files:
            path.touch()
        whole = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **(environment or {})}
        child = Child(name=label, process=start(whole, files), stdout_path=files[0], stderr_path=files[1])
        self.children.append(child)
        return child

    def report(self) -> str:
        """Exit codes and output of all, for a failing test's message."""
        return "\n".join(child.report() for child in self.children)


def _popen(arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[Path]) -> subprocess.Popen[bytes]:
    with files[0].open("wb") as stdout, files[1].open("wb") as stderr:
        return subprocess.Popen(
            list(arguments),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def workers_of_this_process(module: str = "steps.worker.main") -> list[int]:
    """Process ids of node workers, or of loaders (`service.main`), that were started here and still run.

    A server of forks names the modules that it has imported, and is none of them.
    """
    children = children_of_this_process().items()
    return [pid for pid, command in children if module in command and "fork_server" not in command]


def children_of_this_process() -> dict[int, str]:
    """Command lines, by process id, of what was started here and still runs."""
    return {each.pid: command_of(each.pid) for each in running() if each.parent == os.getpid()}
