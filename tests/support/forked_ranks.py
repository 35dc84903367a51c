"""Ranks forked from one process that has imported torch and Megatron once: an import of them takes seconds each.

In: a program of a rank. Out: running children, each with its output in files, and their exit codes. A rank ends as a
script would: exit handlers run, and what it raises is printed. Stacks of all its threads are printed on SIGUSR1.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.deadlines import stretched


class ForkedRanks:
    """The ranks of one job. Leaves none behind when used in a `with`."""

    def __init__(self, program: Callable[[int], None], *, world_size: int, folder: Path) -> None:
        """Fork.

        Args:
            program: Called with the rank in each child.
            world_size: Number of children.
            folder: Where `rank-R.out` and `rank-R.err` go; made if missing.
        """
        gc.freeze()  # what is imported already is not looked through, and so not copied, again and again in each child
        folder.mkdir(parents=True, exist_ok=True)
        self._program, self.folder = program, folder
        self.code_of_rank: dict[int, int] = {}
        """Exit codes of those that have ended, negative for a signal."""
        self.pid_of_rank: dict[int, int] = {}
        for rank in range(world_size):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Fork one more."""
        pid = os.fork()
        if pid == 0:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(self.folder / f"rank-{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            faulthandler.register(signal.SIGUSR1, file=2)
            self._program(rank)
            sys.exit(0)
        self.pid_of_rank[rank] = pid

    def __enter__(self) -> ForkedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.running:
            os.kill(self.pid_of_rank[rank], signal.SIGKILL)
            os.waitpid(self.pid_of_rank[rank], 0)

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        for rank, pid in self.pid_of_rank.items():
            if rank not in self.code_of_rank:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.code_of_rank[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank in self.pid_of_rank if rank not in self.code_of_rank]

    def await_ends(self, *, deadline_s: float) -> float:
        """Seconds until all have ended; at the deadline, `stretched`, those that have not print their stacks."""
        began_s = time.monotonic()
        while self.running:
            if time.monotonic() - began_s > stretched(deadline_s):
                for rank in self.running:
                    os.kill(self.pid_of_rank[rank], signal.SIGUSR1)
                time.sleep(1.0)  # for the stacks to be written
                return float("inf")
            time.sleep(0.02)
        return time.monotonic() - began_s

    def errors_of(self, rank: int) -> str:
        """What a rank has written to stderr."""
        return (self.folder / f"rank-{rank}.err").read_text(errors="replace")

    def report(self) -> str:
        """Exit codes and stderr of all."""
        return "\n".join(
            f"--- rank {rank}: exit code {self.code_of_rank.get(rank)}\n{self.errors_of(rank)}"
            for rank in self.pid_of_rank
        )
