"""The page table of one file, from what its scan found.

In: pages in the order of rows, each with its column chunk, place and rows; kinds and companions of the chunks. Out:
a `PageTable` of file 0. Must hold: a chunk of the table has pages of one column chunk that lie end to end, of fewer
than MOST_IN_CHUNK bytes and rows before its last page; column chunks without pages are left out. Cost: O(P).
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.page_table import MOST_IN_CHUNK, PageTable


class PageColumns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Pages of one file as its scan found them: P pages in row order, over C column chunks in file order."""

    chunk_of_page: NDArray[np.integer]
    """[P], in 0 ... C - 1, never falls."""
    page_offset: Int64Array
    """[P], the first byte of the page in the file."""
    page_bytes: Int64Array
    """[P], bytes of the page."""
    page_rows: Int64Array
    """[P], rows that begin in the page, at least 1."""
    tail_bytes: Int64Array | None = None
    """[P], bytes behind the page that must be read with it because its last row ends there, in the first of the
    writer's pages of the next page; 0 where it ends in the page itself. None if it does so in all."""
    page_crc: NDArray[np.uint32] | None = None
    """[P], CRC-32 of the bytes of each page and its tail, which is compared when they are read; None for a format whose
    pages are not decoded."""
    kind: NDArray[np.int8]
    """[C], how the pages of the chunk are decoded, in numbers of the format: with Parquet the compression."""
    companion_offset: Int64Array | None = None
    """[C], the first byte of what is read with any page of the chunk, as Parquet's dictionary; -1 if it has none. None
    if no chunk has any."""
    companion_bytes: Int64Array | None = None
    """[C], 0 if it has none; None as above."""
    companion_crc: NDArray[np.uint32] | None = None
    """[C], CRC-32 of each companion, which is compared as that of a page; None as above, or where pages have none."""


def table_of_file(pages: PageColumns) -> PageTable:
    """Make the table; column chunks without pages are left out."""
    offset, num_bytes, rows = pages.page_offset, pages.page_bytes, pages.page_rows
    none = np.zeros(len(pages.kind), np.int64)
    companion_offset = none - 1 if pages.companion_offset is None else pages.companion_offset
    companion_bytes = none if pages.companion_bytes is None else pages.companion_bytes
    first_row = np.cumsum(rows) - rows
    first = _first_pages(pages.chunk_of_page, offset, num_bytes, first_row)
    column_chunk = pages.chunk_of_page[first]
    with_tails = pages.tail_bytes is not None and pages.tail_bytes.any()
    return PageTable(
        page_start=_counted(_from_first(offset, first)),
        page_row=_counted(_from_first(first_row, first)),
        tail_bytes=_optional(pages.tail_bytes if with_tails else None),
        page_crc=_optional(pages.page_crc),
        chunk_page=np.append(first, len(offset)),
        chunk_row=np.append(first_row[first], rows.sum(dtype=np.int64)),
        chunk_offset=offset[first],
        chunk_bytes=np.add.reduceat(num_bytes, first) if len(first) else np.zeros(0, np.int64),
        file_of_chunk=np.zeros(len(first), np.int32),
        companion_offset=companion_offset[column_chunk],
        companion_bytes=companion_bytes[column_chunk],
        companion_crc=_optional(None if pages.companion_crc is None else pages.companion_crc[column_chunk]),
        kind=pages.kind[column_chunk],
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
    for place in (offset, first_row):  # places relative to a chunk's first page must fit 32 bits
        relative = _from_first(place, np.flatnonzero(begins))
        begins[1:] |= (np.diff(relative // MOST_IN_CHUNK) > 0) & ~begins[1:]
    return np.flatnonzero(begins)


def _from_first(places: Int64Array, first: Int64Array) -> Int64Array:
    """Places of pages, relative to the first page of their chunk."""
    if len(first) == 1:
        counted: Int64Array = places - places[0]
        return counted
    return places - np.repeat(places[first], np.diff(first, append=len(places)))


def _counted(values: Int64Array) -> NDArray[np.uint32]:
    """Values below 2^32 as uint32, followed by a 0."""
    counted = np.zeros(len(values) + 1, np.uint32)
    counted[:-1] = values
    return counted


def _optional(values: NDArray[np.integer] | None) -> NDArray[np.uint32]:
    return np.zeros(0, np.uint32) if values is None else values.astype(np.uint32)
