"""A file as ranges of bytes: what every format is read from, wherever the file lies; a scan reads it ahead."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
# milliseconds would not tell a second write. Where the clock of this machine is ahead of that of a shared file system,
# that is not known of files written in the meantime; where it is behind, more files are read. Cost: one system call a
# file.
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


# --- A file of a store, read by large ranges: what a scan asks for byte by byte comes from blocks that are
# kept.
#
# Bytes are those of the file. Cost: in a range that was named, one request for each BLOCK_BYTES of it, and the next
# one is under way while one is used; elsewhere one request for each SMALL_BYTES, doubled while reads continue where
# the last one ended. What a file ends with is one request, as that is what describes most files. Memory: KEPT_BYTES,
# and one block.
#
# Blocks are asked for by their places, in any order; `steps/ahead.py` has items in a row, which is another thing.

SMALL_BYTES = 64 << 10
"""Read at once where nothing is known: most footers, and what 64 KiB take at 50 MB/s is a small part of a request."""
BLOCK_BYTES = 8 << 20
"""Read at once in a scan: at 50 MB/s a request's 20 to 100 ms are a small part of its time."""
KEPT_BYTES = 4 * BLOCK_BYTES
"""Bytes kept of a file: a scan reads Parquet chunks without an index twice, and most chunks are smaller."""


class ReadAhead:
    """Belongs to one thread."""

    def __init__(self, file: RandomAccessFile) -> None:
        """Owns `file`, and closes it."""
        self._file = file
        self._blocks: deque[tuple[int, bytes]] = deque()
        """Where blocks begin, and their bytes; the one used last is the last."""
        self._named = (0, 0)
        self._step_bytes = SMALL_BYTES
        self._thread: ThreadPoolExecutor | None = None
        self._coming: tuple[int, int, Future[bytes]] | None = None

    @property
    def num_bytes(self) -> int:
        """See `RandomAccessFile.num_bytes`."""
        return self._file.num_bytes

    def will_read(self, offset: int, num_bytes: int) -> None:
        """See `RandomAccessFile.will_read`; the last such range counts."""
        self._named = (offset, min(offset + num_bytes, self.num_bytes))

    def read(self, offset: int, num_bytes: int) -> bytes:
        """See `RandomAccessFile.read`."""
        stop = min(offset + num_bytes, self.num_bytes)
        parts: list[bytes] = []
        while offset < stop:
            start, block = self._block_at(offset, stop)
            parts.append(block[offset - start : stop - start])
            offset += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """See `RandomAccessFile.close`."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._blocks.clear()
        self._file.close()

    def _block_at(self, offset: int, stop: int) -> tuple[int, bytes]:
        """A block that holds a byte, and where it begins; `stop` is where the reader stops for now."""
        for start, block in reversed(self._blocks):
            if start <= offset < start + len(block):
                return start, block
        begin, end = self._named
        if begin <= offset < end:
            start = begin + (offset - begin) // BLOCK_BYTES * BLOCK_BYTES
            return self._keep(start, self._named_block(start, end))
        if offset >= self.num_bytes - SMALL_BYTES:
            start = max(self.num_bytes - SMALL_BYTES, 0)
            return self._keep(start, self._file.read(start, SMALL_BYTES))
        goes_on = any(start + len(block) == offset for start, block in self._blocks)
        self._step_bytes = min(2 * self._step_bytes, BLOCK_BYTES) if goes_on else SMALL_BYTES
        limit = begin if offset < begin else self.num_bytes
        num_bytes = min(max(self._step_bytes, min(stop - offset, BLOCK_BYTES)), limit - offset)
        return self._keep(offset, self._file.read(offset, num_bytes))

    def _named_block(self, start: int, end: int) -> bytes:
        """A block of the range that was named; the next one is asked for."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[:2] == (start, end):
            block = coming[2].result()
        else:
            if coming is not None:
                coming[2].cancel()
            block = self._file.read(start, min(BLOCK_BYTES, end - start))
        following = start + BLOCK_BYTES
        if following < end:
            self._thread = self._thread or ThreadPoolExecutor(1, "torchmix-ahead")
            ahead = self._thread.submit(self._file.read, following, min(BLOCK_BYTES, end - following))
            self._coming = (following, end, ahead)
        return block

    def _keep(self, start: int, block: bytes) -> tuple[int, bytes]:
        if not block:
            raise OSError(f"the file ends before byte {start}")
        self._blocks.append((start, block))
        while len(self._blocks) > 1 and sum(len(kept) for _, kept in self._blocks) > KEPT_BYTES:
            self._blocks.popleft()
        return start, block
