"""The rows that a stream draws from, as units that are permuted: of a source, a selection or a flat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes

# --- The rows that a stream draws from, as units that are permuted: one protocol, and the space of one source.
#
# Units tile the rows; numbers of a space never leave the process: outside it, a row is named by its source and its row
# there. Cost: one table access for each row.
#
# A stream may have some rows of a source in two ways. A row that is not *kept* does not exist for the stream: it is
# never made, and no position counts it. A row that is not *used* (`documents` of a source that is a stream of its own)
# is drawn with no tokens, as a document that `overflow: drop` drops.
#
# A unit is a page, or in a flat a part of a page. A space that keeps only some rows gives the kept rows with their
# positions among all rows of their units. So a permutation of all rows can be evaluated at the kept rows alone, and
# removing one row moves no other.

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


# --- Some rows of a source: a selection, or what a hold-out leaves.
#
# A kept row has the same position as in the whole source, so adding or removing a row moves no other; pages without
# kept rows cost nothing beyond their number. Cost: two binary searches for each unit of a window, and work for the
# kept rows alone.
#
# A window takes as many more pages as the source has more rows than are kept, so that it holds about as many rows as a
# window of the whole source: one percent of a source is shuffled as well as all of it.


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
        # A row's position: its place in its unit, after all rows, kept or not, of the units before.
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
        """[n] kept rows before each row, in the type of `kept`, or each call would copy all of it."""
        found: Int64Array = self._kept.searchsorted(rows.astype(self._kept.dtype, copy=False))
        return found

    def _rows_of(self, units: Int64Array) -> tuple[Int64Array, Int64Array]:
        first_row = self._sizes.first_row_of_page
        return np.asarray(first_row[units], np.int64), np.asarray(first_row[units + 1], np.int64)


# --- Some rows of a space, numbered without gaps: the rest of an epoch after an edit.
#
# Rows that lie in one unit of the space lie in one unit here, and units without rows are gone; so windows are as even
# as those of any space. Cost: 8 bytes a row and unit, in each process that plans, until the epoch ends.


class RestSpace:
    """Rows of another space; a unit is what is left of one of its units."""

    def __init__(self, base: Space, rows: Int64Array) -> None:
        """Take some rows of a space.

        Args:
            base: The space.
            rows: [K] of its rows, ascending, each once.
        """
        self._base, self._rows = base, rows
        units = base.units_of(rows)  # they ascend as the rows do, so a unit begins where the number changes
        self._first = (
            np.append(np.flatnonzero(np.diff(units, prepend=-1)), len(rows)) if len(rows) else np.zeros(2, int)
        )
        self.num_rows = self.num_kept = len(rows)
        self.num_units = len(self._first) - 1
        # As many units as hold the rows of a window of the space: rows of a window there, over rows of a unit here,
        # rounded up, in integers.
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


# --- Several spaces end to end, shuffled as if they were one: a flat.
#
# Every row of every child is a row of the flat, once; the size of a child is its only weight. Cost: a binary search
# over the children for each row, and the children's own cost.
#
# A child with fewer pages than the flat has windows is cut into units of at most 16 rows. Windows take one unit of
# each stratum of neighbouring units (keys.py), so a small child spreads evenly over the epoch; whole pages would
# land in a few windows as clumps. The pages of a small child are few, and stay decoded.
#
# Source: FlatMixture of Marin (marin-community/marin#4132): virtual concatenation, one permutation, a binary search on
# cumulative lengths. Children keep their own files and catalogs.

SMALL_UNIT_ROWS = 16
"""Most rows of a unit of a small child; part of the order's format."""


