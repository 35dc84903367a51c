"""A file as ranges of bytes: what every format is read from, wherever the file lies."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

# --- A file as ranges of bytes: what every format is read from, wherever the file lies.
#
# A range is the bytes of the file as it was opened, fewer only where it ends; threads may share a file. Cost: one
# `pread` a call.


class RandomAccessFile(Protocol):
    """An open file; threads may share everything except `close`."""

    @property
    def num_bytes(self) -> int:
        """Its size when it was opened."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Bytes [offset, offset + num_bytes); fewer only where the file ends.

        Raises:
            OSError: A local file cannot be read.
            SourceUnreadable, SourceChanged: An object of a store cannot be read, or is another one by now.
        """

    def will_read(self, offset: int, num_bytes: int) -> None:
        """Say that these bytes will be read soon, from the first one on."""

    def close(self) -> None:
        """Close the file."""


class LocalFile:
    """A file of this machine, local or mounted."""

    __slots__ = ("_descriptor", "status")

    def __init__(self, path: str | Path) -> None:
        """Open it.

        Raises:
            OSError: There is none, or it may not be read.
        """
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.status = os.fstat(self._descriptor)
        """What the kernel said when it was opened."""

    @property
    def num_bytes(self) -> int:
        """See `RandomAccessFile.num_bytes`."""
        return self.status.st_size

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def read(self, offset: int, num_bytes: int) -> bytes:
        """See `RandomAccessFile.read`; leaves the descriptor's position alone."""
        first = os.pread(self._descriptor, num_bytes, offset)
        if len(first) == num_bytes or not first:
            return first
        parts, done_bytes = [first], len(first)
        while done_bytes < num_bytes:  # the kernel gives at most 2 GiB a call
            part = os.pread(self._descriptor, num_bytes - done_bytes, offset + done_bytes)
            if not part:
                break
            parts.append(part)
            done_bytes += len(part)
        return b"".join(parts)

    def will_read(self, offset: int, num_bytes: int) -> None:
        """See `RandomAccessFile.will_read`; the kernel reads meanwhile."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """See `RandomAccessFile.close`; once."""
        os.close(self._descriptor)


# --- What the kernel says of a file: equal as long as nobody has written to it.
#
# Where statuses that were taken of settled files are those that they have later, their bytes are the same, so that
# nothing must be read to see it; of files that were written a moment ago nothing is said, since a clock of a few
# milliseconds would not tell a second write. Cost: one system call a file.
#
# Inode, size and times, but no device: a shared file system has another number on each node, and gives the same files
# the same inodes and times on all of them. A copy of a file has times of its own, and is looked into.

SETTLED_S = 2.0
"""Seconds without a write after which the next one certainly shows; some file systems count in whole ones."""


class FileStatus(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the kernel said of a file; a list in JSON."""

    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int
    """Last change of its content, name or permissions."""


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


# --- A file as ranges of bytes -> a stream of Python's, for libraries that read streams.
#
# It does not close the file. Cost: a read of the file for each read of the stream.


class ByteStream(io.RawIOBase):
    """A file's bytes from a position on."""

    def __init__(self, file: RandomAccessFile) -> None:
        """Begin at the first byte."""
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position, as any stream does."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.num_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """The next `size` bytes, fewer only where the file ends; without a size all that are left."""
        left = max(0, self._file.num_bytes - self._at)
        content = self._file.read(self._at, left if size is None or size < 0 else min(size, left))
        self._at += len(content)
        return content


# --- The identity of a file that has no footer to describe the rest: a hash of its beginning and its end.
#
# A pure function of the file's bytes. Cost: two reads of at most HASHED_BYTES. What is altered in the middle, at the
# same size, shows only when a page is read.

HASHED_BYTES = 32 << 10
"""Hashed bytes of the beginning, and of the end."""


def hash_ends(file: RandomAccessFile) -> tuple[int, str]:
    """Size in bytes, and the first 32 hex digits of the SHA-256 of the first bytes and the last ones.

    In a file of fewer than twice HASHED_BYTES, some bytes count in both.
    """
    head = file.read(0, HASHED_BYTES)
    tail = file.read(max(file.num_bytes - HASHED_BYTES, 0), HASHED_BYTES)
    return file.num_bytes, hashlib.sha256(head + tail).hexdigest()[:32]
