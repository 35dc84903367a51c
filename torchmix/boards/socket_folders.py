"""Folders in which processes of a run meet, made so that those of dead runs can be told from living ones.

Who makes one holds a lock on it for as long as it is in use, which the kernel lets go however the process ends; so a
folder is left over once anybody else gets its lock, also where processes do not see each other, as in containers that
share a disk. None is removed but by who holds its lock. Cost: a look at the names in the folder, and making one removes
those that are left over.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "torchmix-"
SOCKET = "node"
_NAME = re.compile(PREFIX + r"[a-z0-9_]{8}")
"""What `tempfile` makes of the prefix. Other folders whose names begin so, maybe still empty, are others'."""
_OURS = re.compile(rf"{SOCKET}|\d+|.+\.loader|\..+\.\d+|(progress|scaling)\.jsonl")
"""What runs put there: a worker's socket, those of loaders, their registrations and what they follow."""


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder; removed at the end.

    Raises:
        OSError: It cannot be made.
    """
    for left in left_folders(Path(tempfile.gettempdir())):  # by runs whose processes were killed all at once
        remove_left_folder(left)
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process took it for left over before it could be locked
            continue
        with suppress(OSError):  # of a file system without locks: there no folder counts as left over
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_still(path, descriptor):
            break
        os.close(descriptor)  # the same, between the two calls
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def left_folders(temporary: Path) -> list[Path]:
    """Folders of this user's dead runs, by name."""
    found = []
    with suppress(OSError), os.scandir(temporary) as entries:
        names = sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name))
        found = [temporary / name for name in names if _is_left(temporary / name)]
    return found


def remove_left_folder(path: Path) -> bool:
    """Remove a folder if it is left over; whether it has gone."""
    with _lock_of(path) as is_ours:
        if is_ours and _has_nothing_else(path):
            shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _is_left(path: Path) -> bool:
    with suppress(OSError):
        status = path.lstat()
        if path.is_dir() and not path.is_symlink() and status.st_uid == os.geteuid() and _has_nothing_else(path):
            with _lock_of(path) as is_ours:
                return is_ours
    return False


def _has_nothing_else(path: Path) -> bool:
    with suppress(OSError):
        return all(_OURS.fullmatch(entry.name) for entry in path.iterdir())
    return False


@contextmanager
def _lock_of(path: Path) -> Iterator[bool]:
    """Whether this process has got the lock of a folder, which it holds meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # somebody has it, or there are no locks
            is_ours = False
        else:
            is_ours = True
        yield is_ours
    finally:
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    return False
