"""The rows that a stream draws from, as units that are permuted: one protocol, and the space of one source.

In: the sizes of a source. Out: rows and units of a *space*, numbered from 0, their lengths, and in which source and
page each lies. Must hold: units tile the rows; numbers of a space never leave the process: outside it, a row is named
by its source and its row there. Cost: one table access for each row.

A unit is a page, or in a flat a part of a page (flat.py). A space that keeps only some rows gives the kept rows with
their positions among all rows of their units. So a permutation of all rows can be evaluated at the kept rows alone, and
removing one row moves no other (view.py).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes


class Members(NamedTuple):
    """The rows of some units that can be drawn."""

    rows: Int64Array
    """[k], unit after unit, ascending in each."""
    positions: Int64Array | None
    """[k] place of each among all rows of the units; None if all rows can be drawn."""
    num_rows: int
    """All rows of the units."""


class Space(Protocol):
    """Units of rows. All numbers count from 0 within the space."""

    @property
    def num_rows(self) -> int:
        """Rows, kept or not."""

    @property
    def num_kept(self) -> int:
        """Rows that can be drawn."""

    @property
    def num_units(self) -> int:
        """Units, 1 or more."""

    @property
    def window_units(self) -> int:
        """Units of a shuffle window, 1 or more."""

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest document, or more."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows that can be drawn."""

    def members(self, units: Int64Array) -> Members:
        """The rows of ascending units."""

    def tokens(self, rows: Int64Array) -> NDArray[np.int32]:
        """[n] tokens of rows."""

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """[n] source of each row, and the row there."""

    def pages(self, units: Int64Array) -> list[tuple[int, Int64Array]]:
        """The pages that the drawable rows of ascending units lie in: by source, ascending, each page once."""


class SourceSpace:
    """All rows of one source; a unit is a page."""

    def __init__(self, source: int, sizes: SourceSizes) -> None:
        """`source`: its number by sorted name."""
        self._source, self.sizes = source, sizes
        self.num_rows = self.num_kept = sizes.num_documents
        self.num_units = sizes.num_pages
        self.window_units = sizes.window_pages
        self.longest_tokens, self.num_tokens = sizes.longest_tokens, sizes.num_tokens

    def members(self, units: Int64Array) -> Members:
        """See `Space`."""
        starts = np.asarray(self.sizes.first_row_of_page[units], np.int64)
        counts = np.asarray(self.sizes.first_row_of_page[units + 1], np.int64) - starts
        rows = ranges(starts, counts)
        return Members(rows, None, len(rows))

    def tokens(self, rows: Int64Array) -> NDArray[np.int32]:
        """See `Space`."""
        return np.asarray(self.sizes.tokens[rows])

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Space`."""
        return np.full(len(rows), self._source, np.int64), rows

    def pages(self, units: Int64Array) -> list[tuple[int, Int64Array]]:
        """See `Space`."""
        return [(self._source, units)] if len(units) else []


def ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """The numbers of all ranges [start, start + count), one range after the other."""
    before = np.cumsum(counts) - counts
    numbers: Int64Array = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - before, counts)
    return numbers
