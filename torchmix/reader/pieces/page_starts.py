"""Where the pages of all sources begin, in one sorted table: one binary search finds the pages of rows of many sources.

In: the sources' page tables. Out: for rows of any sources, their pages. Must hold: what each source's own table says.
Cost: 8 bytes a page for at most MOST_PAGES pages, and as much again where places in files are needed. The largest
sources, beyond that bound, are searched one by one. With hundreds of sources a step needs a handful of rows from each,
and a search for each source would cost more than all the copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.page_table import PageTable

ROW_BITS = 40
"""Rows of a source fit these."""
MOST_PAGES = 1 << 20


def row_keys(source: NDArray[np.integer[Any]], rows: Int64Array) -> Int64Array:
    """[n] one number for source and row, in their order."""
    keys: Int64Array = source.astype(np.int64) << ROW_BITS | rows
    return keys


class PageStarts:
    """Finds pages in all sources at once."""

    def __init__(self, tables: Sequence[PageTable]) -> None:
        """`tables`: the page tables of all sources."""
        self._tables = tables
        sizes = np.array([table.num_pages for table in tables], np.int64)
        by_size = np.argsort(sizes, kind="stable")
        is_joined = np.zeros(len(tables), np.bool_)
        is_joined[by_size[np.cumsum(sizes[by_size]) <= MOST_PAGES]] = True
        self._joined: list[int] = np.flatnonzero(is_joined).tolist()
        self._is_alone: list[bool] = (~is_joined).tolist()
        joined_sizes = np.where(is_joined, sizes, 0)
        self._first_page = np.cumsum(joined_sizes) - joined_sizes
        """[S] the first page of each source in the joined tables."""
        self._keys: Int64Array | None = None
        self._offsets: Int64Array | None = None

    def find(
        self, keys: Int64Array, source: NDArray[np.integer[Any]], ranges: Sequence[tuple[int, int, int]]
    ) -> tuple[Int64Array, Int64Array]:
        """Page of each row in its source, and the page's first row.

        Args:
            keys: [n] from `row_keys`, ascending; the rows exist.
            source: [n] index of the source of each row.
            ranges: (source, start, stop): the half-open part of `keys` and `source` that each requested source has.
        """
        if self._keys is None:
            starts = [np.asarray(self._tables[s].first_row[:-1], np.int64) | s << ROW_BITS for s in self._joined]
            self._keys = np.concatenate([np.zeros(0, np.int64), *starts])
        at = self._keys.searchsorted(keys, side="right")
        at -= 1
        page = at - self._first_page[source]
        first_row = self._keys.take(at, mode="clip") if len(self._keys) else np.empty(len(at), np.int64)
        first_row &= (1 << ROW_BITS) - 1
        for s, start, stop in ranges:
            if self._is_alone[s]:
                rows = keys[start:stop] & (1 << ROW_BITS) - 1
                page[start:stop], first_row[start:stop] = self._tables[s].first_row.find(rows)
        return page, first_row

    def offsets(
        self, page: Int64Array, source: NDArray[np.integer[Any]], ranges: Sequence[tuple[int, int, int]]
    ) -> Int64Array:
        """First byte of each page in its file, [n]; `source` and `ranges` as in `find`, of pages."""
        if self._offsets is None:
            tables = [self._tables[s] for s in self._joined]
            parts = [table.offset_of_pages(np.arange(table.num_pages)) for table in tables]
            self._offsets = np.concatenate([np.zeros(0, np.int64), *parts])
        at = page + self._first_page[source]
        offsets = self._offsets.take(at, mode="clip") if len(self._offsets) else np.empty(len(at), np.int64)
        for s, start, stop in ranges:
            if self._is_alone[s]:
                offsets[start:stop] = self._tables[s].offset_of_pages(page[start:stop])
        return offsets
