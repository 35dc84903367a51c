"""A file of a store, read by large ranges: what a scan asks for byte by byte comes from blocks that are kept.

Bytes are those of the file. Cost: in a range that was named, one request for each BLOCK_BYTES of it, and the next one
is under way while one is used; elsewhere one request for each SMALL_BYTES, doubled while reads continue where the last
one ended. What a file ends with is one request, as that is what describes most files. Memory: KEPT_BYTES, and
one block.

Blocks are asked for by their places, in any order; `steps/ahead.py` has items in a row, which is another thing.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from torchmix.storage.random_access import RandomAccessFile

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
