"""A job whose processes are killed all at once, or interrupted, and the job that goes on after it.

In: a recipe, sizes, and when to kill. Out: a hash of the tensors of each step of each rank, over both jobs. Must hold,
and is asserted: nothing of the first is left when the second has ended: no process, no file, no name in /dev/shm.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tests.support.processes import Child, Processes, wait_until
from torchmix.parallel.topology import Topology

START_S = END_S = 120.0


class KilledJob:
    """Ranks as real processes, with one node worker."""

    def __init__(self, recipe: Path, folder: Path, topology: Topology, *, steps: int) -> None:
        """`folder` is new; the ranks do `steps` steps in all."""
        self._recipe, self._topology, self._steps = recipe, topology, steps
        self._folder, self._saves, self._temporary = folder, folder / "saves", folder / "temporary"
        for new in (folder, self._saves, self._temporary):
            new.mkdir()
        self._shared = _shared_memory()

    def steps_of_ranks(
        self, *, kill_at: int | None, number: int = signal.SIGKILL, stops_worker: bool = False
    ) -> list[dict[int, str]]:
        """What each rank was given by step.

        Args:
            kill_at: All processes are sent the signal after this step; None: while they come together.
            number: The signal.
            stops_worker: The worker is stopped just before, and only the ranks are sent the signal.
        """
        with Processes(self._folder) as processes:
            ranks = self._start(processes, "1" if kill_at is None else str(kill_at))
            if kill_at is None:
                wait_until(lambda: bool(self._left()), deadline_s=START_S, what=processes.report)
            else:
                ranks[0].wait_for_line(f"step {kill_at} ", deadline_s=START_S)
            own = {rank.pid for rank in ranks}  # one that was just born has no session of its own yet
            started = own.union(*(rank.session for rank in ranks))
            if stops_worker:
                send_all(started - own, signal.SIGSTOP)
            send_all(own if stops_worker else started, number)
            wait_until(lambda: not any(rank.session for rank in ranks), deadline_s=END_S, what=processes.report)
            first = [_tensors_of(rank) for rank in ranks]
            ranks = self._start(processes, "")
            for rank in ranks:
                assert rank.wait(deadline_s=START_S) == 0, processes.report()
            wait_until(lambda: not any(rank.session for rank in ranks), deadline_s=END_S, what=processes.report)
            second = [_tensors_of(rank) for rank in ranks]
        assert not self._left(), "files are left"
        assert _shared_memory() <= self._shared, "shared memory is left"
        for before, after in zip(first, second, strict=True):
            assert all(before.get(step, tensors) == tensors for step, tensors in after.items()), "a step was altered"
        return [{**before, **after} for before, after in zip(first, second, strict=True)]

    def _start(self, processes: Processes, hold_at: str) -> list[Child]:
        topology = self._topology
        sizes = ("node", topology.tp, topology.cp, topology.pp, 2, self._steps)
        return processes.start_ranks(
            *("-m", "tests.support.loader_rank", str(self._recipe), str(self._saves), *map(str, sizes)),
            world_size=topology.world_size,
            environment={"HOLD_AT": hold_at, "TMPDIR": str(self._temporary)},
        )

    def _left(self) -> list[Path]:
        return list(self._temporary.iterdir())


def send_all(processes: Iterable[int], number: int) -> None:
    """Send processes a signal, as fast as that goes."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _tensors_of(child: Child) -> dict[int, str]:
    return {int(step): found for step, found in re.findall(r"^tensors (\d+) (\w+)$", child.stdout(), re.M)}


def _shared_memory() -> set[str]:
    with suppress(OSError):
        return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("torchmix")}
    return set()
