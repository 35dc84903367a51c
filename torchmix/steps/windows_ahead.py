"""Decode the next window of each stream while the present one is consumed.

What is read and in which order is not changed, only when it is decoded; a page that cannot be read is an error of the
step that needs it, since the steps before it are good. Without this, the steps after a window's border would decode
nearly all its pages at once, and a training step would wait for them. Streams that are not shuffled by page have no
such border, and are passed over.

Sources of one size and share stand at like places of like windows, so all would come to a page in the same step. A step
decodes about as many pages as its progress makes due, of the sources that are furthest behind; so each is early or late
by a call of `warm` at most, and what is left of a window comes about a step before it begins. Cost: some array
operations per step, and some 100 microseconds for each window that begins.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import CatalogError
from torchmix.mixture.order import StreamOrder
from torchmix.planner.cursor import Cursor
from torchmix.planner.planner import Planner
from torchmix.reader.protocol import StepReader

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
        self._at = np.zeros(len(self._orders), np.float64)
        """[S] how far each stream has come in its window, counted in pages of the next one."""
        self._credit = float(self._at_once[ahead].max(initial=0))
        """Pages that may be decoded early, beyond those that a step's progress makes due."""
        self._present: dict[int, _Present] = {}
        self._outlived: dict[int, Int64Array] = {}
        """Pages to evict: in neither the current nor the next window of a stream that has just changed windows."""
        # Arrays [S] over the current window of each stream; epoch -1 where none is known.
        self._epoch = np.full(len(self._orders), -1, np.int64)
        self._window = np.zeros(len(self._orders), np.int64)
        self._num_pieces = np.ones(len(self._orders), np.int64)
        self._num_next, self._num_warmed = np.zeros((2, len(self._orders)), np.int64)
        for stream in self._whole.tolist():
            reader.expect(stream, [(source, None) for source in self._sources[stream]])

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
        for stream, stop in self._chosen(offset):
            try:
                for source, pages in _by_source(self._present[stream].following.pages[self._num_warmed[stream] : stop]):
                    self._reader.warm(source, pages)
            except CatalogError as error:
                logger.warning("met while reading ahead, the steps before it continue: %s", error)
            self._num_warmed[stream] = stop

    def _chosen(self, offset: Int64Array) -> list[tuple[int, int]]:
        """The streams of which pages are decoded after this step, and up to which of their next window."""
        s = self._ahead
        count, warmed, at_once = self._num_next[s], self._num_warmed[s], self._at_once[s]
        at = count * offset[s] / self._num_pieces[s]
        advance = at - self._at[s]
        self._at[s] = at
        lead = warmed - at
        is_over = at + advance >= count  # with the next step, if that advances as this one
        is_open = warmed < count
        is_due = is_open & ((lead < -at_once) | is_over)
        stop = np.minimum(np.maximum(warmed + at_once, np.where(is_over, count, np.ceil(at))), count).astype(np.int64)
        pages = stop - warmed
        chosen = is_due.nonzero()[0]
        credit = self._credit + float(advance.sum()) - float(pages[chosen].sum())
        if credit >= 1:
            may = (is_open & ~is_due & (lead < at_once)).nonzero()[0]
            may = may[np.argsort(lead[may] / at_once[may], kind="stable")]
            early = may[: int(np.searchsorted(np.cumsum(pages[may]), credit, side="right"))]
            chosen, credit = np.concatenate([chosen, early]), credit - float(pages[early].sum())
        # What was due is not owed, or sources that met once would meet for ever.
        self._credit = min(max(credit, 0.0), float(at_once.max(initial=0)))
        return list(zip(s[chosen].tolist(), stop[chosen].tolist(), strict=True))

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
        self._reader.expect(s, _by_source(present.needed))
        self._epoch[s], self._window[s] = here
        self._num_pieces[s] = max(1, order.num_pieces(*here))
        self._num_next[s], self._num_warmed[s], self._at[s] = len(following.pages), 0, 0.0


class _Window(NamedTuple):
    place: tuple[int, int]
    pages: Int64Array
    """Keys of those with used rows, ascending: pages of a chunk are decoded together. See `_keys_of`."""


class _Present(NamedTuple):
    """The window that a stream is in, and the next one with used rows."""

    this: _Window
    following: _Window

    @property
    def needed(self) -> Int64Array:
        """Keys of the pages that one of the windows has, ascending."""
        both = np.sort(np.concatenate([self.this.pages, self.following.pages]))
        return both[np.append(True, both[1:] != both[:-1])] if len(both) else both

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
