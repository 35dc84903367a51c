"""What is left of documents that steps draw piece by piece, outside the page cache.

In: which documents later calls ask more of, and from which token on; pages as they are decoded. Out: tokens of these
documents, without their pages. Must hold: what comes out is what the page holds. Each source may have one document
open for hundreds of steps, so without this a step would need a page of each source in the cache. Cost: a copy of what
is left of each open document, once; a few array operations a call, and nothing where no document is open.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.reader.decoded_page import DecodedPage
from torchmix.reader.pieces.locate import Located
from torchmix.reader.pieces.page_starts import row_keys
from torchmix.reader.pieces.piece_copy import Run


class _Rest(NamedTuple):
    """The last tokens of a document."""

    begin: int
    """The first of them, counted from the document's first."""
    values: NDArray[np.integer[Any]]


class OpenDocuments:
    """The documents that are open now, and what is left of those of which a page was read."""

    def __init__(self) -> None:
        self._begin_of: dict[int, int] = {}
        self._rests: dict[int, _Rest] = {}
        self._wanted: dict[int, dict[int, int]] = {}
        """Of the present call: rows of open documents in a page, by the page's first piece."""

    @property
    def num_bytes(self) -> int:
        """Memory that the rests take."""
        return sum(rest.values.nbytes for rest in self._rests.values())

    def follow(self, source: NDArray[np.integer[Any]], rows: Int64Array, starts: Int64Array) -> None:
        """Say which documents are open after the next call; those that were not open before it are let go.

        Args:
            source: [n] index of the source.
            rows: [n] row of the source; each (source, row) once.
            starts: [n] the first token that is asked for after the next call.
        """
        self._rests = {key: self._cut(key, rest) for key, rest in self._rests.items() if key in self._begin_of}
        self._begin_of = dict(zip(row_keys(source, rows).tolist(), starts.tolist(), strict=True))

    def clear(self) -> None:
        """Let all go."""
        self._begin_of, self._rests = {}, {}

    def _cut(self, key: int, rest: _Rest) -> _Rest:
        """The rest without what was asked for before, where that is worth a copy."""
        gone = self._begin_of[key] - rest.begin
        return _Rest(rest.begin + gone, rest.values[gone:].copy()) if 2 * gone > len(rest.values) else rest

    def begin(
        self, at: Located, source: NDArray[np.integer[Any]], rows: Int64Array
    ) -> tuple[NDArray[np.bool_], list[Run]]:
        """Begin a call: what is at hand, and of which pages rests are to be kept.

        Args:
            at: The pieces of the call.
            source, rows: [n] of the pieces as they were asked for.

        Returns:
            [Q] which pages are not needed, as all their pieces are at hand; and the runs of these pieces.
        """
        is_served, runs = np.zeros(len(at.first_piece), np.bool_), list[Run]()
        self._wanted = {}
        known = np.array(sorted({*self._begin_of, *self._rests}), np.int64)
        if not len(known):
            return is_served, runs
        keys = row_keys(source, rows)[at.order]
        pieces = np.flatnonzero(known[np.minimum(known.searchsorted(keys), len(known) - 1)] == keys)
        num_pieces = np.diff(np.append(at.first_piece, len(keys))).tolist()
        pages = (at.first_piece.searchsorted(pieces, side="right") - 1).tolist()
        for page, of_page in groupby(zip(pages, pieces.tolist(), strict=True), key=itemgetter(0)):
            several = [piece for _, piece in of_page]
            at_hand = [self._run(int(keys[piece]), piece, int(at.start[piece])) for piece in several]
            found = [run for run in at_hand if run is not None]
            if len(found) == num_pieces[page]:
                is_served[page] = True
                runs += found
            else:
                wanted = {int(keys[piece]): int(at.row_in_page[piece]) for piece in several}
                self._wanted[int(at.first_piece[page])] = wanted
        return is_served, runs

    def keep(self, first_piece: int, page: DecodedPage) -> None:
        """Keep what is left of the open documents of a page, which is named by its first piece in the call."""
        for key, row in self._wanted.get(first_piece, {}).items():
            start, stop = page.offsets[row : row + 2].tolist()
            begin = self._begin_of.get(key, stop)  # of one that ends in this call nothing is left
            is_new = key not in self._rests or self._rests[key].begin > begin  # it has begun again
            if is_new and start + begin < stop and not page.is_view:
                self._rests[key] = _Rest(begin, page.values[start + begin : stop].copy())

    def _run(self, key: int, piece: int, start: int) -> Run | None:
        """A piece, if what is left of its document is kept."""
        rest = self._rests.get(key)
        return None if rest is None or start < rest.begin else (rest.values, piece, [start - rest.begin])
