"""A file as ranges of bytes -> a stream of Python's, for libraries that read streams.

In: an open `RandomAccessFile`. Out: a readable, seekable stream over it. Must hold: it does not close the file. Cost:
a read of the file for each read of the stream.
"""

from __future__ import annotations

import io

from torchmix.storage.random_access import RandomAccessFile


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
