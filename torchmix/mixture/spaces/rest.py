"""Some rows of a space, numbered without gaps: the rest of an epoch after an edit.

In: a space, and rows of it. Out: a `Space` of these rows alone. Must hold: rows that lie in one unit of the space lie
in one unit here, and units without rows are gone; so windows are as even as those of any space. Cost: 8 bytes a row and
unit, in each process that plans, until the epoch ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.mixture.spaces.space import BLOCK_ROWS, Members, Space, ranges


class RestSpace:
    """Rows of another space; a unit is what is left of one of its units."""

    def __init__(self, base: Space, rows: Int64Array) -> None:
        """Take some rows of a space.

        Args:
            base: The space.
            rows: [K] of its rows, ascending, each once.
        """
        self._base, self._rows = base, rows
        units = base.units_of(rows)
        self._first = (
            np.append(np.flatnonzero(np.diff(units, prepend=-1)), len(rows)) if len(rows) else np.zeros(2, int)
        )
        self.num_rows = self.num_kept = len(rows)
        self.num_units = len(self._first) - 1
        # As many units as hold the rows of a window of the space.
        in_window = base.window_units * base.num_kept * self.num_units
        self.window_units = max(1, min(self.num_units, -(-in_window // max(1, base.num_units * len(rows)))))
        self.longest_tokens = base.longest_tokens

    def base_rows(self, rows: Int64Array) -> Int64Array:
        """[n] the numbers that rows have in the other space."""
        found: Int64Array = self._rows[rows]
        return found

    @property
    def num_tokens(self) -> int:
        """See `Space`."""
        return sum(int(block.sum(dtype=np.int64)) for block in self.lengths())

    def members(self, units: Int64Array) -> Members:
        """See `Space`."""
        rows = self._rows_in(units)
        return Members(rows, None, len(rows))

    def units_of(self, rows: Int64Array) -> Int64Array:
        """See `Space`."""
        return self._first.searchsorted(rows, side="right") - 1

    def tokens(self, rows: Int64Array) -> NDArray[np.int32]:
        """See `Space`."""
        return self._base.tokens(self._rows[rows])

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Space`."""
        return self._base.places(self._rows[rows])

    def pages(self, units: Int64Array) -> list[tuple[int, Int64Array]]:
        """See `Space`."""
        return self._base.pages_of(self._rows[self._rows_in(units)])

    def pages_of(self, rows: Int64Array) -> list[tuple[int, Int64Array]]:
        """See `Space`."""
        return self._base.pages_of(self._rows[rows])

    def keeps(self, rows: Int64Array) -> NDArray[np.bool_]:
        """See `Space`."""
        return np.ones(len(rows), np.bool_)

    def holds(self, source: int, rows: Int64Array) -> NDArray[np.bool_]:
        """See `Space`; whether the whole space holds them."""
        return self._base.holds(source, rows)

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """See `Space`."""
        for begin in range(0, self.num_rows, BLOCK_ROWS):
            yield self._base.tokens(self._rows[begin : begin + BLOCK_ROWS])

    def used_rows(self) -> tuple[int, int]:
        """See `Space`."""
        return 0, self.num_rows

    def used_units(self) -> tuple[int, int]:
        """See `Space`."""
        return 0, self.num_units

    def _rows_in(self, units: Int64Array) -> Int64Array:
        starts = self._first[units]
        return ranges(starts, self._first[units + 1] - starts)
