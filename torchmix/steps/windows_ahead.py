"""Decode the next window of each stream while the present one is consumed.

What is read and in which order is not changed, only when it is decoded; a page that cannot be read is an error of the
step that needs it, since the steps before it are good. Without this, the steps after a window's border would decode
nearly all its pages at once, and a training step would wait for them. Streams that are not shuffled by page have no
such border, and are passed over. Cost: a few array operations per step, and some 100 microseconds for each window that
begins.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import CatalogError
from torchmix.mixture.order import StreamOrder
from torchmix.planner.cursor import Cursor
from torchmix.planner.planner import Planner
from torchmix.reader.protocol import StepReader

GOLDEN = 0.6180339887498949
"""Multiples of it, less their integers, lie evenly however many there are."""

_NO_PAGES = np.zeros(0, np.int64)
logger = logging.getLogger(__name__)


class WindowsAhead:
    """Follows the cursor and keeps each stream's next window as far decoded as the present one is consumed."""

    def __init__(self, planner: Planner, reader: StepReader) -> None:
        self._orders = planner.orders
        self._max_epochs = planner.max_epochs.tolist()
        self._reader = reader
        # Other streams need equally many new pages in every step, or their next window has the same pages.
        ahead = [s for s, order in enumerate(self._orders) if order.method == "page" and order.num_windows > 1]
        self._ahead = np.array(ahead, np.int64)
        self._whole = np.array([s for s in range(len(self._orders)) if s not in ahead], np.int64)
        """Streams whose steps may need any page: their window is an epoch."""
        self._sparse = [s for s in ahead if self._orders[s].is_sparse]
        self._sources = [[planner.sources.index(n) for n in planner.part.streams[s].sources] for s in planner.streams]
        """Indices of the sources of each stream."""
        # What is decoded together costs less; a quarter of a window at most, for the cache holds two and little more.
        quarter = [max(1, order.space.window_units // 4) for order in self._orders]
        self._at_once = np.ones(len(self._orders), np.int64)
        at_once = [min(map(reader.pages_at_once, sources)) for sources in self._sources]
        self._at_once[ahead] = [min(at_once[s], quarter[s]) for s in ahead]
        self._phases = phases(len(self._orders)) * self._at_once
        self._present: dict[int, _Present] = {}
        self._outlived: dict[int, Int64Array] = {}
        """Pages to evict: in neither the current nor the next window of a stream that has just changed windows."""
        # Arrays [S] over the current window of each stream; epoch -1 where none is known.
        self._epoch = np.full(len(self._orders), -1, np.int64)
        self._window = np.zeros(len(self._orders), np.int64)
        self._num_pieces = np.ones(len(self._orders), np.int64)
        self._num_next, self._num_warmed = np.zeros((2, len(self._orders)), np.int64)

    def follow(self, cursor: Cursor) -> None:
        """Decode what the progress to `cursor` makes due."""
        epoch, window, offset = self._places(cursor)
        outlived, self._outlived = self._outlived, {}
        s = self._ahead
        for stream in s[(epoch[s] != self._epoch[s]) | (window[s] != self._window[s])].tolist():
            self._enter(stream, int(epoch[stream]), int(window[stream]))
            if stream in outlived:
                outlived[stream] = self._present[stream].less_needed(outlived[stream])
        for pages in outlived.values():
            # One step late: pieces deferred from the finished window were in the step just built.
            for source, of_source in _by_source(pages):
                self._reader.forget(source, of_source)
        whole = self._whole[(epoch[self._whole] != self._epoch[self._whole]) & (self._epoch[self._whole] >= 0)]
        for stream in whole.tolist():
            for source in self._sources[stream]:
                self._reader.end_window(source, None)
        self._epoch[self._whole] = epoch[self._whole]
        due = (self._num_next[s] * offset[s] / self._num_pieces[s] + self._phases[s]).astype(np.int64)
        is_due = due > self._num_warmed[s]
        stops = np.minimum(due + self._at_once[s] - 1, self._num_next[s])
        for stream, stop in zip(s[is_due].tolist(), stops[is_due].tolist(), strict=True):
            try:
                for source, pages in _by_source(self._present[stream].following.pages[self._num_warmed[stream] : stop]):
                    self._reader.warm(source, pages)
            except CatalogError as error:
                logger.warning("met while reading ahead, the steps before it continue: %s", error)
            self._num_warmed[stream] = stop

    def _places(self, cursor: Cursor) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Epoch, window and offset of each stream; of windows without used rows, the next one with some."""
        at = cursor.position
        if not self._sparse:
            return at.epoch, at.window, at.offset
        epoch, window, offset = at.epoch.copy(), at.window.copy(), at.offset.copy()
        for s in self._sparse:
            place = int(epoch[s]), int(window[s])
            if (used := self._orders[s].next_used(*place)) != place:
                (epoch[s], window[s]), offset[s] = used, 0
        return epoch, window, offset

    def _enter(self, s: int, epoch: int, window: int) -> None:
        """A stream has come to a window."""
        order, finished = self._orders[s], self._present.get(s)
        here = (epoch, window)
        if finished is not None and finished.following.place == here:
            this = finished.following
        else:
            this = _window_at(order, here)
        place = order.following(*here)
        following = _window_at(order, place) if place[0] < self._max_epochs[s] else _Window(place, _NO_PAGES)
        present = self._present[s] = _Present(this, following)
        if finished is not None:
            self._outlived[s] = present.less_needed(finished.this.pages)
        if finished is not None:
            for source, pages in _by_source(finished.this.pages):
                self._reader.end_window(source, pages)
        self._epoch[s], self._window[s] = here
        self._num_pieces[s] = max(1, order.num_pieces(*here))
        self._num_next[s], self._num_warmed[s] = len(following.pages), 0


def phases(num_streams: int) -> NDArray[np.float64]:
    """[S] in [0, 1): by how much of what it decodes at once each stream is ahead of its progress.

    Streams of one size and share would all need pages in the same step: so each is ahead by another part.
    """
    found: NDArray[np.float64] = np.mod(np.arange(1, num_streams + 1) * GOLDEN, 1, dtype=np.float64)
    return found


class _Window(NamedTuple):
    place: tuple[int, int]
    pages: Int64Array
    """Keys of those with used rows, ascending: pages of a chunk are decoded together. See `_keys_of`."""


class _Present(NamedTuple):
    """The window that a stream is in, and the next one with used rows."""

    this: _Window
    following: _Window

    def less_needed(self, pages: Int64Array) -> Int64Array:
        """The given pages that neither window has."""
        needed = {*self.this.pages.tolist(), *self.following.pages.tolist()}  # of a few hundred cheaper than by numpy
        return np.array([page for page in pages.tolist() if page not in needed], np.int64)


def _window_at(order: StreamOrder, place: tuple[int, int]) -> _Window:
    # From pages alone: `order.window` keeps what it made, for planning.
    return _Window(place, _keys_of(order.pages_by_source(*place)))


_PAGE_BITS = 40
"""Bits of a key that hold the number of a page; those above hold that of its source."""


def _keys_of(pages: list[tuple[int, Int64Array]]) -> Int64Array:
    """Pages of several sources in one array, ascending by source and page."""
    keys = [of_source + (source << _PAGE_BITS) for source, of_source in pages]
    return np.concatenate(keys) if keys else _NO_PAGES


def _by_source(keys: Int64Array) -> list[tuple[int, Int64Array]]:
    """The inverse of `_keys_of`."""
    if not len(keys):
        return []
    source = keys >> _PAGE_BITS
    first = np.flatnonzero(np.append(True, source[1:] != source[:-1]))
    parts = np.split(keys & ((1 << _PAGE_BITS) - 1), first[1:])
    return list(zip(source[first].tolist(), parts, strict=True))
