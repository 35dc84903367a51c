"""The boards of this machine, and what the kernel says of their processes.

In: /proc. Out: the runs of this user: of each process what it shows, its memory, its time of processors, and how it is.
Must hold: nothing is sent to a process or written; a process that ends meanwhile is left out. Cost: a look at the
descriptors of this user's processes, and a walk of the page tables of those that have a board for their memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from torchmix.boards.board import BOARD_BYTES, NAME, BoardText, text_in
from torchmix.parallel.liveness.evidence import Evidence, evidence_of_process, identity_of_process

PROC = Path("/proc")
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_TRIES = 5
STARTED_BY_A_RUN = ("node worker", "loader")
"""Kinds of processes that end with whoever has started them."""


class SeenProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process with a board."""

    board: BoardText
    state: Evidence
    pss_bytes: int
    """Memory: pages that k processes share count 1/k in each."""
    cpu_s: float
    """Time of processors since its start, of all its threads."""

    @property
    def is_orphan(self) -> bool:
        """Whether whoever started it, and for whom it works, has gone."""
        if self.board.kind not in STARTED_BY_A_RUN or not self.board.parent_started:
            return False
        return not is_alive(self.board.parent_pid, self.board.parent_started)


class SeenRun(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of a job on this machine."""

    name: str
    processes: list[SeenProcess]
    """Trainers by rank, then what they have started."""


def is_alive(pid: int, started: str) -> bool:
    """Whether a process is there, and is the one that began then."""
    identity = identity_of_process(pid)
    return identity.started == started and evidence_of_process(identity) in ("running", "stopped")


def processes_of_user() -> Iterator[int]:
    """Numbers of the processes of this user, ascending."""
    for number in sorted(int(path.name) for path in PROC.iterdir() if path.name.isdigit()):
        with suppress(OSError):
            if (PROC / str(number)).stat().st_uid == os.geteuid():
                yield number


def seen_processes() -> list[SeenProcess]:
    """All processes of this user that have a board of their own."""
    found = []
    for pid in processes_of_user():
        board = board_of(pid)
        if board is not None:
            state = evidence_of_process(identity_of_process(pid))
            seen = SeenProcess(board=board, state=state, pss_bytes=pss_bytes(pid), cpu_s=cpu_s(pid))
            if state != "gone":
                found.append(seen)
    return found


def runs_of(processes: list[SeenProcess]) -> list[SeenRun]:
    """Processes by the job that they work for."""
    by_pid = {seen.board.pid: seen for seen in processes}
    runs: dict[str, list[SeenProcess]] = {}
    for seen in processes:
        parent = by_pid.get(seen.board.parent_pid)
        run = seen.board.run or (parent.board.run if parent is not None else "")
        runs.setdefault(run or f"process {seen.board.parent_pid}", []).append(seen)
    order = {"trainer": 0, "serve": 0, "node worker": 1, "loader": 2}
    return [
        SeenRun(
            name=name,
            processes=sorted(
                of_run,
                key=lambda seen: (order.get(seen.board.kind, 3), seen.board.facts.get("rank", 0), seen.board.pid),
            ),
        )
        for name, of_run in sorted(runs.items())
    ]


def board_of(pid: int) -> BoardText | None:
    """What a process shows; None if it shows nothing, or has ended. A fork shows nothing of its own."""
    folder = PROC / str(pid) / "fd"
    try:
        descriptors = list(folder.iterdir())
    except OSError:
        return None
    for descriptor in descriptors:
        with suppress(OSError):
            if not str(descriptor.readlink()).startswith(f"/memfd:{NAME}"):
                continue
            for _ in range(_TRIES):
                with descriptor.open("rb") as memory:
                    board = text_in(memory.read(BOARD_BYTES))
                if board is not None:
                    if board.pid == pid:
                        return board
                    break
    return None


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 if it cannot be read."""
    with suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def cpu_s(pid: int) -> float:
    """User and system seconds of a process; 0 if it cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        fields = (PROC / str(pid) / "stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S
    return 0.0
