"""Node workers, loaders and keepers of Ray as threads of this process, in the place of processes.

In: nothing. Out: a `with` inside which everything that would start an interpreter starts a thread that runs the same
code behind the same sockets. Must hold: messages are encoded, sent and decoded as between processes; what a test needs
of processes alone, as that one is killed, it cannot see here. Cost: a thread, in place of half a second of imports.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

from tests.support.deadlines import LONG_S
from tests.support.one_machine_ray import SOURCE
from tests.support.stand_ins import standing_in
from torchmix.service.main import run_loader
from torchmix.service.ray import main as ray_main
from torchmix.service.ray.main import keep_loaders
from torchmix.steps.worker.main import run_worker
from torchmix.steps.worker.messages import Channel


class ThreadedChild:
    """What `subprocess.Popen` is to whoever has started a process."""

    def __init__(self, run: Callable[[socket.socket], Any], end: socket.socket) -> None:
        """Start `run` with this end of the channel."""
        self.pid, self.failed = os.getpid(), list[BaseException]()
        self.end = end.dup()
        self.thread = threading.Thread(target=self._run, args=(run,), name=f"child-{run.__name__}", daemon=True)
        self.thread.start()

    def _run(self, run: Callable[[socket.socket], Any]) -> None:
        try:
            with self.end:
                run(self.end)
        except BaseException as error:
            self.failed.append(error)

    @property
    def returncode(self) -> int | None:
        """As of a process."""
        return None if self.thread.is_alive() else int(bool(self.failed))

    def poll(self) -> int | None:
        """As of a process."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As of a process, with a patience of its own: a thread cannot be killed."""
        self.thread.join(LONG_S)
        if self.thread.is_alive():
            raise subprocess.TimeoutExpired("a thread", LONG_S)
        return int(bool(self.failed))

    def terminate(self) -> None:
        """Close its end: each of them ends then."""
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    kill = terminate


def _worker(end: socket.socket) -> None:
    run_worker(Channel(end))


RUN: dict[str, Callable[[socket.socket], Any]] = {
    "torchmix.steps.worker.main": _worker,
    "torchmix.service.main": run_loader,
    "torchmix.service.ray.main": keep_loaders,
}


@contextmanager
def threaded_children() -> Iterator[list[ThreadedChild]]:
    """Inside, threads stand for processes. Gives those that were started; none may have failed."""
    started: list[ThreadedChild] = []

    def start(module: str, end: socket.socket, **_: Any) -> ThreadedChild:
        started.append(ThreadedChild(RUN[module], end))
        return started[-1]

    ray = types.ModuleType("ray")
    exec(compile(SOURCE, "ray.py", "exec"), ray.__dict__)
    calm = types.SimpleNamespace(signal=lambda *_: None, SIGTERM=15, SIG_IGN=None, SIG_DFL=None)
    patches: list[Any] = [patch("torchmix.parallel.children.start_interpreter", start)]
    patches += [patch("torchmix.steps.worker.keeper.limit_memory", lambda *_: None)]  # it would bound this process
    patches += [patch.object(ray_main, "signal", calm)]
    with standing_in({"ray": ray}), ExitStack() as patched:
        for each in patches:
            patched.enter_context(each)
        yield started
    for child in started:
        child.thread.join(LONG_S)
        assert not child.thread.is_alive(), "a child outlives what has started it"
    assert not [error for child in started for error in child.failed]
