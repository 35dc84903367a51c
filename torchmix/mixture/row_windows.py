"""`shuffle: row` and `shuffle: none`: a window is a stretch of an epoch's rows, permuted or as they lie in the files.

In: the number of rows. Out: see window_rows.py. Must hold: as there. Cost of a window: with `row` 35 ns a row, with
`none` nothing; finding pages takes a binary search a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.permutation import permute, unpermute
from torchmix.mixture.window_rows import SPARSE, Key

WINDOW_ROWS = 1 << 14
"""Rows of a window; part of the order's format, since a state counts windows."""


class _Stretches(ABC):
    """Windows of equally many rows."""

    def __init__(self, sizes: SourceSizes, key: Key, used_rows: tuple[int, int]) -> None:
        """`used_rows`: as (start, stop)."""
        self._first_row = sizes.first_row_of_page
        self._total_rows = sizes.num_documents
        self._key = key
        self._used_rows = used_rows
        self.num_windows = max(1, -(-self._total_rows // WINDOW_ROWS))

    @abstractmethod
    def rows(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""

    def num_rows(self, epoch: int, window: int) -> int:
        """See `WindowRows`."""
        return len(self._positions(window))

    def pages(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        rows, (start, stop) = self.rows(epoch, window), self._used_rows
        if (start, stop) != (0, self._total_rows):
            rows = rows[(rows >= start) & (rows < stop)]
        return np.unique(self._first_row.searchsorted(rows, side="right") - 1)

    def _positions(self, window: int) -> Int64Array:
        start = window * WINDOW_ROWS
        return np.arange(start, min(start + WINDOW_ROWS, self._total_rows), dtype=np.int64)


class RowWindows(_Stretches):
    """Windows of an epoch that permutes all rows."""

    def __init__(self, sizes: SourceSizes, key: Key, used_rows: tuple[int, int]) -> None:
        """See `_Stretches`."""
        super().__init__(sizes, key, used_rows)
        self.is_sparse = used_rows[1] - used_rows[0] <= self.num_windows  # a few used rows spread over all windows

    def rows(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        return permute(self._positions(window), self._total_rows, self._key("row", epoch))

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        places = unpermute(np.arange(*self._used_rows), self._total_rows, self._key("row", epoch))
        return np.unique(places // WINDOW_ROWS)


class FileWindows(_Stretches):
    """Windows of rows as they lie in the files."""

    def __init__(self, sizes: SourceSizes, key: Key, used_rows: tuple[int, int]) -> None:
        """See `_Stretches`."""
        super().__init__(sizes, key, used_rows)
        self.is_sparse = used_rows[1] - used_rows[0] <= self._total_rows // SPARSE

    def rows(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        return self._positions(window)

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        start, stop = self._used_rows
        return np.arange(start // WINDOW_ROWS, -(-stop // WINDOW_ROWS), dtype=np.int64)
