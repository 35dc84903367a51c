"""Decode the next window of each source while the present one is consumed.

In: the cursor after each step. Out: pages decoded ahead in the reader's cache. Must hold: what is read and in which
order is not changed, only when it is decoded; a page that cannot be read is told where it is needed and not here, since
the steps before it are good. Without this, the steps after a window's border would decode nearly all its pages at once,
and a training step would wait for them. Sources that are not shuffled by page have no such border, and are passed over.
Cost: one comparison per source and step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchmix.errors import CatalogError
from torchmix.mixture.order import SourceOrder
from torchmix.planner.planner import Cursor, Planner
from torchmix.sources.reader import Reader

GOLDEN = 0.6180339887498949
"""Multiples of it, less their integers, lie evenly however many there are."""

logger = logging.getLogger(__name__)


class WindowsAhead:
    """Follows the cursor and keeps each source's next window as far decoded as the present one is consumed."""

    def __init__(self, planner: Planner, reader: Reader) -> None:
        self._orders = planner.orders
        self._max_epochs = planner.max_epochs.tolist()
        self._reader = reader
        self._windows: list[_Present | None] = [None] * len(planner.orders)
        # Sources of one size and share would all need a page in the same step: so each is ahead by another part of one.
        self._phases = ((np.arange(1, len(planner.orders) + 1) * GOLDEN) % 1).tolist()

    def follow(self, cursor: Cursor) -> None:
        """Decode what the progress to `cursor` makes due."""
        at = cursor.position
        places = zip(at.epoch.tolist(), at.window.tolist(), at.offset.tolist(), strict=True)
        for s, (epoch, window, offset) in enumerate(places):
            if self._orders[s].method != "page" or self._orders[s].num_windows == 1:
                continue  # each step needs as many new pages as any other, or the next window has the same pages
            if (used := self._orders[s].next_used(epoch, window)) != (epoch, window):
                (epoch, window), offset = used, 0
            present = self._windows[s]
            if present is None or present.place != (epoch, window):
                finished = present
                present = _present_window(self._orders[s], epoch, window, max_epochs=self._max_epochs[s])
                self._windows[s] = present
                if finished is not None:
                    needed = np.concatenate([present.pages, present.next_pages])
                    present.outlived = np.setdiff1d(finished.pages, needed)
            elif len(present.outlived):
                # One step late: pieces deferred from the finished window were in the step just built.
                self._reader.forget(s, present.outlived)
                present.outlived = present.outlived[:0]
            due = int(len(present.next_pages) * offset / present.num_rows + self._phases[s])
            if due > present.num_warmed:
                try:
                    self._reader.warm(s, present.next_pages[present.num_warmed : due])
                except CatalogError as error:
                    logger.warning("met while reading ahead, the steps before it go on: %s", error)
                present.num_warmed = due


@dataclass(kw_only=True, slots=True, eq=False)
class _Present:
    """The window that a source is in, and how far the next one is decoded. Only pages with used rows."""

    place: tuple[int, int]
    num_rows: int
    pages: NDArray[np.int64]
    next_pages: NDArray[np.int64]
    outlived: NDArray[np.int64]
    """Pages of the window before that neither this one nor the next has."""
    num_warmed: int = 0


def _present_window(order: SourceOrder, epoch: int, window: int, *, max_epochs: int) -> _Present:
    # From pages alone: `order.window` keeps what it made, and belongs to the planning thread.
    pages = order.used_pages(epoch, window)
    following = order.following(epoch, window)
    next_pages = order.used_pages(*following) if following[0] < max_epochs else pages[:0]
    return _Present(
        place=(epoch, window),
        num_rows=max(1, order.num_rows(epoch, window)),
        pages=pages,
        next_pages=np.sort(next_pages),  # pages of a chunk are decoded together
        outlived=pages[:0],
    )
