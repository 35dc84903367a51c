"""The boards of this machine, what the kernel says of their processes, and what dead runs have left."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from torchmix.boards.board import BOARD_BYTES, NAME, BoardText, text_in
from torchmix.boards.socket_folders import left_folders, remove_left_folder
from torchmix.parallel.liveness.evidence import (
    PARENT,
    STARTED,
    SYSTEM_TICKS,
    USER_TICKS,
    Evidence,
    evidence_of_process,
    identity_of_process,
    is_alive,
    stat_fields,
)

# --- The boards of this machine, and what the kernel says of their processes.
#
# Cost: a look at the descriptors of this user's processes, and a walk of the page tables of those that have a board
# for their memory.

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
    fields = stat_fields(pid)
    return (int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])) * TICK_S if fields else 0.0


# --- What dead runs have left behind, and its removal.

YOUNG_S = 60.0
"""A process younger than this may not show itself yet."""
_CODES = ("from torchmix.steps.worker.main import main", "from torchmix.service.main import main")
"""What the command lines of processes say that a run starts."""


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a dead run has left."""

    kind: Literal["process", "folder"]
    what: str
    """In words."""
    path: str = ""
    pid: int = 0
    started: str = ""


def leftovers(*, temporary: Path | None = None) -> list[Leftover]:
    """All that dead runs of this user have left on this machine.

    Args:
        temporary: The folder of temporary files; None: the system's.
    """
    left = left_folders(Path(tempfile.gettempdir()) if temporary is None else temporary)
    folders = [Leftover(kind="folder", what=f"{path}: nobody holds its lock", path=str(path)) for path in left]
    return [*_processes(), *folders]


def clean(leftover: Leftover) -> bool:
    """Remove a leftover; whether it has gone."""
    if leftover.kind == "process":
        return _end(leftover.pid, leftover.started)
    return remove_left_folder(Path(leftover.path))


def _processes() -> Iterator[Leftover]:
    with_board = set()
    for seen in seen_processes():
        board = seen.board
        with_board.add(board.pid)
        if seen.is_orphan:
            what = f"{board.kind} {board.pid} is {seen.state}; process {board.parent_pid}, which started it, has ended"
            yield Leftover(kind="process", what=what, pid=board.pid, started=board.started)
    if 1 in with_board:
        return  # a trainer is the first process of its container
    for pid in processes_of_user():
        if pid not in with_board and pid != os.getpid() and _is_orphan(pid) and _is_ours(pid) and _age_s(pid) > YOUNG_S:
            what = f"process {pid} was started by a run that has ended"
            yield Leftover(kind="process", what=what, pid=pid, started=identity_of_process(pid).started)


def _is_ours(pid: int) -> bool:
    with suppress(OSError):
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        return any(code.encode() in word for word in words for code in _CODES)
    return False


def _is_orphan(pid: int) -> bool:
    fields = stat_fields(pid)
    return bool(fields) and fields[PARENT] == "1"


def _age_s(pid: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        return float((PROC / "uptime").read_text().split()[0]) - int(stat_fields(pid)[STARTED]) * TICK_S
    return 0.0


def _end(pid: int, started: str) -> bool:
    """Kill the process that began then, and no other."""
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return not is_alive(pid, started)
    try:
        if not is_alive(pid, started):  # looked at while the handle is held: the number cannot be another's now
            return True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        for _ in range(500):  # also on a busy machine: whoever ends needs a processor for that
            if not is_alive(pid, started):
                return True
            time.sleep(0.02)
        return False
    finally:
        os.close(handle)
