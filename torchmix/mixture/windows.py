"""Windows of many small sources at once: a run of hundreds of them begins with one of each.

In: sources and the window that each is asked for next. Out: nothing; each source then has its window, as it would make
it by itself. Must hold: the same documents in the same order. Cost: some 15 microseconds a source and what sorting its
rows takes, where a window made alone takes 200 in calls of numpy; memory for BATCH_ROWS rows, a few MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from torchmix.mixture.keys import PHI64, mix64
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.permutation import permute_domains

SMALL_PAGES = 1 << 9
SMALL_ROWS = 1 << 13
"""Sources of more pages or rows make their windows alone: then sorting is most of it."""
BATCH_ROWS = 1 << 17
"""Most rows of the sources of one batch."""

Place = tuple[SourceOrder, int, int]
"""A source, and epoch and window of it."""


def make_windows(places: Sequence[Place]) -> None:
    """Make the windows that sources lack, of those that are small; any source may be left to make its own."""
    for batch in _batches(places):
        if len(batch) > 1:
            _make(batch)


def _batches(places: Sequence[Place]) -> Iterator[list[Place]]:
    batch: list[Place] = []
    num_rows = 0
    for order, epoch, window in places:
        of_source = order.sizes.num_documents
        if order.method != "page" or order.num_pages > SMALL_PAGES or of_source > SMALL_ROWS:
            continue
        if order.is_sparse or order.has(epoch, window):
            continue
        if num_rows + of_source > BATCH_ROWS:
            yield batch
            batch, num_rows = [], 0
        batch.append((order, epoch, window))
        num_rows += of_source
    yield batch


def _make(places: Sequence[Place]) -> None:
    """As a source does alone: pages in permuted order, then the rows of all of them by their hash."""
    keys = [order.keys(epoch, window) for order, epoch, window in places]
    permuted = permute_domains([order.num_pages for order, _, _ in places], [of_pages for of_pages, _ in keys])
    starts, counts, num_rows = [], [], []
    for (order, _, window), pages in zip(places, permuted, strict=True):
        first_row, begin = np.asarray(order.sizes.first_row_of_page), window * order.sizes.window_pages
        units = pages[begin : begin + order.sizes.window_pages]
        start = first_row[units]
        count = first_row[units + 1] - start
        starts.append(start)
        counts.append(count)
        num_rows.append(int(count.sum()))
    start, count = np.concatenate(starts), np.concatenate(counts)
    rows = np.arange(sum(num_rows)) + np.repeat(start - (np.cumsum(count) - count), count)
    base = np.cumsum(num_rows) - num_rows
    place = (np.arange(len(rows)) - np.repeat(base, num_rows)).astype(np.uint64)
    bits = np.array([max(1, (number - 1).bit_length()) for number in num_rows], np.uint64)
    bits_of_row = np.repeat(bits, num_rows)
    # As `keyed_order`: the hash keeps its high bits, the position in the source fills the low ones.
    hashed = mix64(
        place * np.uint64(PHI64) + np.repeat(np.array([of_rows for _, of_rows in keys], np.uint64), num_rows)
    )
    hashed = ((hashed >> bits_of_row) << bits_of_row) | place
    borders = [*base.tolist(), len(rows)]
    for begin, end in pairwise(borders):
        hashed[begin:end].sort()
    hashed &= (np.uint64(1) << bits_of_row) - np.uint64(1)
    shuffled = rows[hashed.view(np.int64) + np.repeat(base, num_rows)]
    for (order, epoch, window), begin, end in zip(places, borders[:-1], borders[1:], strict=True):
        order.keep(epoch, window, shuffled[begin:end].copy())
