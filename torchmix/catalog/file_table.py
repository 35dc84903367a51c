"""The page table of one file, from what its scan found.

In: pages in the order of rows, each with its column chunk, place and rows; dictionaries and codecs of the chunks. Out:
a `PageTable` of file 0. Must hold: a chunk of the table has pages of one column chunk that lie end to end, of fewer
than MOST_IN_CHUNK bytes and rows before its last page; column chunks without pages are left out. Cost: O(P).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.page_table import MOST_IN_CHUNK, PageTable


def table_of_file(
    *,
    chunk_of_page: NDArray[np.integer],
    offset: Int64Array,
    num_bytes: Int64Array,
    tail_bytes: Int64Array | None,
    rows: Int64Array,
    dict_offset: Int64Array,
    dict_bytes: Int64Array,
    codec: NDArray[np.int8],
    page_crc: NDArray[np.uint32] | None = None,
    dict_crc: NDArray[np.uint32] | None = None,
) -> PageTable:
    """Make the table.

    Args:
        chunk_of_page: [P] column chunk of each page, never falls.
        offset, num_bytes: [P] where each page lies in the file.
        tail_bytes: [P] bytes behind it that its last row needs, or None.
        rows: [P] rows of each page.
        dict_offset, dict_bytes, codec: Of each column chunk.
        page_crc: [P] checksum of each page, or None.
        dict_crc: Of the dictionary of each column chunk, or None.
    """
    first_row = np.cumsum(rows) - rows
    first = _first_pages(chunk_of_page, offset, num_bytes, first_row)
    column_chunk = chunk_of_page[first]
    with_tails = tail_bytes is not None and tail_bytes.any()
    return PageTable(
        page_start=_counted(_from_first(offset, first)),
        page_row=_counted(_from_first(first_row, first)),
        tail_bytes=_optional(tail_bytes if with_tails else None),
        page_crc=_optional(page_crc),
        chunk_page=np.append(first, len(offset)),
        chunk_row=np.append(first_row[first], rows.sum(dtype=np.int64)),
        chunk_offset=offset[first],
        chunk_bytes=np.add.reduceat(num_bytes, first) if len(first) else np.zeros(0, np.int64),
        file_of_chunk=np.zeros(len(first), np.int32),
        dict_offset=dict_offset[column_chunk],
        dict_bytes=dict_bytes[column_chunk],
        dict_crc=_optional(None if dict_crc is None else dict_crc[column_chunk]),
        codec=codec[column_chunk],
    )


def _first_pages(
    chunk_of_page: NDArray[np.integer], offset: Int64Array, num_bytes: Int64Array, first_row: Int64Array
) -> Int64Array:
    """The first page of each chunk of the table."""
    if not len(offset):
        return np.zeros(0, np.int64)
    follows = offset[1:] == (offset + num_bytes)[:-1]
    follows &= chunk_of_page[1:] == chunk_of_page[:-1]
    if max(int(offset[-1] - offset[0]), int(first_row[-1])) < MOST_IN_CHUNK and follows.all():
        return np.zeros(1, np.int64)
    begins = np.ones(len(offset), np.bool_)
    begins[1:] = ~follows
    for place in (offset, first_row):  # what is counted from a chunk's first page must fit 32 bits
        relative = _from_first(place, np.flatnonzero(begins))
        begins[1:] |= (np.diff(relative // MOST_IN_CHUNK) > 0) & ~begins[1:]
    return np.flatnonzero(begins)


def _from_first(places: Int64Array, first: Int64Array) -> Int64Array:
    """Places of pages, counted from that of the first page of their chunk."""
    if len(first) == 1:
        counted: Int64Array = places - places[0]
        return counted
    return places - np.repeat(places[first], np.diff(first, append=len(places)))


def _counted(values: Int64Array) -> NDArray[np.uint32]:
    """Values below 2^32, and a 0 behind them."""
    counted = np.zeros(len(values) + 1, np.uint32)
    counted[:-1] = values
    return counted


def _optional(values: NDArray[np.integer] | None) -> NDArray[np.uint32]:
    return np.zeros(0, np.uint32) if values is None else values.astype(np.uint32)
