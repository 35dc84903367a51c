"""What the kernel says of a file: equal as long as nobody has written to it.

In: files of this machine. Out: a `FileStatus` of each. Must hold: where statuses that were taken of settled files are
those that they have later, their bytes are the same, so that nothing must be read to see it; of files that were written
a moment ago nothing is said, since a clock of a few milliseconds would not tell a second write. Cost: one system call a
file.

Inode, size and times, but no device: a shared file system has another number on each node, and gives the same files the
same inodes and times on all of them. A copy of a file has times of its own, and is looked into.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from torchmix.catalog.manifest import FileStatus
from torchmix.storage.random_access import LocalFile, RandomAccessFile

SETTLED_S = 2.0
"""Seconds without a write after which the next one certainly shows; some file systems count in whole ones."""


def settled_statuses(file: RandomAccessFile, beside: Sequence[str] = ()) -> tuple[FileStatus, ...]:
    """Statuses of an open file and of others beside it; empty where one was written lately, or is in a store.

    Args:
        file: As it was when it was opened: what is read of it later is at least as new.
        beside: Paths of others.
    """
    found = statuses(file, beside)
    if found and max(max(status.modified_ns, status.changed_ns) for status in found) > time.time_ns() - SETTLED_S * 1e9:
        return ()
    return found


def statuses(file: RandomAccessFile, beside: Sequence[str] = ()) -> tuple[FileStatus, ...]:
    """As `settled_statuses`, of files however old."""
    if not isinstance(file, LocalFile):
        return ()
    try:
        return (_status(file.status), *(_status(os.stat(path)) for path in beside))  # noqa: PTH116 - hundreds at a start
    except OSError:  # opening the file raises it
        return ()


def _status(found: os.stat_result) -> FileStatus:
    return FileStatus(
        inode=found.st_ino, num_bytes=found.st_size, modified_ns=found.st_mtime_ns, changed_ns=found.st_ctime_ns
    )
