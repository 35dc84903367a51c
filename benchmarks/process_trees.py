"""What a process and all it has started cost: CPU seconds, memory.

In: process ids. Out: figures from /proc. CPU seconds are user and system time of every process of the tree, those that
have ended included once their parent has waited for them; the kernel counts in ticks of 10 ms. Memory is the
proportional set size (PSS): pages that k processes share count 1/k in each, so a tree's sum counts each page once.
Must hold: Linux. Cost: some milliseconds per process for the memory, as the kernel walks its page tables.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


def tree_of(pid: int) -> list[int]:
    """The process and its descendants that run now."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_seconds(pid: int | None = None) -> float:
    """User and system seconds of a tree so far, this process's by default."""
    total = 0
    for process in tree_of(pid or os.getpid()):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1].split()
            total += sum(map(int, fields[11:15]))  # utime, stime, and both of children waited for
    return total / TICKS


def memory_mib(pids: list[int]) -> dict[str, float]:
    """PSS of processes together, in MiB: all of it, and its anonymous, file and shared-memory parts."""
    sums = dict.fromkeys(("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem"), 0)
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
                name, value = line.split(":")
                if name in sums:
                    sums[name] += int(value.split()[0])
    return {name: round(value / 1024, 1) for name, value in sums.items()}


class Contestant:
    """A script run as `script --contestant '<options as JSON>'`: it answers lines of JSON with lines of JSON.

    Contestants stay alive together and are asked in turn, so that all of them meet the same machine.
    """

    def __init__(self, script: str, **options: Any) -> None:
        """Start it; `began_at` is the moment, on the clock of `time.monotonic`, which all processes share."""
        command = [sys.executable, script, "--contestant", json.dumps(options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as torchrun sets it for several ranks on a host
        self.began_at = time.monotonic()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self.pid = self._process.pid

    def answer(self) -> dict[str, Any]:
        """The next line it prints that is a JSON object; other lines are passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"the contestant ended with code {self._process.wait()} before it answered")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """Let it end, by the end of its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End it and all that it has started, at once: of a job whose ranks would wait for each other."""
        for pid in reversed(tree_of(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()


def requests() -> Iterator[dict[str, Any]]:
    """In a contestant: what it is asked, until its input ends."""
    for line in sys.stdin:
        yield json.loads(line)


def reply(**answer: Any) -> None:
    """In a contestant: answer."""
    print(json.dumps(answer), flush=True)


def spread(values: Sequence[float]) -> float:
    """Largest less smallest over the median."""
    return (max(values) - min(values)) / statistics.median(values)
