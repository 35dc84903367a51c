"""A source's endless order: epochs, cut into windows of rows.

In: the page table's row counts, the documents' lengths, a seed and the source's name. Out: the documents of any window
of any epoch. Must hold: within an epoch every row comes exactly once; the order depends on no other source; a window
can be made alone, from (epoch, window).

Three ways to shuffle. `page`: each window of an epoch takes pages from all over the source (strata.py), and permutes
their rows. Two rows of a batch share a page with odds about r/W (r rows a page, W rows a window), so a window of 2B
rows keeps rows of a page as well apart as a buffer of B rows filled from permuted pages (Youmu's aggressive buffer);
what the windows hold differs less. `row`: an epoch permutes all rows; nothing brings rows of a page together, so a page
is decoded for nearly every row. `none`: rows as they lie in the files.

Cost of a window: `page` one sort of its rows, about 0.1 ms per 15,000 rows; `row` 35 ns a row, and a look-up at random
in the lengths; `none` nothing but the look-up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.keys import keyed_order, named_key
from torchmix.mixture.permutation import permute, unpermute
from torchmix.mixture.strata import pages_at, places_of

SPARSE = 8
"""If at most one page in so many has used rows, windows without any are passed over unmade. With `row`, where even
few used rows are in all windows, if there are at most as many as windows."""

Method = Literal["page", "row", "none"]

KEPT_WINDOWS = 3
"""Windows whose pages are remembered: the one that is drawn from, one that was, and the next."""
PERMUTED_WINDOWS = 1 << 10
"""Windows of an epoch that are permuted together, if there are no more: one alone costs as much as hundreds."""
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

    def stop(self, start: int, owed_tokens: int) -> tuple[int, int]:
        """Where a draw of `owed_tokens` (1 or more) that begins at document `start` stops, and the tokens it takes.

        Documents are taken while the midpoint of the next one lies below what is owed.
        """
        ends = self.ends.data  # single values of a memoryview cost a third of an array's
        before = ends[start]
        target = owed_tokens + before
        behind = bisect_left(ends, target, start)  # documents that begin below the target
        if behind > len(self.rows):
            stop = len(self.rows)
        else:
            is_beyond = ends[behind - 1] + ends[behind] >= 2 * target
            stop = max(start, behind - is_beyond)
        return stop, ends[stop] - before

    def tokens(self, document: int) -> int:
        """Tokens that document number `document` counts for."""
        ends = self.ends.data
        return int(ends[document + 1] - ends[document])


class SourceOrder:
    """The order of one source; remembers the window last asked for.

    An epoch shares *units*, pages or rows, out among its windows.
    """

    def __init__(
        self,
        name: str,
        sizes: SourceSizes,
        *,
        seed: int,
        method: Method = "page",
        counted: Callable[[NDArray[np.int32]], NDArray[np.int32]] | None = None,
        rows: tuple[int, int] | None = None,
    ) -> None:
        """Take a source's place in the mixture.

        Args:
            name: The source's name: with the seed, all that keys its order.
            sizes: Rows of each page and tokens of each document.
            seed: The recipe's seed.
            method: How it is shuffled.
            counted: Tokens of documents -> tokens they count for, if not all of them; a document that
                counts for 0 is passed over, and keeps its place in the order.
            rows: The rows used, as (start, stop); others count for 0. None: all are used.
        """
        self.name = name
        self.sizes = sizes
        self.num_pages = len(sizes.first_row_of_page) - 1
        self._seed = seed
        self.method = method
        self._counted = counted
        self._rows = rows if rows != (0, sizes.num_documents) else None
        self._num_units, self._window_units = self.num_pages, sizes.window_pages
        self._used_units = self._pages_of_used_rows()
        if method != "page":
            self._num_units, self._window_units = sizes.num_documents, WINDOW_ROWS
            self._used_units = self._rows or (0, sizes.num_documents)
        self.num_windows = max(1, -(-self._num_units // self._window_units))
        start, stop = self._used_units
        self.is_sparse = stop - start <= (self.num_windows if method == "row" else self._num_units // SPARSE)
        """Few windows have used rows."""
        self._last: tuple[tuple[int, int], Window] | None = None
        self._last_windows: tuple[int, NDArray[np.int64]] | None = None
        self._last_pages: dict[tuple[int, int], NDArray[np.int64]] = {}
        self._last_places: tuple[int, list[int]] | None = None

    def pages(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Page ids of a window's rows, ascending; `window` in [0, num_windows)."""
        units = self._units(epoch, window)
        return units if self.method == "page" else self._pages_of(units)

    def used_pages(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Those of a window's pages that have used rows of it."""
        return self.pages_and_rows(epoch, window)[0]

    def num_rows(self, epoch: int, window: int) -> int:
        """Rows of a window, used or not."""
        return self._num_rows_of(self._units(epoch, window))

    def pages_and_rows(self, epoch: int, window: int) -> tuple[NDArray[np.int64], int]:
        """`used_pages` and `num_rows`, for the price of one."""
        units = self._units(epoch, window)
        num_rows = self._num_rows_of(units)
        if self._rows is not None:
            units = units[(units >= self._used_units[0]) & (units < self._used_units[1])]
        return units if self.method == "page" else self._pages_of(units), num_rows

    def next_used(self, epoch: int, window: int) -> tuple[int, int]:
        """The first (epoch, window) from here on that may have used rows.

        Passes over windows of which it is known, without making them, that they have none. Where most windows have some
        they are passed one by one; where few have, they are found from the used units, so the cost is that of these.
        """
        if not self.is_sparse:
            return epoch, window
        windows = self._windows_with_used_rows(epoch)
        at = int(np.searchsorted(windows, window))
        return (epoch, int(windows[at])) if at < len(windows) else (epoch + 1, 0)

    def following(self, epoch: int, window: int) -> tuple[int, int]:
        """The next (epoch, window) after this one that may have used rows."""
        place = (epoch, window + 1) if window + 1 < self.num_windows else (epoch + 1, 0)
        while (used := self.next_used(*place)) != place:
            place = used
        return place

    def window(self, epoch: int, window: int) -> Window:
        """The documents of a window of an epoch, in order."""
        if self._last is None or self._last[0] != (epoch, window):
            self._last = (epoch, window), self._make(epoch, window)
        return self._last[1]

    def _make(self, epoch: int, window: int) -> Window:
        rows = self._rows_of(epoch, window)
        ends = np.zeros(len(rows) + 1, np.int64)
        tokens = self._tokens(rows)
        if self._counted is None:
            np.cumsum(tokens, out=ends[1:])
            return Window(rows=rows, ends=ends, document_tokens=None)
        np.cumsum(self._counted(tokens), out=ends[1:])
        return Window(rows=rows, ends=ends, document_tokens=tokens)

    def _rows_of(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Rows of a window, in order."""
        if self.method == "page" and self.num_windows == 1:  # of all rows; hundreds of small sources make it at a start
            return keyed_order(self._key("rows", epoch, window), self.sizes.num_documents)
        units = self._units(epoch, window)
        if self.method != "page":
            return units
        first_row = self.sizes.first_row_of_page
        starts = np.asarray(first_row[units], np.int64)
        counts = np.asarray(first_row[units + 1], np.int64) - starts
        before = np.cumsum(counts) - counts
        rows = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - before, counts)
        shuffled: NDArray[np.int64] = rows[keyed_order(self._key("rows", epoch, window), len(rows))]
        return shuffled

    def _tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens of documents; 0 of those not used, whose sizes are not looked at."""
        if self._rows is None:
            return np.asarray(self.sizes.tokens[rows])
        used = (rows >= self._rows[0]) & (rows < self._rows[1])
        tokens = np.zeros(len(rows), np.int32)
        tokens[used] = self.sizes.tokens[rows[used]]
        return tokens

    def _units(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Pages of a window, ascending, or its rows, in permuted order."""
        if self.method == "page":
            return self._pages(epoch, window)
        start = window * self._window_units
        stop = min(start + self._window_units, self._num_units)
        positions = np.arange(start, stop, dtype=np.int64)
        if self.method == "none":
            return positions
        return permute(positions, self._num_units, self._key("row", epoch))

    def _windows_with_used_rows(self, epoch: int) -> NDArray[np.int64]:
        """Windows of an epoch, ascending."""
        last = self._last_windows
        if last is None or last[0] != epoch:
            start, stop = self._used_units
            if self.method == "none":
                windows = np.arange(start // WINDOW_ROWS, -(-stop // WINDOW_ROWS), dtype=np.int64)
            elif self.method == "row":
                places = unpermute(np.arange(start, stop), self._num_units, self._key("row", epoch))
                windows = np.unique(places // WINDOW_ROWS)
            else:
                places = places_of(np.arange(start, stop), num_windows=self.num_windows, key=self._key("strata", epoch))
                windows = np.unique(unpermute(places, self.num_windows, self._key("pages", epoch)))
            last = self._last_windows = epoch, windows
        return last[1]

    def _num_rows_of(self, units: NDArray[np.int64]) -> int:
        first_row = self.sizes.first_row_of_page
        return len(units) if self.method != "page" else int((first_row[units + 1] - first_row[units]).sum())

    def _pages(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Pages of a window; those lately asked for are kept, since planning and reading ahead ask for the same."""
        pages = self._last_pages.get((epoch, window))
        if pages is None:
            if len(self._last_pages) == KEPT_WINDOWS:
                del self._last_pages[next(iter(self._last_pages))]
            pages = pages_at(
                self._place(epoch, window),
                num_pages=self.num_pages,
                num_windows=self.num_windows,
                key=self._key("strata", epoch),
            )
            pages.setflags(write=False)
            self._last_pages[epoch, window] = pages
        return pages

    def _place(self, epoch: int, window: int) -> int:
        """Where a window stands among the strata's pages: permuted, so that neighbours on disk are not so in time."""
        if self.num_windows > PERMUTED_WINDOWS:
            return int(permute(np.array([window]), self.num_windows, self._key("pages", epoch))[0])
        if self._last_places is None or self._last_places[0] != epoch:
            places = permute(np.arange(self.num_windows), self.num_windows, self._key("pages", epoch))
            self._last_places = epoch, places.tolist()
        return self._last_places[1][window]

    def _key(self, word: str, *place: int) -> int:
        return named_key(self._seed, word, self.name, *place)

    def _pages_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages of rows, sorted, each once."""
        return np.unique(self.sizes.first_row_of_page.searchsorted(rows, side="right") - 1)

    def _pages_of_used_rows(self) -> tuple[int, int]:
        """The pages, as (start, stop), that the used rows lie in."""
        if self._rows is None:
            return 0, self.num_pages
        first_row = self.sizes.first_row_of_page
        start = int(first_row.searchsorted(self._rows[0], side="right")) - 1  # pages without rows lie before it
        return start, max(start, int(first_row.searchsorted(self._rows[1], side="left")))
