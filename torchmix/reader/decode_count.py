"""How much is decoded, and how often: once in each window that needs a page, or again.

In: pages as they are decoded, and windows as they end. Out: `decode_amplification`: pages decoded over distinct pages
of their window, so 1 where no page was decoded twice for a window, however little of it was used. Must hold: a page
that two windows need, and that the cache dropped between, counts for each of them. Cost: a byte a page of all sources;
only touched bytes take memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray


class DecodeCount:
    """Counts over the pages of all sources."""

    def __init__(self, first_key: Sequence[int] | NDArray[np.int64]) -> None:
        """`first_key`: [S + 1] the first page of each source, counted over all sources; then the number of pages."""
        self._first_key = np.asarray(first_key, np.int64)
        self._is_decoded = np.zeros(int(self._first_key[-1]), np.bool_)
        """[P] whether each page was decoded for the current or the next window of its source."""
        self._num_decoded = self._num_distinct = 0

    def add(self, key: int) -> None:
        """Count a page that was decoded."""
        self._num_decoded += 1
        self._num_distinct += not self._is_decoded[key]
        self._is_decoded[key] = True

    def end_window(self, source: int, pages: NDArray[np.int64] | None) -> None:
        """End a window of a source with these pages; None: a window with all of its pages."""
        first, stop = self._first_key[source : source + 2]
        self._is_decoded[slice(first, stop) if pages is None else pages + first] = False

    @property
    def amplification(self) -> float:
        """Pages decoded over distinct pages of their window; 1 where nothing had to be decoded."""
        return self._num_decoded / self._num_distinct if self._num_distinct else 1.0


class DecodeFigures(msgspec.Struct):
    """Sums over all sources of a reader since it was made; each adds what it does, so asking costs nothing."""

    pages_decoded: int = 0
    bytes_decoded: int = 0
    bytes_read: int = 0
    """Bytes of pages and companions that were read from files."""
    bad_pages: int = 0
    """Pages that became blank, each once."""
    read_s: float = 0.0
    decode_s: float = 0.0
