"""The rests of documents that steps draw piece by piece, kept outside the page cache.

In: the documents that later calls continue, and the token each continues at; pages as they are decoded. Out: tokens of
these documents, without their pages. Must hold: the tokens are those of the page. Each source may have one document
open for hundreds of steps, so without this file the cache would have to hold a page of each source. Cost: one copy of
the rest of each open document; a few array operations a call, and nothing where no document is open.
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
    """Number of the first of these tokens in the document."""
    values: NDArray[np.integer[Any]]


class OpenDocuments:
    """The documents that are open now, and the rests of those whose page was read."""

    def __init__(self) -> None:
        self._begin_of: dict[int, int] = {}
        self._rests: dict[int, _Rest] = {}
        self._wanted: dict[int, dict[int, int]] = {}
        """Rows of open documents in each page of the present call, by the page's first piece."""

    @property
    def num_bytes(self) -> int:
        """Memory of the rests."""
        return sum(rest.values.nbytes for rest in self._rests.values())

    def follow(self, source: NDArray[np.integer[Any]], rows: Int64Array, starts: Int64Array) -> None:
        """Name the documents that are open after the next call; drop the rests of those not open before it.

        Args:
            source: [n] index of the source.
            rows: [n] row of the source; each (source, row) once.
            starts: [n] the first token that a call after the next one may ask for.
        """
        self._rests = {key: self._cut(key, rest) for key, rest in self._rests.items() if key in self._begin_of}
        self._begin_of = dict(zip(row_keys(source, rows).tolist(), starts.tolist(), strict=True))

    def clear(self) -> None:
        """Drop all rests."""
        self._begin_of, self._rests = {}, {}

    def _cut(self, key: int, rest: _Rest) -> _Rest:
        """The rest without tokens that were already given, where the saving is worth a copy."""
        gone = self._begin_of[key] - rest.begin
        return _Rest(rest.begin + gone, rest.values[gone:].copy()) if 2 * gone > len(rest.values) else rest

    def begin(
        self, at: Located, source: NDArray[np.integer[Any]], rows: Int64Array
    ) -> tuple[NDArray[np.bool_], list[Run]]:
        """Begin a call: find the pieces at hand, and the pages whose rests are to be kept.

        Args:
            at: The pieces of the call.
            source, rows: [n] source and row of the pieces, in the order of the request.

        Returns:
            [Q] which pages are not needed because all their pieces are at hand; and the runs of these pieces.
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
        """Keep the rests of the open documents of a page; the page is named by its first piece in the call."""
        for key, row in self._wanted.get(first_piece, {}).items():
            start, stop = page.offsets[row : row + 2].tolist()
            begin = self._begin_of.get(key, stop)  # a document that ends in this call has no rest
            is_new = key not in self._rests or self._rests[key].begin > begin  # or the document begins again
            if is_new and start + begin < stop and not page.is_view:
                self._rests[key] = _Rest(begin, page.values[start + begin : stop].copy())

    def _run(self, key: int, piece: int, start: int) -> Run | None:
        """The run of a piece, if the rest of its document is kept."""
        rest = self._rests.get(key)
        return None if rest is None or start < rest.begin else (rest.values, piece, [start - rest.begin])
