"""The rows that a stream draws from, as units that are permuted: one protocol, and the space of one source.

In: the sizes of a source. Out: rows and units of a *space*, numbered from 0, their lengths, and in which source and
page each lies. Must hold: units tile the rows; numbers of a space never leave the process: outside it, a row is named
by its source and its row there. Cost: one table access for each row.

Two ways lead to a part of the rows. A row that is not *kept* does not exist for the stream: it is never made, and no
position counts it. A row that is not *used* (`documents` of a source that is a stream of its own) is drawn with no
tokens, as a document that `overflow: drop` drops.

A unit is a page, or in a flat a part of a page (flat.py). A space that keeps only some rows gives the kept rows with
their positions among all rows of their units. So a permutation of all rows can be evaluated at the kept rows alone, and
removing one row moves no other (view.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes

BLOCK_ROWS = 1 << 20
"""Rows whose lengths are looked at together."""


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

    def units_of(self, rows: Int64Array) -> Int64Array:
        """[n] the unit of each of ascending rows."""

    def tokens(self, rows: Int64Array) -> NDArray[np.int32]:
        """[n] tokens of rows."""

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """[n] source of each row, and the row there."""

    def pages(self, units: Int64Array) -> list[tuple[int, Int64Array]]:
        """The pages that the drawable rows of ascending units lie in: by source, ascending, each page once."""

    def pages_of(self, rows: Int64Array) -> list[tuple[int, Int64Array]]:
        """The pages that rows lie in, without those of rows that are not used: by source, ascending, each once."""

    def keeps(self, rows: Int64Array) -> NDArray[np.bool_]:
        """[n] whether rows of the space can be drawn."""

    def holds(self, source: int, rows: Int64Array) -> NDArray[np.bool_]:
        """[n] whether rows of a source can be drawn from this space, and are used."""

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """Tokens of all rows that can be drawn and are used, some rows at a time."""

    def used_rows(self) -> tuple[int, int]:
        """The rows of the space, as (start, stop), outside of which none is used."""

    def used_units(self) -> tuple[int, int]:
        """The units, as (start, stop), outside of which none has a used row."""


class SourceSpace:
    """All rows of one source; a unit is a page."""

    def __init__(self, source: int, sizes: SourceSizes, *, rows: tuple[int, int] | None = None) -> None:
        """Take a source.

        Args:
            source: Its number by sorted name.
            sizes: Its sizes.
            rows: The rows that are used, as (start, stop); others are drawn with no tokens. None: all are used.
        """
        self.source = source
        self.sizes = sizes
        self.num_rows = self.num_kept = sizes.num_documents
        self.num_units = sizes.num_pages
        self.window_units = sizes.window_pages
        self.longest_tokens = sizes.longest_tokens
        self._used = rows if rows != (0, self.num_rows) else None

    @property
    def num_tokens(self) -> int:
        """See `Space`; with `rows` their lengths are read."""
        if self._used is None:
            return self.sizes.num_tokens
        return int(self.sizes.tokens[slice(*self._used)].sum(dtype=np.int64))

    def members(self, units: Int64Array) -> Members:
        """See `Space`."""
        starts = np.asarray(self.sizes.first_row_of_page[units], np.int64)
        counts = np.asarray(self.sizes.first_row_of_page[units + 1], np.int64) - starts
        rows = ranges(starts, counts)
        return Members(rows, None, len(rows))

    def units_of(self, rows: Int64Array) -> Int64Array:
        """See `Space`."""
        return units_of_each(self.sizes, rows)

    def tokens(self, rows: Int64Array) -> NDArray[np.int32]:
        """See `Space`; lengths of rows that are not used are not read."""
        if self._used is None:
            return np.asarray(self.sizes.tokens[rows])
        used = self.holds(self.source, rows)
        tokens = np.zeros(len(rows), np.int32)
        tokens[used] = self.sizes.tokens[rows[used]]
        return tokens

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Space`."""
        return np.full(len(rows), self.source, np.int64), rows

    def pages(self, units: Int64Array) -> list[tuple[int, Int64Array]]:
        """See `Space`."""
        if self._used is not None:
            start, stop = self.used_units()
            units = units[(units >= start) & (units < stop)]
        return [(self.source, units)] if len(units) else []

    def pages_of(self, rows: Int64Array) -> list[tuple[int, Int64Array]]:
        """See `Space`."""
        rows = rows[self.holds(self.source, rows)]
        return [(self.source, pages_of_rows(self.sizes, rows))] if len(rows) else []

    def keeps(self, rows: Int64Array) -> NDArray[np.bool_]:
        """See `Space`."""
        return np.ones(len(rows), np.bool_)

    def holds(self, source: int, rows: Int64Array) -> NDArray[np.bool_]:
        """See `Space`."""
        start, stop = self.used_rows()
        held: NDArray[np.bool_] = (rows >= start) & (rows < stop) & (source == self.source)
        return held

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """See `Space`."""
        yield from blocks_of(self.sizes, *self.used_rows())

    def used_rows(self) -> tuple[int, int]:
        """See `Space`."""
        return (0, self.num_rows) if self._used is None else self._used

    def used_units(self) -> tuple[int, int]:
        """See `Space`."""
        return (0, self.num_units) if self._used is None else units_of_rows(self.sizes, *self._used)


def units_of_each(sizes: SourceSizes, rows: Int64Array) -> Int64Array:
    """[n] the page of each row of a source."""
    pages: Int64Array = sizes.first_row_of_page.searchsorted(rows, side="right") - 1
    return pages


def pages_of_rows(sizes: SourceSizes, rows: Int64Array) -> Int64Array:
    """The pages of rows of a source, ascending, each once."""
    return np.unique(units_of_each(sizes, rows))


def units_of_rows(sizes: SourceSizes, start: int, stop: int) -> tuple[int, int]:
    """The pages, as (start, stop), that rows [start, stop) of a source lie in."""
    first = int(sizes.first_row_of_page.searchsorted(start, side="right")) - 1  # pages without rows lie before it
    return first, max(first, int(sizes.first_row_of_page.searchsorted(stop, side="left")))


def blocks_of(sizes: SourceSizes, start: int, stop: int) -> Iterator[NDArray[np.int32]]:
    """The lengths of rows [start, stop) of a source, `BLOCK_ROWS` at a time."""
    for begin in range(start, stop, BLOCK_ROWS):
        yield sizes.tokens[begin : min(begin + BLOCK_ROWS, stop)]


def ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """The numbers of all ranges [start, start + count), one range after the other."""
    before = np.cumsum(counts) - counts
    numbers: Int64Array = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - before, counts)
    return numbers
