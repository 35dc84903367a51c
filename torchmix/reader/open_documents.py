"""The rests of documents that steps draw piece by piece, kept outside the page cache.

The tokens are those of the page, or those that encoding the row again would give; what is kept decides only how often a
page is decoded and a row is encoded. Each source may have one document open for hundreds of steps, so without this file
the cache would have to hold a page of each source, and a book would be encoded in each of its steps.

Beyond MEMORY_BYTES rests lie in files without a name, one for each document, which end with the process; where the disk
is full, a document is read and encoded again. Cost: one copy of the rest of each open document; a few array operations
a call, and nothing where no document is open.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.reader.locate import Located, row_keys
from torchmix.reader.page_cache import DecodedPage

logger = logging.getLogger(__name__)

MEMORY_BYTES = 64 << 20
"""Rests kept in memory, of all documents together."""

Run = tuple[NDArray[np.integer[Any]], int, Sequence[int]]
"""Tokens, the number of the first of consecutive pieces, and where in the tokens each of these pieces begins."""


class _Rest(NamedTuple):
    """The last tokens of a document."""

    begin: int
    """Number of the first of these tokens in the document."""
    epoch: int
    """Pass over the source in which a map made them; 0 where it does not matter."""
    values: NDArray[np.integer[Any]]
    is_in_memory: bool


class OpenDocuments:
    """The documents that are open now, and the rests of those that were read or encoded."""

    def __init__(self) -> None:
        """Nothing is open."""
        self._begin_of: dict[int, int] = {}
        self._rests: dict[int, _Rest] = {}
        self._open = self._known = np.zeros(0, np.int64)
        """Keys of the documents that are open, and of those that are open or have a rest; ascending."""
        self._memory_bytes = 0
        self._wanted: dict[int, dict[int, int]] = {}
        """Rows of open documents in each page of the present call, by the page's first piece."""
        self._is_disk_full = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the rests, in memory or not."""
        return sum(rest.values.nbytes for rest in self._rests.values())

    def follow(self, source: NDArray[np.integer[Any]], rows: Int64Array, starts: Int64Array) -> None:
        """Name the documents that are open after the next call; drop the rests of those not open before it.

        Args:
            source: [n] index of the source.
            rows: [n] row of the source; each (source, row) once.
            starts: [n] the first token that a call after the next one may ask for.
        """
        self._rests = {key: self._cut(key, rest) for key, rest in self._rests.items() if key in self._begin_of}
        self._memory_bytes = sum(rest.values.nbytes for rest in self._rests.values() if rest.is_in_memory)
        self._begin_of = dict(zip(row_keys(source, rows).tolist(), starts.tolist(), strict=True))
        self._open = np.array(sorted(self._begin_of), np.int64)
        self._known = np.array(sorted({*self._begin_of, *self._rests}), np.int64)

    def clear(self) -> None:
        """Drop all rests."""
        self._begin_of, self._rests, self._memory_bytes = {}, {}, 0
        self._open = self._known = np.zeros(0, np.int64)

    # Of pages, whose documents are tokens.

    def begin(self, at: Located, is_encoded: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], list[Run]]:
        """Begin a call: find the pieces of pages at hand, and the pages whose rests are to be kept.

        Args:
            at: The pieces of the call.
            is_encoded: [S] sources whose rows are encoded; `find` is for them.

        Returns:
            [Q] which pages are not needed because all their pieces are at hand; and the runs of these pieces.
        """
        is_served, runs = np.zeros(len(at.first_piece), np.bool_), list[Run]()
        self._wanted = {}
        if not len(self._known):
            return is_served, runs
        keys = row_keys(at.source, at.row)
        pieces = np.flatnonzero(_are_in(self._known, keys) & ~is_encoded[at.source])
        num_pieces = np.diff(np.append(at.first_piece, len(keys))).tolist()
        pages = (at.first_piece.searchsorted(pieces, side="right") - 1).tolist()
        for page, of_page in groupby(zip(pages, pieces.tolist(), strict=True), key=itemgetter(0)):
            several = [piece for _, piece in of_page]
            at_hand = [self._run(int(keys[piece]), piece, int(at.start[piece]), 0) for piece in several]
            found = [run for run in at_hand if run is not None]
            if len(found) == num_pieces[page]:
                is_served[page] = True
                runs += found
            else:
                wanted = {int(keys[piece]): int(at.row_in_page[piece]) for piece in several}
                self._wanted[int(at.first_piece[page])] = wanted
        return is_served, runs

    def keep_page(self, first_piece: int, page: DecodedPage) -> None:
        """Keep the rests of the open documents of a page; the page is named by its first piece in the call."""
        if page.is_view:
            return
        for key, row in self._wanted.get(first_piece, {}).items():
            start, stop = page.offsets[row : row + 2].tolist()
            self.keep(key, 0, page.values[start:stop])

    # Of rows that are encoded.

    def find(self, keys: Int64Array, starts: Int64Array, epochs: Int64Array) -> list[Run]:
        """The runs of n pieces whose rests are kept, one for each such piece.

        Args:
            keys: [n] from `row_keys`.
            starts: [n] first token of each piece in its document.
            epochs: [n] pass over the source.
        """
        if not len(self._known) or not len(keys):
            return []
        pieces = np.flatnonzero(_are_in(self._known, keys)).tolist()
        found = [self._run(int(keys[piece]), piece, int(starts[piece]), int(epochs[piece])) for piece in pieces]
        return [run for run in found if run is not None]

    def is_open(self, keys: Int64Array) -> NDArray[np.bool_]:
        """[n] whether later calls continue these documents."""
        return _are_in(self._open, keys)

    def keep(self, key: int, epoch: int, tokens: NDArray[np.integer[Any]]) -> None:
        """Keep what later calls may ask for of a document, if it is open; `tokens` are all that it has."""
        begin, rest = self._begin_of.get(key, len(tokens)), self._rests.get(key)
        is_kept = rest is not None and rest.epoch == epoch and rest.begin <= begin
        if is_kept or begin >= len(tokens):
            return
        if rest is not None:
            self._memory_bytes -= rest.values.nbytes if rest.is_in_memory else 0
            del self._rests[key]
        values, is_in_memory = self._store(tokens[begin:])
        if values is not None:
            self._rests[key] = _Rest(begin, epoch, values, is_in_memory)
            self._memory_bytes += values.nbytes if is_in_memory else 0

    def _run(self, key: int, piece: int, start: int, epoch: int) -> Run | None:
        """The run of a piece, if the rest of its document is kept."""
        rest = self._rests.get(key)
        is_there = rest is not None and rest.begin <= start and rest.epoch == epoch
        return (rest.values, piece, [start - rest.begin]) if rest is not None and is_there else None

    def _store(self, tokens: NDArray[np.integer[Any]]) -> tuple[NDArray[np.integer[Any]] | None, bool]:
        """A copy in memory while there is room, else in a file without a name; None where that cannot be written."""
        if self._memory_bytes + tokens.nbytes <= MEMORY_BYTES:
            return tokens.copy(), True
        try:
            with tempfile.TemporaryFile(prefix="torchmix-") as file:
                file.write(np.ascontiguousarray(tokens).data)  # not `tofile`: that loses the error of its last block
                file.flush()
                content = mmap.mmap(file.fileno(), tokens.nbytes, prot=mmap.PROT_READ)
        except OSError as error:
            if not self._is_disk_full:
                self._is_disk_full = True
                logger.warning(
                    "rests of long documents cannot be kept in %s (%s); such a document is read, and encoded, in each "
                    "step that continues it; set TMPDIR to a folder with room",
                    tempfile.gettempdir(),
                    error,
                )
            return None, False
        return np.frombuffer(content, tokens.dtype), False

    def _cut(self, key: int, rest: _Rest) -> _Rest:
        """The rest without tokens that were already given, where the saving is worth a copy."""
        gone = self._begin_of[key] - rest.begin
        if not rest.is_in_memory or 2 * gone <= len(rest.values):
            return rest
        return rest._replace(begin=rest.begin + gone, values=rest.values[gone:].copy())


def _are_in(sorted_keys: Int64Array, keys: Int64Array) -> NDArray[np.bool_]:
    """[n] which keys are among some ascending ones."""
    if not len(sorted_keys):
        return np.zeros(len(keys), np.bool_)
    found: NDArray[np.bool_] = sorted_keys[np.minimum(sorted_keys.searchsorted(keys), len(sorted_keys) - 1)] == keys
    return found
