"""A source's endless order: epochs, cut into windows of rows.

In: the page table's row counts, the documents' lengths, a seed and the source's name. Out: the documents of any window
of any epoch. Must hold: within an epoch every row comes exactly once; the order depends on no other source; a window
can be made alone, from (epoch, window).

Three ways to shuffle. `page`: an epoch permutes the pages, and each window of them permutes its rows. Two rows of a
batch share a page with odds about r/W (r rows a page, W rows a window), so a window of 2B rows shuffles as well as a
buffer of B rows filled from permuted pages (Youmu's aggressive buffer). `row`: an epoch permutes all rows; nothing
brings rows of a page together, so a page is decoded for nearly every row. `none`: rows as they lie in the files.

Cost of a window: `page` one sort of its rows, about 0.1 ms per 15,000 rows; `row` 35 ns a row, and a look-up at random
in the lengths; `none` nothing but the look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.keys import keyed_order, named_key
from torchmix.mixture.permutation import permute, unpermute

SPARSE = 8
"""If at most one page in so many has used rows, windows without any are passed over unmade."""

Method = Literal["page", "row", "none"]

WINDOW_ROWS = 1 << 14
"""Rows of a window with `row` and `none`; part of the order's format, since a state counts windows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """The documents of one window, in the order in which they are drawn."""

    rows: NDArray[np.int64]
    """[W] row of each document in its source."""
    ends: NDArray[np.int64]
    """[W + 1] tokens of the documents before each; starts with 0."""
    document_tokens: NDArray[np.int32] | None
    """[W] tokens of each whole document, as the catalog has them; None if those are what `ends` counts."""

    def stop(self, start: int, owed_tokens: int) -> int:
        """Where a draw of `owed_tokens` (1 or more) that begins at document `start` stops.

        Documents are taken while the midpoint of the next one lies below what is owed.
        """
        target = owed_tokens + int(self.ends[start])
        behind = int(np.searchsorted(self.ends, target))  # documents that begin below the target
        if behind > len(self.rows):
            return len(self.rows)
        is_beyond = int(self.ends[behind - 1]) + int(self.ends[behind]) >= 2 * target
        return max(start, behind - is_beyond)


class SourceOrder:
    """The order of one source; remembers the window last asked for."""

    def __init__(
        self,
        name: str,
        sizes: SourceSizes,
        *,
        seed: int,
        counted: Callable[[NDArray[np.int32]], NDArray[np.int32]] | None = None,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """Take a source's place in the mixture.

        Args:
            name: The source's name: with the seed, all that keys its order.
            sizes: Rows of each page and tokens of each document.
            seed: The recipe's seed.
            counted: Tokens of documents -> tokens they count for, if not all of them; a document that
                counts for 0 is passed over, and keeps its place in the order.
            rows: The rows used, as (start, stop); others count for 0. None: all are used.
        """
        self.name = name
        self.sizes = sizes
        self.num_pages = len(sizes.first_row_of_page) - 1
        self.num_windows = -(-self.num_pages // sizes.window_pages)
        self._seed = seed
        self._counted = counted
        self._rows = rows if rows != (0, sizes.num_documents) else None
        self._used_pages = self._pages_of(self._rows)
        self._last: tuple[tuple[int, int], Window] | None = None
        self._last_windows: tuple[int, NDArray[np.int64]] | None = None

    def pages(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Page ids of a window, in permuted order; `window` in [0, num_windows)."""
        start = window * self.sizes.window_pages
        stop = min(start + self.sizes.window_pages, self.num_pages)
        positions = np.arange(start, stop, dtype=np.int64)
        return permute(positions, self.num_pages, self._page_key(epoch))

    def used_pages(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Those of a window's pages that have used rows."""
        pages = self.pages(epoch, window)
        first, stop = self._used_pages
        return pages if self._rows is None else pages[(pages >= first) & (pages < stop)]

    def num_rows(self, epoch: int, window: int) -> int:
        """Rows of a window, used or not."""
        pages, first_row = self.pages(epoch, window), self.sizes.first_row_of_page
        return int((first_row[pages + 1] - first_row[pages]).sum())

    def next_used(self, epoch: int, window: int) -> tuple[int, int]:
        """The first (epoch, window) from here on that may have used rows.

        Passes over windows of which it is known, from their pages alone, that they have none. Windows are passed one by
        one where most have some; where few have, they are found from their pages, so the cost is that of the used ones.
        """
        if not self._is_sparse:
            return epoch, window
        windows = self._windows(epoch)
        at = int(np.searchsorted(windows, window))
        return (epoch, int(windows[at])) if at < len(windows) else (epoch + 1, 0)

    def following(self, epoch: int, window: int) -> tuple[int, int]:
        """The (epoch, window) after one that may have used rows: the next such."""
        place = (epoch, window + 1) if window + 1 < self.num_windows else (epoch + 1, 0)
        while (used := self.next_used(*place)) != place:
            place = used
        return place

    def window(self, epoch: int, window: int) -> Window:
        """The documents of a window of an epoch, in order."""
        if self._last is None or self._last[0] != (epoch, window):
            self._last = (epoch, window), self._make(epoch, window)
        return self._last[1]

    @property
    def _is_sparse(self) -> bool:
        first, stop = self._used_pages
        return (stop - first) * SPARSE <= self.num_pages

    def _windows(self, epoch: int) -> NDArray[np.int64]:
        """Windows of an epoch that have used pages, ascending."""
        if self._last_windows is None or self._last_windows[0] != epoch:
            pages = np.arange(*self._used_pages, dtype=np.int64)
            positions = unpermute(pages, self.num_pages, self._page_key(epoch))
            self._last_windows = epoch, np.unique(positions // self.sizes.window_pages)
        return self._last_windows[1]

    def _page_key(self, epoch: int) -> int:
        return named_key(self._seed, "pages", self.name, epoch)

    def _pages_of(self, rows: tuple[int, int] | None) -> tuple[int, int]:
        """The pages, as (start, stop), that rows (start, stop) lie in."""
        if rows is None:
            return 0, self.num_pages
        first_row = self.sizes.first_row_of_page
        first = int(np.searchsorted(first_row[1:], rows[0], side="right"))
        return first, max(first, int(np.searchsorted(first_row[:-1], rows[1], side="left")))

    def _make(self, epoch: int, window: int) -> Window:
        pages = self.pages(epoch, window)
        first_row = self.sizes.first_row_of_page
        starts = np.asarray(first_row[pages], np.int64)
        counts = np.asarray(first_row[pages + 1], np.int64) - starts
        before = np.cumsum(counts) - counts
        rows = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - before, counts)
        rows = rows[keyed_order(named_key(self._seed, "rows", self.name, epoch, window), len(rows))]
        ends = np.zeros(len(rows) + 1, np.int64)
        tokens = np.asarray(self.sizes.tokens[rows])
        if self._counted is None and self._rows is None:
            np.cumsum(tokens, out=ends[1:])
            return Window(rows=rows, ends=ends, document_tokens=None)
        counted = tokens if self._counted is None else self._counted(tokens)
        if self._rows is not None:
            counted = np.where((rows >= self._rows[0]) & (rows < self._rows[1]), counted, 0)
        np.cumsum(counted, out=ends[1:])
        return Window(rows=rows, ends=ends, document_tokens=tokens)
