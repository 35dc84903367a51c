"""The rows that one call must encode, and what the pages hold of them.

In: pieces of one call whose rows are encoded; pages as they are at hand. Out: each row once, with its content. Must
hold: nothing of a page is kept beside the content of these rows, so a page may be dropped once it was seen. Cost: a few
array operations a call, and a copy of the content of each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.reader.decoded_page import DecodedPage
from torchmix.reader.pieces.locate import Located

Content = bytes | NDArray[np.integer[Any]]
"""A row as the file holds it: bytes of a text, or ids."""


class CallRows:
    """R rows by source, row and epoch, ascending; the pieces that need them, and the pages that hold them."""

    def __init__(self, at: Located, pieces: Int64Array, epochs: Int64Array) -> None:
        """Nothing is at hand yet.

        Args:
            at: All pieces of the call.
            pieces: [m] numbers of those to encode, ascending.
            epochs: [m] pass over their source, or 0 where it does not matter.
        """
        self.pieces = pieces
        """[m] pieces of the call, ascending."""
        source, row = at.source[pieces].astype(np.int64), at.row[pieces]
        order = np.lexsort((epochs, row, source))
        is_new = np.ones(len(order), np.bool_)
        if len(order):
            columns = source[order], row[order], epochs[order]
            is_new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
        self.row_of_piece = np.empty(len(order), np.int64)
        """[m] which of the R rows each piece is of."""
        self.row_of_piece[order] = np.cumsum(is_new) - 1
        first = order[is_new]
        self.source, self.row, self.epoch = source[first], row[first], epochs[first]
        """[R] each."""
        self._row_in_page = at.row_in_page[pieces[first]].tolist()
        page = at.first_piece.searchsorted(pieces[first], side="right") - 1
        self.needs_page = np.zeros(len(at.first_piece), np.bool_)
        """[Q] which pages of the call hold one of the rows."""
        self.needs_page[page] = True
        self._first_row = page.searchsorted(np.arange(len(at.first_piece) + 1)).tolist()
        self.content: list[Content] = [b""] * len(first)
        """[R] each row as its page holds it, once the page was seen."""
        self.is_blank = np.zeros(len(first), np.bool_)
        """[R] rows of pages that could not be read."""

    def __len__(self) -> int:
        return len(self.content)

    def gather(self, q: int, page: DecodedPage, *, is_text: bool) -> None:
        """Take the content of the rows in the q-th page of the call: bytes of texts, or else ids."""
        first, stop = self._first_row[q : q + 2]
        if page.is_blank:
            self.is_blank[first:stop] = True
            return
        offsets = page.offsets
        spans = [(offsets[row], offsets[row + 1]) for row in self._row_in_page[first:stop]]
        if is_text:
            cells = page.values.data
            self.content[first:stop] = [bytes(cells[begin:end]) for begin, end in spans]
        else:
            self.content[first:stop] = [page.values[begin:end].copy() for begin, end in spans]
