"""Pieces of pages that must be decoded -> what is copied from each, once it is.

In: pieces by page. Out: for a decoded page, where its pieces begin in it. Must hold: pieces keep their order. Cost:
Python's lists of all pieces are made once, and cut.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchmix.reader.decoded_page import DecodedPage
from torchmix.reader.locate import Located
from torchmix.reader.piece_copy import Run


class PageRuns:
    """Pieces of pages that must be decoded."""

    def __init__(self, at: Located, chosen: NDArray[np.bool_]) -> None:
        """`chosen`: [Q] which of the pages."""
        first = at.first_piece[chosen]
        self._first = first.tolist()
        self._stop = np.append(at.first_piece, len(at.order))[1:][chosen].tolist()
        self._rows: list[int] = at.row_in_page.tolist() if len(first) else []
        self._starts: list[int] = at.start.tolist() if len(first) else []
        self.source = at.source[first]
        """Of each page."""
        self.page = at.page[first]
        """Of each page, its number in its source."""

    def run(self, k: int, page: DecodedPage) -> Run:
        """The pieces of the k-th page."""
        first, stop, offsets = self._first[k], self._stop[k], page.offsets
        rows, starts = self._rows[first:stop], self._starts[first:stop]
        return page.values, first, [offsets[row] + start for row, start in zip(rows, starts, strict=True)]
