"""`shuffle: row` and `shuffle: none`: a window is a stretch of an epoch's rows, permuted or as they lie in the files.

In: a space. Out: see window_rows.py. Must hold: as there. Cost of a window: with `row` 35 ns a row, with
`none` nothing; with a space that keeps one row in k, k times that; finding pages takes a binary search a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.permutation import permute, unpermute
from torchmix.mixture.spaces.space import Space
from torchmix.mixture.window_rows import SPARSE, Key

WINDOW_ROWS = 1 << 14
"""Rows of a window; part of the order's format, since a state counts windows."""
MOST_POSITIONS = 1 << 20
"""Most positions of a window of a space that keeps few of its rows."""


class _Stretches(ABC):
    """Windows of equally many rows. Where only some rows are kept, of about as many kept ones."""

    def __init__(self, space: Space, key: Key) -> None:
        self._space = space
        self._key = key
        positions = -(-WINDOW_ROWS * space.num_rows // max(1, space.num_kept))
        self._window_rows = max(WINDOW_ROWS, min(positions, MOST_POSITIONS))
        self.num_windows = max(1, -(-space.num_rows // self._window_rows))

    @abstractmethod
    def _all_rows(self, epoch: int, window: int) -> Int64Array:
        """Rows of a window, kept or not."""

    def rows(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        rows = self._all_rows(epoch, window)
        if self._space.num_kept < self._space.num_rows:
            return rows[self._space.keeps(rows)]
        return rows

    def num_rows(self, epoch: int, window: int) -> int:
        """See `WindowRows`."""
        if self._space.num_kept < self._space.num_rows:
            return len(self.rows(epoch, window))
        return len(self._positions(window))

    def pages(self, epoch: int, window: int) -> list[tuple[int, Int64Array]]:
        """See `WindowRows`."""
        return self._space.pages_of(self.rows(epoch, window))

    def _positions(self, window: int) -> Int64Array:
        start = window * self._window_rows
        return np.arange(start, min(start + self._window_rows, self._space.num_rows), dtype=np.int64)


class RowWindows(_Stretches):
    """Windows of an epoch that permutes all rows."""

    def __init__(self, space: Space, key: Key) -> None:
        super().__init__(space, key)
        start, stop = space.used_rows()
        self.is_sparse = stop - start <= self.num_windows  # a few used rows spread over all windows

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        used = np.arange(*self._space.used_rows())
        places = unpermute(used, self._space.num_rows, self._key("row", epoch))
        return np.unique(places // self._window_rows)

    def _all_rows(self, epoch: int, window: int) -> Int64Array:
        return permute(self._positions(window), self._space.num_rows, self._key("row", epoch))


class FileWindows(_Stretches):
    """Windows of rows as they lie in the files."""

    def __init__(self, space: Space, key: Key) -> None:
        super().__init__(space, key)
        start, stop = space.used_rows()
        self.is_sparse = stop - start <= space.num_rows // SPARSE

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        start, stop = self._space.used_rows()
        return np.arange(start // self._window_rows, -(-stop // self._window_rows), dtype=np.int64)

    def _all_rows(self, epoch: int, window: int) -> Int64Array:
        return self._positions(window)
