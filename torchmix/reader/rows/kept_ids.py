"""Ids of documents that steps draw piece by piece, so that a book is encoded once.

In: the documents that later calls continue, with the token each continues at; ids of rows as they are encoded. Out:
the ids of pieces of these documents. Must hold: the ids are those that encoding the row again would give; what is kept
decides only how often that is done. Beyond MEMORY_BYTES the ids lie in unlinked files, one for each document, which end
with the process; where the disk is full, a document is encoded again. Cost: one copy of the rest of each open document.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.reader.pieces.page_starts import row_keys

logger = logging.getLogger(__name__)

MEMORY_BYTES = 64 << 20
"""Ids kept in memory, of all documents together."""


class _Kept(NamedTuple):
    """The last ids of a document."""

    begin: int
    """Number of the first of them in the document."""
    epoch: int
    """Pass over the source in which they were made; 0 where it does not matter."""
    values: NDArray[np.integer[Any]]
    is_in_memory: bool


class KeptIds:
    """The documents that are open now, and the ids of those that were encoded."""

    def __init__(self) -> None:
        self._begin_of: dict[int, int] = {}
        self._kept: dict[int, _Kept] = {}
        self._known = np.zeros(0, np.int64)
        self._is_disk_full = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all ids kept, in memory or not."""
        return sum(kept.values.nbytes for kept in self._kept.values())

    def follow(self, source: NDArray[np.integer[Any]], rows: Int64Array, starts: Int64Array) -> None:
        """Name the documents that are open after the next call; drop the ids of those not open before it.

        Args:
            source: [n] index of the source.
            rows: [n] row of the source; each (source, row) once.
            starts: [n] the first token that a call after the next one may ask for.
        """
        self._kept = {key: self._cut(key, kept) for key, kept in self._kept.items() if key in self._begin_of}
        self._begin_of = dict(zip(row_keys(source, rows).tolist(), starts.tolist(), strict=True))
        self._known = np.array(sorted(self._kept), np.int64)

    def clear(self) -> None:
        """Drop all ids."""
        self._begin_of, self._kept, self._known = {}, {}, np.zeros(0, np.int64)

    def find(self, keys: Int64Array, starts: Int64Array, epochs: Int64Array) -> list[tuple[int, NDArray[Any], int]]:
        """Pieces whose ids are kept.

        Args:
            keys: [n] from `row_keys`.
            starts: [n] first token of each piece in its document.
            epochs: [n] pass over the source.

        Returns:
            For each such piece its index, the ids, and where in them it begins.
        """
        if not len(self._known) or not len(keys):
            return []
        at = np.minimum(self._known.searchsorted(keys), len(self._known) - 1)
        found: list[tuple[int, NDArray[Any], int]] = []
        for piece in np.flatnonzero(self._known[at] == keys).tolist():
            kept, start = self._kept[int(keys[piece])], int(starts[piece])
            if kept.begin <= start and kept.epoch == epochs[piece]:
                found.append((piece, kept.values, start - kept.begin))
        return found

    def is_open(self, keys: Int64Array) -> NDArray[np.bool_]:
        """[n] whether later calls continue these documents."""
        if not self._begin_of:
            return np.zeros(len(keys), np.bool_)
        known = np.array(sorted(self._begin_of), np.int64)
        is_known: NDArray[np.bool_] = known[np.minimum(known.searchsorted(keys), len(known) - 1)] == keys
        return is_known

    def keep(self, key: int, epoch: int, ids: NDArray[np.integer[Any]]) -> None:
        """Keep what later calls may ask for of an open document; `ids` are all of its ids."""
        begin = self._begin_of[key]
        kept = self._kept.get(key)
        if kept is not None and kept.epoch == epoch and kept.begin <= begin:
            return
        if begin < len(ids):
            self._kept.pop(key, None)
            values, is_in_memory = self._store(ids[begin:])
            if values is not None:
                self._kept[key] = _Kept(begin, epoch, values, is_in_memory)
                self._known = np.array(sorted(self._kept), np.int64)

    def _store(self, ids: NDArray[np.integer[Any]]) -> tuple[NDArray[np.integer[Any]] | None, bool]:
        """A copy in memory while there is room, else in a file without a name; None where that cannot be written."""
        in_memory = sum(kept.values.nbytes for kept in self._kept.values() if kept.is_in_memory)
        if in_memory + ids.nbytes <= MEMORY_BYTES:
            return ids.copy(), True
        try:
            with tempfile.TemporaryFile(prefix="torchmix-") as file:
                file.write(np.ascontiguousarray(ids).data)  # not `tofile`: that loses the error of its last block
                file.flush()
                content = mmap.mmap(file.fileno(), ids.nbytes, prot=mmap.PROT_READ)
        except OSError as error:
            if not self._is_disk_full:
                self._is_disk_full = True
                logger.warning(
                    "ids of long documents cannot be kept in %s (%s); such a document is encoded in each step that "
                    "continues it; set TMPDIR to a folder with room",
                    tempfile.gettempdir(),
                    error,
                )
            return None, False
        return np.frombuffer(content, ids.dtype), False

    def _cut(self, key: int, kept: _Kept) -> _Kept:
        """The ids without those that were already given, where the saving is worth a copy."""
        gone = self._begin_of[key] - kept.begin
        if not kept.is_in_memory or 2 * gone <= len(kept.values):
            return kept
        return kept._replace(begin=kept.begin + gone, values=kept.values[gone:].copy())
