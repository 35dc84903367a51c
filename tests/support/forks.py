"""Programs that need not import torch: forks of a process that has imported it. An import takes seconds of a core.

In: the command line of a Python program, without `python`, and where its output goes. Out: a process, as
`subprocess.Popen` would give it. Each process of tests has a server of its own for each set of modules, started or
forked from another when it is first asked for, see `fork_server.py`. What differs from an interpreter that is started:
all forks of a server have the same seed of hashes, and what was imported before is not seen by `-W`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.fork_server import MOST_BYTES, ROOT

_ENVIRONMENT = dict(os.environ)
"""Of servers: that of a test may have changed when it is the first to ask for one."""
TORCH = ("torchmix.stateful.open", "torchmix.parallel.liveness.open")
"""What a rank of a job imports."""
TRAINING = (*TORCH, "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
"""What one imports that trains a model: an optimizer of torch imports its compiler."""
MEGATRON = (*TORCH, "tests.support.megatron_imports")
"""What one imports that runs Megatron."""


class Fork:
    """A process that a server has forked."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        if self._code is None:
            self._code = self._server.ask({"pid": self.pid, "can_wait": False})
        return self._code

    def wait(self) -> int:
        """Exit code, when it has ended."""
        if self._code is None:
            self._code = self._server.ask({"pid": self.pid, "can_wait": True})
        assert self._code is not None
        return self._code


class ForkServer:
    """A running server."""

    def __init__(self, modules: Sequence[str], *, base: ForkServer | None = None) -> None:
        """Start one that imports `modules`; as a fork of `base`, which has imported some of them."""
        self._lock = threading.Lock()  # threads that stand for ranks start children at once
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | Fork
        with theirs:
            if base is not None:
                self._process = Fork(base, base.ask({"modules": modules}, theirs.fileno()))
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), *modules],
                cwd=ROOT,
                env={**_ENVIRONMENT, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        files: Sequence[Path],
        *,
        descriptor: int | None = None,
    ) -> Fork:
        """Fork a process.

        Args:
            arguments: `[-W ACTION] (-m MODULE | -c TEXT | SCRIPT) ARGUMENT...`.
            folder: Where it runs.
            environment: All of it.
            files: The files of stdout and stderr; they exist.
            descriptor: It has a copy, whose number replaces DESCRIPTOR among the arguments.
        """
        program = {"arguments": list(arguments), "environment": dict(environment), "folder": str(folder)}
        request = {"start": {**program, "files": [str(path.resolve()) for path in files]}}
        return Fork(self, self.ask(request, *(() if descriptor is None else (descriptor,))))

    def ask(self, request: Mapping[str, Any], *descriptors: int) -> Any:
        """Send a request and wait for the answer."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = self._socket.recv(MOST_BYTES)
        assert answer, f"the server of forks has ended with exit code {self._process.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        """End the server and what it has forked."""
        self._socket.close()
        self._process.wait()


_SERVERS: list[ForkServer] = []


@cache
def fork_server(modules: tuple[str, ...]) -> ForkServer:
    """The server of this process that has imported `modules`; torch is imported once for all that begin with it."""
    needs_more = len(modules) > len(TORCH) and modules[: len(TORCH)] == TORCH
    _SERVERS.append(ForkServer(modules, base=fork_server(TORCH) if needs_more else None))
    return _SERVERS[-1]


def close_fork_servers() -> None:
    """End all servers of this process."""
    while _SERVERS:
        _SERVERS.pop().close()
    fork_server.cache_clear()
