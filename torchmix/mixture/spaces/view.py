"""Some rows of a source: a selection, or what a hold-out leaves.

In: a source's sizes, and the rows that are kept. Out: a `Space` with the units and rows of the whole source, where only
the kept rows are drawn. Must hold: a kept row has the same position as in the whole source, so adding or removing a row
moves no other; pages without kept rows cost nothing beyond their number. Cost: two binary searches for each unit of a
window, and work for the kept rows alone.

A window takes as many more pages as the source has more rows than are kept, so that it holds about as many rows as a
window of the whole source: one percent of a source is shuffled as well as all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.spaces.space import BLOCK_ROWS, Members, pages_of_rows, ranges, units_of_each, units_of_rows


class RowRange:
    """The rows from one to another, as an ascending array that takes no memory."""

    dtype = np.dtype(np.int64)

    def __init__(self, start: int, stop: int) -> None:
        """Rows [start, stop)."""
        self._start, self._stop = start, max(start, stop)

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            return np.arange(first, last, step, dtype=np.int64) + self._start
        return index + self._start if not isinstance(index, int) or index >= 0 else index + self._stop

    def searchsorted(self, values: Any) -> Any:
        """As that of an array."""
        return np.clip(values - self._start, 0, len(self))


KeptRows = NDArray[np.integer] | RowRange
"""Rows in ascending order, each once."""


class ViewSpace:
    """The kept rows of one source; a unit is a page."""

    def __init__(self, source: int, sizes: SourceSizes, kept: KeptRows, *, window_units: int) -> None:
        """Take a view of a source.

        Args:
            source: Its number by sorted name.
            sizes: The sizes of all its rows.
            kept: [K] the rows that are kept, ascending, each once; may be mapped.
            window_units: See `window_units_of_view` of the catalog, which holds it.
        """
        self.source, self._sizes, self._kept = source, sizes, kept
        self.num_rows, self.num_kept = sizes.num_documents, len(kept)
        self.num_units, self.window_units = sizes.num_pages, window_units
        self.longest_tokens = sizes.longest_tokens

    @property
    def num_tokens(self) -> int:
        """See `Space`; reads the lengths of all kept rows."""
        return sum(int(block.sum(dtype=np.int64)) for block in self.lengths())

    def members(self, units: Int64Array) -> Members:
        """See `Space`."""
        starts, stops = self._rows_of(units)
        first = self._kept_before(starts)
        counts = self._kept_before(stops) - first
        rows = np.asarray(self._kept[ranges(first, counts)], np.int64)
        lengths = stops - starts
        before = np.cumsum(lengths) - lengths
        return Members(rows, rows + np.repeat(before - starts, counts), int(lengths.sum()))

    def units_of(self, rows: Int64Array) -> Int64Array:
        """See `Space`."""
        return units_of_each(self._sizes, rows)

    def tokens(self, rows: Int64Array) -> NDArray[np.int32]:
        """See `Space`."""
        return np.asarray(self._sizes.tokens[rows])

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Space`."""
        return np.full(len(rows), self.source, np.int64), rows

    def pages(self, units: Int64Array) -> list[tuple[int, Int64Array]]:
        """See `Space`."""
        starts, stops = self._rows_of(units)
        held = units[self._kept_before(stops) > self._kept_before(starts)]
        return [(self.source, held)] if len(held) else []

    def pages_of(self, rows: Int64Array) -> list[tuple[int, Int64Array]]:
        """See `Space`."""
        return [(self.source, pages_of_rows(self._sizes, rows))] if len(rows) else []

    def keeps(self, rows: Int64Array) -> NDArray[np.bool_]:
        """See `Space`."""
        at = np.minimum(self._kept_before(rows), max(0, len(self._kept) - 1))
        kept: NDArray[np.bool_] = self._kept[at] == rows if len(self._kept) else np.zeros(len(rows), np.bool_)
        return kept

    def holds(self, source: int, rows: Int64Array) -> NDArray[np.bool_]:
        """See `Space`."""
        return self.keeps(rows) & (source == self.source)

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """See `Space`."""
        for begin in range(0, len(self._kept), BLOCK_ROWS):
            yield self._sizes.tokens[self._kept[begin : begin + BLOCK_ROWS]]

    def used_rows(self) -> tuple[int, int]:
        """See `Space`."""
        return (int(self._kept[0]), int(self._kept[-1]) + 1) if len(self._kept) else (0, 0)

    def used_units(self) -> tuple[int, int]:
        """See `Space`."""
        return units_of_rows(self._sizes, *self.used_rows())

    def _kept_before(self, rows: Int64Array) -> Int64Array:
        """[n] kept rows before each row. Of one type with `kept`, or each call would copy all of it."""
        found: Int64Array = self._kept.searchsorted(rows.astype(self._kept.dtype, copy=False))
        return found

    def _rows_of(self, units: Int64Array) -> tuple[Int64Array, Int64Array]:
        first_row = self._sizes.first_row_of_page
        return np.asarray(first_row[units], np.int64), np.asarray(first_row[units + 1], np.int64)
