"""Pieces of pages -> their places in one array.

In: pieces, sorted by page, and pages as they come. Out: every token at its place, and the token that follows each
piece in its document. Must hold: nothing between the places is promised. Cost, beside the memory that is moved: half a
microsecond a piece. Tokens are copied as they are, and only where pages differ in type those that were copied are
widened, all at once: to widen piece by piece is dearer, and numpy gives the interpreter's lock away for each copy that
converts, and would wait for it as often while other threads run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.sources.source import Int64Array
from torchmix.sources.source_pages import DecodedPage


class Scratch:
    """Memory that is used again by each call."""

    def __init__(self) -> None:
        self._arrays: dict[np.dtype[Any], NDArray[Any]] = {}

    def array(self, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
        """[length] of a dtype, with any content."""
        held = self._arrays.get(dtype)
        if held is None or len(held) < length:
            held = self._arrays[dtype] = np.empty(length, dtype)
        return held[:length]


class PieceCopy:
    """Where the pieces of one call come from and go to."""

    __slots__ = (
        "_cells",
        "_first_piece",
        "_goes_on",
        "_is_begun",
        "_places",
        "_rows",
        "_scratch",
        "_sizes",
        "_starts",
        "out",
        "successors",
    )

    def __init__(
        self,
        *,
        first_piece: list[int],
        rows: Int64Array,
        starts: Int64Array,
        sizes: Int64Array,
        places: Int64Array,
        goes_on: NDArray[np.bool_],
        num_places: int,
        scratch: Scratch,
    ) -> None:
        """Nothing is copied yet.

        Args:
            first_piece: [pages + 1] the first piece of each page; pieces are sorted by page.
            rows: [n] row of each piece in its page.
            starts: [n] first token in its document.
            sizes: [n] tokens.
            places: [n] where the first token belongs.
            goes_on: [n] whether the document has more tokens.
            num_places: Length of the result.
            scratch: Holds the result.
        """
        self._first_piece = first_piece
        self._rows = rows.tolist()
        self._starts = starts.tolist()
        self._sizes = sizes.tolist()
        self._places = places.tolist()
        self._goes_on = goes_on.tolist()
        self._scratch = scratch
        self.successors = [0] * len(rows)
        self.out: NDArray[np.integer[Any]] = scratch.array(np.dtype(np.int32), num_places)
        """[num_places] of the narrowest type that holds what was copied."""
        self._cells = self.out.data
        self._is_begun = False

    def copy_all(self, pages: Mapping[int, DecodedPage]) -> int:
        """Copy the pieces of pages, by their number; returns bytes copied."""
        # The narrow ones first, so that they are widened together, if at all.
        order = sorted(pages, key=lambda k: (pages[k].values.itemsize, pages[k].values.dtype.str))
        return sum(self.copy(k, pages[k]) for k in order)

    def copy(self, k: int, page: DecodedPage) -> int:
        """Copy the pieces of the k-th page; returns bytes copied."""
        dtype = page.values.dtype
        if not self._is_begun or not np.can_cast(dtype, self.out.dtype):
            self._make_room(dtype)
        # memoryviews of one dtype, or else numpy arrays, which convert
        same = dtype == self.out.dtype
        cells: Any = page.cells if same else page.values
        target: Any = self._cells if same else self.out
        rows, starts, sizes, places, offsets = self._rows, self._starts, self._sizes, self._places, page.offsets
        num_values = 0
        for i in range(self._first_piece[k], self._first_piece[k + 1]):
            begin, size, place = offsets[rows[i]] + starts[i], sizes[i], places[i]
            target[place : place + size] = cells[begin : begin + size]
            if self._goes_on[i]:
                self.successors[i] = int(cells[begin + size])
            num_values += size
        return num_values * page.values.itemsize

    def _make_room(self, dtype: np.dtype[np.integer[Any]]) -> None:
        """Let the result hold ids of a dtype, too, and keep what it has."""
        before = self.out
        if self._is_begun:
            dtype = np.promote_types(before.dtype, dtype)
        self.out = self._scratch.array(dtype, len(before))
        self._cells = self.out.data
        if self._is_begun:
            self.out[:] = before
        self._is_begun = True
