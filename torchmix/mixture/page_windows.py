"""`shuffle: page`: a window is pages from all over the source, with their rows permuted.

In: the page table's row counts. Out: see window_rows.py. Must hold: as there; sizes of windows differ by at most a page
(strata.py). Cost of a window: one sort of its rows, about 0.1 ms per 15,000 rows.
"""

from __future__ import annotations

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.keys import keyed_order
from torchmix.mixture.permutation import permute, unpermute
from torchmix.mixture.strata import pages_at, places_of
from torchmix.mixture.window_rows import SPARSE, Key

KEPT_WINDOWS = 3
"""Windows whose pages are remembered: the previous, the current and the next one."""
PERMUTED_WINDOWS = 1 << 10
"""An epoch of at most this many windows is permuted in one call: one window costs as much as hundreds."""


class PageWindows:
    """Windows of permuted pages."""

    def __init__(self, sizes: SourceSizes, key: Key, used_rows: tuple[int, int]) -> None:
        """`used_rows`: as (start, stop)."""
        self._first_row = sizes.first_row_of_page
        self._num_pages = len(self._first_row) - 1
        self._key = key
        self.num_windows = max(1, -(-self._num_pages // sizes.window_pages))
        self._used_pages = self._pages_of(used_rows, sizes.num_documents)
        start, stop = self._used_pages
        self.is_sparse = stop - start <= self._num_pages // SPARSE
        self._last_pages: dict[tuple[int, int], Int64Array] = {}
        self._last_places: tuple[int, list[int]] | None = None

    def rows(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        key = self._key("rows", epoch, window)
        if self.num_windows == 1:  # the window has all rows; a start makes it for hundreds of small sources
            return keyed_order(key, int(self._first_row[-1]))
        pages = self._all_pages(epoch, window)
        starts = np.asarray(self._first_row[pages], np.int64)
        counts = np.asarray(self._first_row[pages + 1], np.int64) - starts
        before = np.cumsum(counts) - counts
        rows = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - before, counts)
        shuffled: Int64Array = rows[keyed_order(key, len(rows))]
        return shuffled

    def num_rows(self, epoch: int, window: int) -> int:
        """See `WindowRows`."""
        pages = self._all_pages(epoch, window)
        return int((self._first_row[pages + 1] - self._first_row[pages]).sum())

    def pages(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        pages, (start, stop) = self._all_pages(epoch, window), self._used_pages
        if (start, stop) == (0, self._num_pages):
            return pages
        used: Int64Array = pages[(pages >= start) & (pages < stop)]
        return used

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        places = places_of(np.arange(*self._used_pages), num_windows=self.num_windows, key=self._key("strata", epoch))
        return np.unique(unpermute(places, self.num_windows, self._key("pages", epoch)))

    def _all_pages(self, epoch: int, window: int) -> Int64Array:
        """Pages of a window; recent answers are kept, since planning and reading ahead ask for the same windows."""
        pages = self._last_pages.get((epoch, window))
        if pages is None:
            if len(self._last_pages) == KEPT_WINDOWS:
                del self._last_pages[next(iter(self._last_pages))]
            pages = pages_at(
                self._place(epoch, window),
                num_pages=self._num_pages,
                num_windows=self.num_windows,
                key=self._key("strata", epoch),
            )
            pages.setflags(write=False)
            self._last_pages[epoch, window] = pages
        return pages

    def _place(self, epoch: int, window: int) -> int:
        """Place of a window in the strata: permuted, so that neighbours on disk are not neighbours in time."""
        if self.num_windows > PERMUTED_WINDOWS:
            return int(permute(np.array([window]), self.num_windows, self._key("pages", epoch))[0])
        if self._last_places is None or self._last_places[0] != epoch:
            places = permute(np.arange(self.num_windows), self.num_windows, self._key("pages", epoch))
            self._last_places = epoch, places.tolist()
        return self._last_places[1][window]

    def _pages_of(self, used_rows: tuple[int, int], num_rows: int) -> tuple[int, int]:
        """The pages, as (start, stop), that the used rows lie in."""
        if used_rows == (0, num_rows):
            return 0, self._num_pages
        start = int(self._first_row.searchsorted(used_rows[0], side="right")) - 1  # pages without rows lie before it
        return start, max(start, int(self._first_row.searchsorted(used_rows[1], side="left")))
