"""The rows of epochs in permuted order, some at a time, for ever or for some epochs: what a loader's loop takes.

In: a source's order, who reads its pages, and a place to begin at. Out: `RowBatch`, rows with the place they begin at.
Must hold: of several readers each takes windows in turn, so that all together give every row of an epoch once; a batch
lies in one window, and any number of rows of it given away is a place to begin at again. Pages of the coming window,
that of the next epoch too, are decoded while rows of this one are given, a few after each batch, so a border costs
nothing; pages that are done with make room. Cost: that of the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, count, pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.errors import CatalogError
from torchmix.mixture.order import SourceOrder
from torchmix.reader.reader import Reader
from torchmix.recipe.options import whole_number


class Place(NamedTuple):
    """Where a reader of rows is: three numbers that a checkpoint can keep."""

    epoch: int
    window: int
    """Windows of this epoch that this reader has finished."""
    used: int
    """Rows of the next window that were given out."""


class RowBatch(NamedTuple):
    """Some rows of one window."""

    rows: pa.Array
    """[n] as `Pages.read_rows` gives them."""
    numbers: NDArray[np.int64]
    """[n] number of each row among all rows of the files."""
    place: Place
    """Place of the first row; `place_after(k)` is the place after k rows."""

    def place_after(self, count: int) -> Place:
        """Where to begin again when the first `count` rows, in [0, n], have been used.

        Raises:
            OptionError: The batch has fewer rows, or the count is no whole number.
        """
        used = whole_number("place_after", "count", count, 0, len(self.numbers))
        return self.place._replace(used=self.place.used + used)


class _EpochWindow(NamedTuple):
    place: Place
    """Place of its first row."""
    number: int
    """Number of the window in its epoch."""


def row_batches(
    order: SourceOrder,
    reader: Reader,
    read: Callable[[NDArray[np.int64]], pa.Array],
    *,
    rows: int,
    start: Place,
    epochs: int | None,
    reader_index: int,
    num_readers: int,
) -> Iterator[RowBatch]:
    """Rows in order, from a place on; arguments as of `Pages.batches`, which checks them.

    Args:
        order: Of the one source of `reader`.
        reader: Decodes ahead what `read` will need.
        read: Reads rows of a window.
        rows: Of a batch; the last one of a window may have fewer.
        start: Where to begin.
        epochs: Before which epoch to end; None: never.
        reader_index, num_readers: Which of the windows are taken.
    """
    if not order.sizes.num_documents:
        return  # epochs without rows would never end
    mine = range(reader_index, order.num_windows, num_readers)
    windows = (
        _EpochWindow(Place(epoch, done, 0), mine[done])
        for epoch in (count(start.epoch) if epochs is None else range(start.epoch, epochs))
        for done in range(start.window if epoch == start.epoch else 0, len(mine))
    )
    used = start.used
    at_once = min(reader.pages_at_once(0), max(1, order.sizes.window_pages // 4))
    for here, following in pairwise(chain(windows, [None])):
        assert here is not None
        numbers = order.window(here.place.epoch, here.number).rows
        coming = _pages_ahead(order, following)
        num_warmed = 0
        for begin in range(used, len(numbers), rows):
            part = numbers[begin : begin + rows]
            yield RowBatch(rows=read(part), numbers=part, place=here.place._replace(used=begin))
            due = -(-len(coming) * (begin + len(part)) // len(numbers))
            if due > num_warmed:
                stop = min(due + at_once - 1, len(coming))
                with suppress(CatalogError):  # the call that needs the page raises it
                    reader.warm(0, coming[num_warmed:stop])
                num_warmed = stop
        if order.method == "page":
            done = order.pages(here.place.epoch, here.number)
            reader.forget(0, np.setdiff1d(done, coming))
            reader.end_window(0, done)
        elif following is None or following.place.epoch != here.place.epoch:
            reader.end_window(0, None)
        used = 0


def _pages_ahead(order: SourceOrder, window: _EpochWindow | None) -> NDArray[np.int64]:
    """Pages to decode before a window begins, ascending: pages of a chunk are decoded together."""
    # Other methods need as many new pages for any batch as for any other.
    if window is None or order.method != "page":
        return np.zeros(0, np.int64)
    return order.pages(window.place.epoch, window.number)