class FlatSpace:
    """Spaces end to end, in the order of their names; a flat may have flats as children."""

    def __init__(self, children: Sequence[Space], *, num_windows: int) -> None:
        """Join spaces end to end.

        Args:
            children: Sorted by name.
            num_windows: Windows of an epoch, see `windows_of_flat`; which children are small follows from it.
        """
        # A child with fewer units than windows cannot be in every window, so it is cut finer.
        self._children = tuple(_Cut(child) if child.num_units < num_windows else child for child in children)
        self._row_base = _bases([child.num_rows for child in self._children])
        self._unit_base = _bases([child.num_units for child in self._children])
        self.num_rows, self.num_units = int(self._row_base[-1]), int(self._unit_base[-1])
        self.num_kept = sum(child.num_kept for child in self._children)
        self.window_units = max(1, -(-self.num_units // num_windows))
        self.longest_tokens = max((child.longest_tokens for child in self._children), default=0)

    @property
    def num_tokens(self) -> int:
        """See `Space`."""
        return sum(child.num_tokens for child in self._children)

    def members(self, units: Int64Array) -> Members:
        """See `Space`."""
        found = [(c, self._children[c].members(inside)) for c, inside in self._by_child(units)]
        rows = [each.rows + self._row_base[c] for c, each in found]
        total = sum(each.num_rows for _, each in found)
        joined = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        if all(each.positions is None for _, each in found):
            return Members(joined, None, total)
        # Where one child keeps only some of its rows, the rows of the others need positions too: each as it lies.
        before = _bases([each.num_rows for _, each in found])
        positions = [
            (np.arange(each.num_rows) if each.positions is None else each.positions) + before[i]
            for i, (_, each) in enumerate(found)
        ]
        return Members(joined, np.concatenate(positions), total)

    def units_of(self, rows: Int64Array) -> Int64Array:
        """See `Space`."""
        units = np.empty(len(rows), np.int64)
        for c, at in self._rows_by_child(rows):
            units[at] = self._children[c].units_of(rows[at] - self._row_base[c]) + self._unit_base[c]
        return units

    def tokens(self, rows: Int64Array) -> NDArray[np.int32]:
        """See `Space`."""
        tokens = np.empty(len(rows), np.int32)
        for c, at in self._rows_by_child(rows):
            tokens[at] = self._children[c].tokens(rows[at] - self._row_base[c])
        return tokens

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Space`."""
        source, row = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        for c, at in self._rows_by_child(rows):
            source[at], row[at] = self._children[c].places(rows[at] - self._row_base[c])
        return source, row

    def pages(self, units: Int64Array) -> list[tuple[int, Int64Array]]:
        """See `Space`."""
        return _by_source(part for c, inside in self._by_child(units) for part in self._children[c].pages(inside))

    def pages_of(self, rows: Int64Array) -> list[tuple[int, Int64Array]]:
        """See `Space`."""
        return _by_source(
            part
            for c, at in self._rows_by_child(rows)
            for part in self._children[c].pages_of(rows[at] - self._row_base[c])
        )

    def keeps(self, rows: Int64Array) -> NDArray[np.bool_]:
        """See `Space`."""
        kept = np.empty(len(rows), np.bool_)
        for c, at in self._rows_by_child(rows):
            kept[at] = self._children[c].keeps(rows[at] - self._row_base[c])
        return kept

    def holds(self, source: int, rows: Int64Array) -> NDArray[np.bool_]:
        """See `Space`."""
        held = np.zeros(len(rows), np.bool_)
        for child in self._children:
            held |= child.holds(source, rows)
        return held

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """See `Space`."""
        for child in self._children:
            yield from child.lengths()

    def used_rows(self) -> tuple[int, int]:
        """See `Space`."""
        return 0, self.num_rows

    def used_units(self) -> tuple[int, int]:
        """See `Space`."""
        return 0, self.num_units

    def _by_child(self, units: Int64Array) -> Iterator[tuple[int, Int64Array]]:
        """Children that ascending units lie in, with the units as the child counts them."""
        borders = np.searchsorted(units, self._unit_base)
        for c in np.flatnonzero(np.diff(borders)).tolist():
            yield c, units[borders[c] : borders[c + 1]] - self._unit_base[c]

    def _rows_by_child(self, rows: Int64Array) -> Iterator[tuple[int, Int64Array]]:
        """Children that rows lie in, with the places of these rows in the array."""
        # "right": a child without rows begins where the next one does, and no row is its own. A stable sort leaves
        # ascending rows ascending within a child, as `units_of` needs them.
        child = self._row_base.searchsorted(rows, side="right") - 1
        order = np.argsort(child, kind="stable")
        borders = np.searchsorted(child[order], np.arange(len(self._children) + 1))
        for c in np.flatnonzero(np.diff(borders)).tolist():
            yield c, order[borders[c] : borders[c + 1]]


class _Cut:
    """A small space cut into units of at most 16 rows; a unit may lie in two pages."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self.num_rows, self.num_kept = space.num_rows, space.num_kept
        self.num_units = max(1, -(-space.num_rows // SMALL_UNIT_ROWS))
        self.window_units = self.num_units
        self.longest_tokens = space.longest_tokens

    @property
    def num_tokens(self) -> int:
        return self._space.num_tokens

    def members(self, units: Int64Array) -> Members:
        starts = units * SMALL_UNIT_ROWS
        counts = np.minimum(self.num_rows - starts, SMALL_UNIT_ROWS)
        rows = ranges(starts, counts)
        if self.num_kept == self.num_rows:
            return Members(rows, None, len(rows))
        is_kept = self._space.keeps(rows)
        return Members(rows[is_kept], np.flatnonzero(is_kept), len(rows))

    def units_of(self, rows: Int64Array) -> Int64Array:
        return rows // SMALL_UNIT_ROWS

    def tokens(self, rows: Int64Array) -> NDArray[np.int32]:
        return self._space.tokens(rows)

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        return self._space.places(rows)

    def pages_of(self, rows: Int64Array) -> list[tuple[int, Int64Array]]:
        return self._space.pages_of(rows)

    def keeps(self, rows: Int64Array) -> NDArray[np.bool_]:
        return self._space.keeps(rows)

    def holds(self, source: int, rows: Int64Array) -> NDArray[np.bool_]:
        return self._space.holds(source, rows)

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        return self._space.lengths()

    def used_rows(self) -> tuple[int, int]:
        return 0, self.num_rows

    def used_units(self) -> tuple[int, int]:
        return 0, self.num_units

    def pages(self, units: Int64Array) -> list[tuple[int, Int64Array]]:
        """All pages of the space, whatever the units: a space this small stays decoded."""
        return self._space.pages(np.arange(self._space.num_units, dtype=np.int64)) if len(units) else []


def windows_of_flat(children: Sequence[Space], window_pages: int) -> int:
    """Windows of an epoch of a flat, 1 or more, before small children are cut.

    Args:
        children: The spaces.
        window_pages: As `catalog.sizes.window_pages_of` gives it for the pages and tokens of all children together.
    """
    return max(1, -(-sum(map(drawn_units, children)) // window_pages))


def drawn_units(space: Space) -> int:
    """Units that the rows that can be drawn would fill, if they lay together."""
    return -(-space.num_units * space.num_kept // max(1, space.num_rows))


def _by_source(parts: Iterable[tuple[int, Int64Array]]) -> list[tuple[int, Int64Array]]:
    """Pages of parts, joined by source."""
    by_source: dict[int, list[Int64Array]] = {}
    for source, pages in parts:
        by_source.setdefault(source, []).append(pages)
    return [
        (source, pages[0] if len(pages) == 1 else np.unique(np.concatenate(pages)))
        for source, pages in sorted(by_source.items())
    ]


def _bases(counts: Sequence[int]) -> Int64Array:
    bases = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.asarray(counts, np.int64), out=bases[1:])
    return bases
