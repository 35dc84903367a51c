"""What dead runs have left behind, and its removal.

In: this user's processes, and the folder of temporary files. Out: findings, each with what to do about it. Must hold:
nothing of a live run is named or touched: a process counts only once its parent has gone, and is looked at again before
it is ended, by a handle that no later process can have; a folder only if nobody holds its lock. Memory of steps and ids
of open documents that did not fit have no name, so the kernel frees them with their process. Cost: that of `find.py`.
"""

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

from torchmix.boards.find import PROC, TICK_S, is_alive, processes_of_user, seen_processes
from torchmix.boards.socket_folders import left_folders, remove_left_folder
from torchmix.parallel.liveness.evidence import identity_of_process

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
        if (
            pid not in with_board
            and pid != os.getpid()
            and _parent(pid) == 1
            and _is_ours(pid)
            and _age_s(pid) > YOUNG_S
        ):
            what = f"process {pid} was started by a run that has ended"
            yield Leftover(kind="process", what=what, pid=pid, started=identity_of_process(pid).started)


def _is_ours(pid: int) -> bool:
    with suppress(OSError):
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        return any(code.encode() in word for word in words for code in _CODES)
    return False


def _parent(pid: int) -> int:
    return int(_fields(pid)[1])


def _age_s(pid: int) -> float:
    with suppress(OSError, ValueError, IndexError):
        return float((PROC / "uptime").read_text().split()[0]) - int(_fields(pid)[19]) * TICK_S
    return 0.0


def _fields(pid: int) -> list[str]:
    with suppress(OSError, IndexError):
        return (PROC / str(pid) / "stat").read_text().rsplit(") ", 1)[1].split()
    return ["Z", "0"]


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
        for _ in range(100):
            if not is_alive(pid, started):
                return True
            time.sleep(0.02)
        return False
    finally:
        os.close(handle)
