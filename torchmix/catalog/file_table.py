"""The page table of one file, from what its scan found.

In: pages in the order of rows, each with its column chunk, place and rows; dictionaries and codecs of the chunks. Out:
a `PageTable` of file 0. Must hold: a chunk of the table has pages of one column chunk that lie end to end, of fewer
than MOST_IN_CHUNK bytes and rows before its last page; column chunks without pages are left out. Cost: O(P).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.page_table import MOST_IN_CHUNK, Int64Array, PageTable


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
    begins = np.ones(len(offset), np.bool_)
    begins[1:] = (np.diff(chunk_of_page) != 0) | (offset[1:] != (offset + num_bytes)[:-1])
    for place in (offset, first_row):  # what is counted from a chunk's first page must fit 32 bits
        first = np.flatnonzero(begins)
        relative = place - np.repeat(place[first], np.diff(first, append=len(place)))
        begins[1:] |= (np.diff(relative // MOST_IN_CHUNK) > 0) & ~begins[1:]
    first = np.flatnonzero(begins)
    pages_of_chunk = np.diff(first, append=len(offset))
    column_chunk = chunk_of_page[first]
    end = np.zeros(1, np.int64)
    return PageTable(
        page_start=np.append(offset - np.repeat(offset[first], pages_of_chunk), end).astype(np.uint32),
        page_row=np.append(first_row - np.repeat(first_row[first], pages_of_chunk), end).astype(np.uint32),
        tail_bytes=(end[:0] if tail_bytes is None or not tail_bytes.any() else tail_bytes).astype(np.uint32),
        page_crc=(end[:0] if page_crc is None else page_crc).astype(np.uint32),
        chunk_page=np.append(first, len(offset)).astype(np.int64),
        chunk_row=np.append(first_row[first], rows.sum()).astype(np.int64),
        chunk_offset=offset[first].astype(np.int64),
        chunk_bytes=np.add.reduceat(num_bytes, first).astype(np.int64) if len(first) else end[:0],
        file_of_chunk=np.zeros(len(first), np.int32),
        dict_offset=dict_offset[column_chunk],
        dict_bytes=dict_bytes[column_chunk],
        dict_crc=(end[:0] if dict_crc is None else dict_crc[column_chunk]).astype(np.uint32),
        codec=codec[column_chunk],
    )
