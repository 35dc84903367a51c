"""Real processes for tests: started one by one, each with its output in a file, none left behind.

In: a program and its arguments. Out: `Child`, whose exit code and output are read under a deadline. Every process leads
a session of its own; leaving `Processes` kills each session whole, stopped processes included, whatever the test did.
Nothing here sleeps to synchronise: waits poll until a deadline and fail with the output of the child that is late.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
"""The repository: processes run here, so that `tests.support` imports."""

POLL_S = 0.01


def wait_until(condition: Callable[[], bool], *, deadline_s: float, what: str) -> None:
    """Poll `condition` until it holds; an AssertionError naming `what` after `deadline_s` seconds."""
    give_up_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_s, f"not within {deadline_s} s: {what}"
        time.sleep(POLL_S)


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """One started process."""

    name: str
    process: subprocess.Popen[bytes]
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
            lambda: self.returncode is not None, deadline_s=deadline_s, what=f"end of {self.name}\n{self.report()}"
        )
        assert self.returncode is not None
        return self.returncode

    def wait_for_line(self, text: str, *, deadline_s: float) -> str:
        """The first line of its stdout that contains `text`, which must come within `deadline_s` seconds."""
        give_up_s = time.monotonic() + deadline_s
        while True:
            # Read the state first: output written just before the end is then still seen.
            has_ended = self.returncode is not None
            for line in self.stdout().splitlines(keepends=True):
                if text in line and line.endswith("\n"):
                    return line.rstrip("\n")
            assert not has_ended, f"{self.name} ended without printing {text!r}\n{self.report()}"
            assert time.monotonic() < give_up_s, f"no {text!r} within {deadline_s} s\n{self.report()}"
            time.sleep(POLL_S)

    def send_signal(self, number: int) -> None:
        """Send a signal to this process alone."""
        os.kill(self.pid, number)

    def kill_session(self) -> None:
        """Kill the process and what it started, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def report(self) -> str:
        """Exit code and output, for a failing test's message."""
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
        label = name or f"process-{len(self.children)}"
        stdout_path = self._directory / f"{label}.{len(self.children)}.out"
        stderr_path = self._directory / f"{label}.{len(self.children)}.err"
        with stdout_path.open("wb") as stdout, stderr_path.open("wb") as stderr:
            process = subprocess.Popen(
                list(arguments),
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        child = Child(name=label, process=process, stdout_path=stdout_path, stderr_path=stderr_path)
        self.children.append(child)
        return child

    def start_python(self, *arguments: str, name: str = "", environment: Mapping[str, str] | None = None) -> Child:
        """Start this Python with `arguments`, say ("-m", "tests.support.some_program", "--flag")."""
        return self.start([sys.executable, *arguments], name=name, environment=environment)

    def start_ranks(
        self, *arguments: str, world_size: int, environment: Mapping[str, str] | None = None
    ) -> list[Child]:
        """Start a Python program once per rank with torchrun's environment, but without a launcher.

        A launcher ends the other ranks when one dies, and so would hide whether they end by themselves.
        """
        port = str(free_port())
        return [
            self.start_python(
                *arguments,
                name=f"rank-{rank}",
                environment={
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world_size),
                    "OMP_NUM_THREADS": "1",
                    **(environment or {}),
                },
            )
            for rank in range(world_size)
        ]

    def report(self) -> str:
        """Exit codes and output of all, for a failing test's message."""
        return "\n".join(child.report() for child in self.children)
