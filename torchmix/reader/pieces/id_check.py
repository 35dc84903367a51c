"""Ids of files that the index does not decode, checked as they are read.

In: pieces that were copied out of a Megatron .bin, among others. Out: nothing, or an error that names source, file, row
and id. Must hold: no id outside the vocabulary reaches a trainer. Cost: one pass over all tokens of the call for the
largest id, 0.03 to 0.3 ns a token. The pieces are checked one by one only where that id is too large; it may also lie
between the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.store import SourceCatalog
from torchmix.catalog.vocabulary import IdLimit
from torchmix.errors import SourceUnreadable, where_of
from torchmix.formats.table import READ_AS
from torchmix.reader.pieces.locate import Located


class IdCheck:
    """Compares ids with the vocabulary, for sources whose files hold only tokens."""

    def __init__(self, catalogs: Sequence[SourceCatalog], limit: IdLimit) -> None:
        """`catalogs`: all sources, in the order of their numbers."""
        self._catalogs = catalogs
        self._limit = limit
        self._is_unseen = [
            catalog.map is not None or (catalog.format in READ_AS and not READ_AS[catalog.format].scan_reads_tokens)
            for catalog in catalogs
        ]

    def check(
        self,
        at: Located,
        places: NDArray[np.int64],
        values: NDArray[np.integer[Any]],
        successors: NDArray[np.int64],
    ) -> None:
        """Check all tokens that one call has read.

        Args:
            at: [n] pieces.
            places: [n] where each begins in `values`.
            values: What was read, with anything between the pieces.
            successors: [n] the token that follows each piece, or 0.

        Raises:
            SourceUnreadable: A piece has an id outside the vocabulary; names the first one.
        """
        unseen = [one for one in at.ranges if self._is_unseen[one[0]]]
        if not unseen or (self._are_below(values) and self._are_below(successors)):
            return
        for s, start, stop in unseen:
            for i in range(start, stop):
                piece = values[places[i] : places[i] + at.tokens[i]]
                if not (self._are_below(piece) and self._are_below(successors[i : i + 1])):
                    raise self._outside(s, at, i, [*piece.tolist(), int(successors[i])])

    def _are_below(self, values: NDArray[np.integer[Any]]) -> bool:
        """Whether ids are at least 0 and below the limit."""
        if not len(values):
            return True
        if values.dtype.kind == "u" or values.dtype.itemsize < 4:
            return bool(values.max() < self._limit.size and (values.dtype.kind == "u" or values.min() >= 0))
        # A negative one, read without its sign, is larger than any limit.
        return bool(values.view(f"u{values.dtype.itemsize}").max() < self._limit.size)

    def _outside(self, s: int, at: Located, i: int, tokens: list[int]) -> SourceUnreadable:
        catalog, row = self._catalogs[s], int(at.row[i])
        place = next(place for place, token in enumerate(tokens) if not 0 <= token < self._limit.size)
        file = next(file for file in reversed(catalog.files) if file.first_row <= row)
        return SourceUnreadable(
            f"row {row - file.first_row} holds the token {tokens[place]} at place {int(at.start[i]) + place}, but "
            f"{self._limit.reason}; the dataset is of another vocabulary, or damaged",
            where_of(catalog.name, file.path),
            row=row - file.first_row,
        )
