"""A source's endless order: epochs of permuted pages, windows of permuted rows.

In: the page table's row counts, the documents' lengths, a seed and the source's name. Out: the documents of any window
of any epoch. Must hold: within an epoch every row comes exactly once; the order depends on no other source; a window
can be made alone, from (epoch, window). Cost: one sort of a window's rows, about 0.1 ms per 15,000 rows.

Two rows of a batch share a page with odds about r/W (r rows a page, W rows a window), so a window of 2B rows shuffles
as well as a buffer of B rows filled from permuted pages (Youmu's aggressive buffer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.keys import keyed_order, named_key
from torchmix.mixture.permutation import permute


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
    ) -> None:
        """Take a source's place in the mixture.

        Args:
            name: The source's name: with the seed, all that keys its order.
            sizes: Rows of each page and tokens of each document.
            seed: The recipe's seed.
            counted: Tokens of documents -> tokens they count for, if not all of them; a document that
                counts for 0 is passed over, and keeps its place in the order.
        """
        self.name = name
        self.sizes = sizes
        self.num_pages = len(sizes.first_row_of_page) - 1
        self.num_windows = -(-self.num_pages // sizes.window_pages)
        self._seed = seed
        self._counted = counted
        self._last: tuple[tuple[int, int], Window] | None = None

    def pages(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Page ids of a window, in permuted order; `window` in [0, num_windows)."""
        start = window * self.sizes.window_pages
        stop = min(start + self.sizes.window_pages, self.num_pages)
        positions = np.arange(start, stop, dtype=np.int64)
        return permute(positions, self.num_pages, named_key(self._seed, "pages", self.name, epoch))

    def window(self, epoch: int, window: int) -> Window:
        """The documents of a window of an epoch, in order."""
        if self._last is None or self._last[0] != (epoch, window):
            self._last = (epoch, window), self._make(epoch, window)
        return self._last[1]

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
        if self._counted is None:
            np.cumsum(tokens, out=ends[1:])
            return Window(rows=rows, ends=ends, document_tokens=None)
        np.cumsum(self._counted(tokens), out=ends[1:])
        return Window(rows=rows, ends=ends, document_tokens=tokens)
