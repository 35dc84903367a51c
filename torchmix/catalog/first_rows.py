"""The first row of each page, stored as 4 bytes a page; only small tables become an array of int64.

In: rows counted from the first row of their chunk, and the first row of each chunk. Out: entries and `searchsorted`, as
`numpy` gives them for an array [P + 1] of first rows. Must hold: equal to that array in both. Cost: up to WHOLE_PAGES
pages that of the array, which is made when it is first needed. Beyond that, two binary searches, over chunks and over
the pages of a chunk: some ten calls of numpy, and one for each change of the chunk along the request. They need no
memory beyond the result, even for the pages of a trillion tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

WHOLE_PAGES = 1 << 16
"""Most pages for which the array is made: half a MiB. It serves jobs that need few rows from hundreds of sources."""
MOST_SLICES = 16
"""Up to this many chunks are searched one by one, however few the rows; more are searched together."""


class FirstRows:
    """Where pages begin, in rows of the source; entry P is the number of rows."""

    __slots__ = ("_chunk_page", "_chunk_page_stop", "_chunk_row", "_chunk_row_stop", "_page_row", "_whole")

    def __init__(
        self, *, chunk_page: NDArray[np.int64], chunk_row: NDArray[np.int64], page_row: NDArray[np.uint32]
    ) -> None:
        """Take arrays of a `PageTable`; see its fields."""
        self._chunk_page, self._chunk_page_stop = chunk_page, chunk_page[1:]
        self._chunk_row, self._chunk_row_stop = chunk_row, chunk_row[1:]
        self._page_row = page_row
        self._whole: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._page_row)

    @overload
    def __getitem__(self, pages: int | np.integer[Any]) -> np.int64: ...
    @overload
    def __getitem__(self, pages: slice | NDArray[np.integer[Any]]) -> NDArray[np.int64]: ...
    def __getitem__(
        self, pages: int | np.integer[Any] | slice | NDArray[np.integer[Any]]
    ) -> np.int64 | NDArray[np.int64]:
        whole = self._as_array()
        if whole is not None:
            entries: np.int64 | NDArray[np.int64] = whole[pages]
            return entries
        at = np.arange(len(self))[pages] if isinstance(pages, slice) else np.asarray(pages)
        return self._entries(np.where(at < 0, at + len(self), at))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def tolist(self) -> list[int]:
        """All entries."""
        return list(map(int, self[:]))

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page of each row, and the first row of that page; every row must lie in a page."""
        whole = self._as_array()
        if whole is not None:
            page = whole.searchsorted(rows, side="right")
            page -= 1
            return page, whole.take(page)
        chunk = self._chunk_row_stop.searchsorted(rows, side="right")
        before = self._chunk_row[chunk]
        page = self._stop_in_chunks(chunk, rows - before) - 1
        return page, before + self._page_row[page]

    def searchsorted(self, rows: Any, side: Literal["left", "right"] = "left") -> Any:
        """How many entries are below each row, or with `right` not above it; like `numpy.ndarray.searchsorted`."""
        whole = self._as_array()
        if whole is not None:
            return whole.searchsorted(rows, side=side)
        wanted = np.asarray(rows, np.int64) - (side == "left")  # whole numbers
        inside = np.clip(wanted.reshape(-1), 0, max(0, int(self._chunk_row[-1]) - 1))
        found = np.zeros(len(inside), np.int64)
        if len(self._chunk_row) > 1:
            chunk = self._chunk_row_stop.searchsorted(inside, side="right").clip(max=len(self._chunk_page) - 2)
            found = self._stop_in_chunks(chunk, inside - self._chunk_row[chunk])
        found[wanted.reshape(-1) < 0] = 0
        found[wanted.reshape(-1) >= self._chunk_row[-1]] = len(self)
        return found.reshape(wanted.shape)[()]

    def _as_array(self) -> NDArray[np.int64] | None:
        if self._whole is None and len(self) <= WHOLE_PAGES:
            self._whole = self._entries(np.arange(len(self)))
        return self._whole

    def _entries(self, pages: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        entries: NDArray[np.int64]
        entries = self._chunk_row[self._chunk_page_stop.searchsorted(pages, side="right")] + self._page_row[pages]
        return entries

    def _stop_in_chunks(self, chunk: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """One more than the last page of its chunk that begins at or before a row; rows count from its first."""
        narrow = rows.astype(np.uint32)  # the pages' dtype: numpy would otherwise convert all pages
        borders = np.flatnonzero(np.diff(chunk, prepend=-1))
        first, stop = self._chunk_page[chunk[borders]], self._chunk_page_stop[chunk[borders]]
        if len(borders) > MOST_SLICES + len(rows) // 8:
            lengths = np.diff(borders, append=len(rows))
            return self._stop_by_halves(np.repeat(first, lengths), np.repeat(stop, lengths), narrow)
        found = np.empty(len(rows), np.int64)
        spans = pairwise([*borders.tolist(), len(rows)])
        for (begin, end), page, page_stop in zip(spans, first.tolist(), stop.tolist(), strict=True):
            found[begin:end] = self._page_row[page:page_stop].searchsorted(narrow[begin:end], side="right")
            found[begin:end] += page
        return found

    def _stop_by_halves(
        self, start: NDArray[np.int64], stop: NDArray[np.int64], rows: NDArray[np.uint32]
    ) -> NDArray[np.int64]:
        """As `_stop_in_chunks`, for all rows at once, among pages `start` to `stop`, half-open."""
        while True:
            is_open = start < stop
            if not is_open.any():
                return start
            middle = (start + stop) >> 1
            is_behind = self._page_row[middle] <= rows
            start = np.where(is_open & is_behind, middle + 1, start)
            stop = np.where(is_open & ~is_behind, middle, stop)
