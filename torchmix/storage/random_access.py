"""A file as ranges of bytes: what every format is read from, wherever the file lies.

In: a path of this machine. Out: `RandomAccessFile`, its size and any range of it. Must hold: a range is the bytes of
the file as it was opened, fewer only where it ends; threads may share a file. Cost: one `pread` a call.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol


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
