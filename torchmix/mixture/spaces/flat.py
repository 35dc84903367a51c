"""Several spaces end to end, shuffled as if they were one: a flat.

In: the children's spaces. Out: a `Space` over all their rows. Must hold: every row of every child is a row of the flat,
once; the size of a child is its only weight. Cost: a binary search over the children for each row, and the children's
own cost.

A child with fewer pages than the flat has windows is cut into units of at most 16 rows. Windows take one unit of each
stratum of neighbouring units (strata.py), so a small child spreads evenly over the epoch; whole pages would land in a
few windows as clumps. The pages of a small child are few, and stay decoded.

Source: FlatMixture of Marin (marin-community/marin#4132): virtual concatenation, one permutation, a binary search on
cumulative lengths. Children keep their own files and catalogs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.mixture.spaces.space import Members, Space, ranges

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
