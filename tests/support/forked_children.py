"""Node workers and loaders as forks of a process that has imported them, in the place of new interpreters.

In: a folder for what they print. Out: a `with` inside which everything that would start an interpreter forks a process
that runs the same code with the same arguments. It has a memory, descriptors, limits and signals of its own, and can be
killed; what it cannot show is how an interpreter is started and that its imports suffice, for which `tests/system`
starts real ones. Cost: a fork, in place of half a second of imports.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.support.fork_server import DESCRIPTOR, ROOT
from tests.support.forks import Fork, fork_server
from torchmix.parallel import children

MODULES = ("torchmix.steps.worker.main", "torchmix.service.main")


class ForkedChild(Fork):
    """What `subprocess.Popen` is to whoever has started a process."""

    @property
    def returncode(self) -> int | None:
        """As of a process."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """As of a process; it polls, so that others may ask the server meanwhile."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        """As of a process."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """As of a process."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


@contextmanager
def forked_children(folder: Path) -> Iterator[None]:
    """Inside, forks stand for new interpreters; what they print is in the file `children` of the folder."""
    printed = folder / "children"
    printed.touch()

    def start(
        module: str,
        end: socket.socket,
        *,
        ignored_signals: Collection[int] = (),
        cpu: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> ForkedChild:
        server, ignored = fork_server(MODULES), [int(number) for number in ignored_signals]
        variables = {**os.environ, **(environment or {})}
        code = f"import sys; from {module} import main; main(int(sys.argv[1]), {ignored}, {cpu})"
        fork = server.start(["-c", code, DESCRIPTOR], ROOT, variables, (printed, printed), descriptor=end.fileno())
        return ForkedChild(server, fork.pid)

    with patch.object(children, "start_interpreter", start):
        yield
