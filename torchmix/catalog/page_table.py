"""Where the pages of a source lie: a struct of arrays, memory-mapped from the catalog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal, NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import CatalogError

# --- The first row of each page, stored as 4 bytes a page; only small tables become an array of int64.
#
# Equal to that array in both. Cost: up to WHOLE_PAGES pages that of the array, which is made when it is first needed.
# Beyond that, two binary searches, over chunks and over the pages of a chunk: some ten calls of numpy, and one for
# each change of the chunk along the request. They need no memory beyond the result, even for the pages of a trillion
# tokens.

WHOLE_PAGES = 1 << 16
"""Most pages for which the array is made: half a MiB. It serves jobs that need few rows from hundreds of sources."""
MOST_SLICES = 16
"""Up to this many chunks are searched one by one, however few the rows; more are searched together."""


class FirstRows:
    """Where pages begin, in rows of the source; entry P is the number of rows."""

    __slots__ = ("_chunk_page", "_chunk_page_stop", "_chunk_row", "_chunk_row_stop", "_page_row", "_whole")

    def __init__(
        self, *, chunk_page: NDArray[np.int64], chunk_row: NDArray[np.int64], page_row: NDArray[np.uint32]
    ) -> None:
        """Take arrays of a `PageTable`; see its fields."""
        self._chunk_page, self._chunk_page_stop = chunk_page, chunk_page[1:]
        self._chunk_row, self._chunk_row_stop = chunk_row, chunk_row[1:]
        self._page_row = page_row
        self._whole: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._page_row)

    @overload
    def __getitem__(self, pages: int | np.integer[Any]) -> np.int64: ...
    @overload
    def __getitem__(self, pages: slice | NDArray[np.integer[Any]]) -> NDArray[np.int64]: ...
    def __getitem__(
        self, pages: int | np.integer[Any] | slice | NDArray[np.integer[Any]]
    ) -> np.int64 | NDArray[np.int64]:
        whole = self._as_array()
        if whole is not None:
            entries: np.int64 | NDArray[np.int64] = whole[pages]
            return entries
        at = np.arange(len(self))[pages] if isinstance(pages, slice) else np.asarray(pages)
        return self._entries(np.where(at < 0, at + len(self), at))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def tolist(self) -> list[int]:
        """All entries."""
        return list(map(int, self[:]))

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Page of each row, and the first row of that page; every row must lie in a page."""
        whole = self._as_array()
        if whole is not None:
            page = whole.searchsorted(rows, side="right")
            page -= 1
            return page, whole.take(page)
        chunk = self._chunk_row_stop.searchsorted(rows, side="right")
        before = self._chunk_row[chunk]
        page = self._stop_in_chunks(chunk, rows - before) - 1
        return page, before + self._page_row[page]

    def searchsorted(self, rows: Any, side: Literal["left", "right"] = "left") -> Any:
        """How many entries are below each row, or with `right` not above it; like `numpy.ndarray.searchsorted`."""
        whole = self._as_array()
        if whole is not None:
            return whole.searchsorted(rows, side=side)
        wanted = np.asarray(rows, np.int64) - (side == "left")  # whole numbers
        inside = np.clip(wanted.reshape(-1), 0, max(0, int(self._chunk_row[-1]) - 1))
        found = np.zeros(len(inside), np.int64)
        if len(self._chunk_row) > 1:
            chunk = self._chunk_row_stop.searchsorted(inside, side="right").clip(max=len(self._chunk_page) - 2)
            found = self._stop_in_chunks(chunk, inside - self._chunk_row[chunk])
        found[wanted.reshape(-1) < 0] = 0
        found[wanted.reshape(-1) >= self._chunk_row[-1]] = len(self)
        return found.reshape(wanted.shape)[()]

    def _as_array(self) -> NDArray[np.int64] | None:
        if self._whole is None and len(self) <= WHOLE_PAGES:
            self._whole = self._entries(np.arange(len(self)))
        return self._whole

    def _entries(self, pages: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        entries: NDArray[np.int64]
        entries = self._chunk_row[self._chunk_page_stop.searchsorted(pages, side="right")] + self._page_row[pages]
        return entries

    def _stop_in_chunks(self, chunk: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """One more than the last page of its chunk that begins at or before a row; rows count from its first."""
        narrow = rows.astype(np.uint32)  # the pages' dtype: numpy would otherwise convert all pages
        borders = np.flatnonzero(np.diff(chunk, prepend=-1))
        first, stop = self._chunk_page[chunk[borders]], self._chunk_page_stop[chunk[borders]]
        if len(borders) > MOST_SLICES + len(rows) // 8:
            lengths = np.diff(borders, append=len(rows))
            return self._stop_by_halves(np.repeat(first, lengths), np.repeat(stop, lengths), narrow)
        found = np.empty(len(rows), np.int64)
        spans = pairwise([*borders.tolist(), len(rows)])
        for (begin, end), page, page_stop in zip(spans, first.tolist(), stop.tolist(), strict=True):
            found[begin:end] = self._page_row[page:page_stop].searchsorted(narrow[begin:end], side="right")
            found[begin:end] += page
        return found

    def _stop_by_halves(
        self, start: NDArray[np.int64], stop: NDArray[np.int64], rows: NDArray[np.uint32]
    ) -> NDArray[np.int64]:
        """As `_stop_in_chunks`, for all rows at once, among pages `start` to `stop`, half-open."""
        while True:
            is_open = start < stop
            if not is_open.any():
                return start
            middle = (start + stop) >> 1
            is_behind = self._page_row[middle] <= rows
            start = np.where(is_open & is_behind, middle + 1, start)
            stop = np.where(is_open & ~is_behind, middle, stop)


# --- The page table of a source.
#
# Pages are in file order, then row order; the pages of a chunk are consecutive, and so are the chunks of a file. Pages
# of a chunk lie end to end in the file, so one offset describes a page. A column chunk whose pages do not, or that
# exceeds 2^31 bytes or rows, is several chunks here. Cost: 8 bytes a page, 4 more where rows are split over pages, 4
# more for a checksum, and 53 to 57 bytes a chunk; finding pages is a binary search over chunks.
#
# P is pages, C chunks, F files of one source. A format without chunks or companions has one chunk per file.

MOST_IN_CHUNK = 1 << 31
"""Most bytes, and most rows, before the last page of a chunk."""


class PlacedPages(NamedTuple):
    """Some pages of a table, [n] each."""

    chunk: Int64Array
    offset: Int64Array
    """First byte of the page in its file."""
    num_bytes: Int64Array
    """Bytes of the page."""
    tail_bytes: Int64Array
    """Bytes after the page that its last row needs."""
    begins_inside_row: NDArray[np.bool_]
    """Whether the beginning of the page belongs to the row before."""
    first_row: Int64Array
    num_rows: Int64Array

    def part(self, start: int, stop: int) -> PlacedPages:
        """Pages `start` to `stop`, half-open."""
        return PlacedPages(
            chunk=self.chunk[start:stop],
            offset=self.offset[start:stop],
            num_bytes=self.num_bytes[start:stop],
            tail_bytes=self.tail_bytes[start:stop],
            begins_inside_row=self.begins_inside_row[start:stop],
            first_row=self.first_row[start:stop],
            num_rows=self.num_rows[start:stop],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageTable:
    """Pages and chunks of one source, or of one file of it."""

    page_start: NDArray[np.uint32]
    """[P + 1] first byte of each page, counted from its chunk's; the last entry is 0."""
    page_row: NDArray[np.uint32]
    """[P + 1] first row of each page, counted from its chunk's; the last entry is 0."""
    tail_bytes: NDArray[np.uint32]
    """[P] bytes after each page that its last row needs; [0] if no page has any."""
    page_crc: NDArray[np.uint32]
    """[P] CRC-32 of the bytes of each page and its tail in its file, 0 where the index has none; [0] if no page has
    any."""
    chunk_page: Int64Array
    """[C + 1] first page of each chunk, rising; the last entry is P."""
    chunk_row: Int64Array
    """[C + 1] first row of each chunk, counted over the source's files; the last entry is the number of rows."""
    chunk_offset: Int64Array
    """[C] first byte of the chunk's first page in its file."""
    chunk_bytes: Int64Array
    """[C] bytes of all its pages."""
    file_of_chunk: NDArray[np.int32]
    """[C] file of each chunk, in [0, F), never falling."""
    companion_offset: Int64Array
    """[C] first byte of the chunk's companion in its file, -1 if it has none: what is read with any of its pages, as
    Parquet's dictionary."""
    companion_bytes: Int64Array
    """[C] bytes of the companion, 0 if there is none."""
    companion_crc: NDArray[np.uint32]
    """[C] CRC-32 of the companion, as `page_crc`; [0] if there are none."""
    kind: NDArray[np.int8]
    """[C] how its pages are decoded, in numbers of the format: with Parquet the compression."""
    _first_row: FirstRows = field(init=False)

    def __post_init__(self) -> None:
        first_row = FirstRows(chunk_page=self.chunk_page, chunk_row=self.chunk_row, page_row=self.page_row)
        object.__setattr__(self, "_first_row", first_row)

    @property
    def num_pages(self) -> int:
        """P."""
        return len(self.page_start) - 1

    @property
    def num_chunks(self) -> int:
        """C."""
        return len(self.kind)

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return int(self.chunk_row[-1])

    @property
    def first_row(self) -> FirstRows:
        """[P + 1] first row of each page, counted over the source's files; the last entry is the number of rows."""
        return self._first_row

    def page_of_rows(self, rows: Int64Array) -> Int64Array:
        """Page of each row, [n] int64; rows must be in [0, num_rows)."""
        return self.first_row.find(rows)[0]

    def chunk_of_pages(self, pages: Int64Array) -> Int64Array:
        """Chunk of each page, [n] int64."""
        return self.chunk_page.searchsorted(pages, side="right") - 1

    def offset_of_pages(self, pages: Int64Array) -> Int64Array:
        """First byte of each page in its file, [n] int64."""
        chunk = 0 if self.num_chunks == 1 else self.chunk_of_pages(pages)
        offsets: Int64Array = self.chunk_offset[chunk] + self.page_start[pages]
        return offsets

    def place(self, pages: Int64Array) -> PlacedPages:
        """Where pages lie, and their rows."""
        pages = np.asarray(pages, np.int64)
        chunk = self.chunk_of_pages(pages)
        start = self.page_start[pages].astype(np.int64)
        is_last = pages + 1 == self.chunk_page[chunk + 1]
        first_row = self.chunk_row[chunk] + self.page_row[pages]
        next_row = np.where(is_last, self.chunk_row[chunk + 1], self.chunk_row[chunk] + self.page_row[pages + 1])
        tail_bytes, begins_inside_row = np.zeros(len(pages), np.int64), np.zeros(len(pages), np.bool_)
        if len(self.tail_bytes):
            tail_bytes = self.tail_bytes[pages].astype(np.int64)
            begins_inside_row = (self.tail_bytes[pages - 1] > 0) & (pages > 0)
        return PlacedPages(
            chunk=chunk,
            offset=self.chunk_offset[chunk] + start,
            num_bytes=np.where(is_last, self.chunk_bytes[chunk], self.page_start[pages + 1]) - start,
            tail_bytes=tail_bytes,
            begins_inside_row=begins_inside_row,
            first_row=first_row,
            num_rows=next_row - first_row,
        )

    def of_file(self, file: int) -> PageTable:
        """The table of one file alone, with rows, chunks and files counted from 0; copies, O(its pages)."""
        chunks = slice(*np.searchsorted(self.file_of_chunk, [file, file + 1]).tolist())
        chunk_page = self.chunk_page[chunks.start : chunks.stop + 1]
        chunk_row = self.chunk_row[chunks.start : chunks.stop + 1]
        pages = slice(int(chunk_page[0]), int(chunk_page[-1]))
        end = np.zeros(1, np.uint32)
        tail_bytes = np.array(self.tail_bytes[pages])
        page_crc, companion_crc = np.array(self.page_crc[pages]), np.array(self.companion_crc[chunks])
        return PageTable(
            page_start=np.concatenate([self.page_start[pages], end]),
            page_row=np.concatenate([self.page_row[pages], end]),
            tail_bytes=tail_bytes if tail_bytes.any() else tail_bytes[:0],
            page_crc=page_crc if page_crc.any() else page_crc[:0],
            chunk_page=chunk_page - chunk_page[0],
            chunk_row=chunk_row - chunk_row[0],
            chunk_offset=np.array(self.chunk_offset[chunks]),
            chunk_bytes=np.array(self.chunk_bytes[chunks]),
            file_of_chunk=np.zeros(chunks.stop - chunks.start, np.int32),
            companion_offset=np.array(self.companion_offset[chunks]),
            companion_bytes=np.array(self.companion_bytes[chunks]),
            companion_crc=companion_crc if companion_crc.any() else companion_crc[:0],
            kind=np.array(self.kind[chunks]),
        )

    def arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Name and array of each field, in the order above."""
        for name in ARRAY_NAMES:
            yield name, getattr(self, name)

    def check(self) -> None:
        """Check every invariant above, in O(P + C).

        Raises:
            CatalogError: An invariant is broken; names it.
        """
        pages, chunks = self.num_pages, self.num_chunks
        lengths = {name: len(array) for name, array in self.arrays()}
        wanted = dict.fromkeys(lengths, chunks)
        wanted |= {"page_start": pages + 1, "page_row": pages + 1, "chunk_page": chunks + 1, "chunk_row": chunks + 1}
        for name, full in (("tail_bytes", pages), ("page_crc", pages), ("companion_crc", chunks)):
            wanted[name] = full if lengths[name] else 0
        if lengths != wanted:
            raise CatalogError(f"arrays of a page table have lengths {lengths}, not {wanted}")
        for name, array, least in (
            ("chunk_page", self.chunk_page, 1),
            ("chunk_row", self.chunk_row, 0),
            ("file_of_chunk", self.file_of_chunk, 0),
        ):
            if len(array) and (array[0] < 0 or (array[1:] - array[:-1] < least).any()):
                raise CatalogError(f"{name} of a page table is negative, or does not rise")
        if (self.chunk_page[0], self.chunk_row[0], self.chunk_page[-1]) != (0, 0, pages):
            raise CatalogError(
                f"chunks begin at page {self.chunk_page[0]} and row {self.chunk_row[0]}, and end at page "
                f"{self.chunk_page[-1]} of {pages}"
            )
        if ((self.companion_offset < 0) != (self.companion_bytes == 0)).any():
            raise CatalogError("a chunk has a companion's offset without its size, or its size without its offset")
        if self.page_start[self.chunk_page].any() or self.page_row[self.chunk_page].any():
            raise CatalogError("the first page of a chunk does not begin with it")
        if chunks == 1 and not len(self.tail_bytes) and self._rises_in_one_chunk():
            return
        place = self.place(np.arange(pages))
        if pages and (place.offset.min() < 0 or place.num_bytes.min() < 1 or place.num_rows.min() < 0):
            raise CatalogError(
                f"a page lies at byte {place.offset.min()}, or has {place.num_bytes.min()} bytes or "
                f"{place.num_rows.min()} rows"
            )
        self._check_tails(place)

    def _rises_in_one_chunk(self) -> bool:
        """Whether pages of the only chunk have bytes each, and rows or none."""
        start, row = self.page_start[:-1], self.page_row[:-1]
        return bool(
            self.chunk_offset[0] >= 0
            and start[-1] < self.chunk_bytes[0]
            and row[-1] <= self.chunk_row[1]
            and (start[1:] > start[:-1]).all()
            and (row[1:] >= row[:-1]).all()
        )

    def _check_tails(self, place: PlacedPages) -> None:
        """Check that a tail is the beginning of the next page, which lies behind in the same file."""
        with_tail = np.flatnonzero(place.tail_bytes)
        if not len(with_tail):
            return
        if with_tail[-1] == self.num_pages - 1:
            raise CatalogError("the last page has a tail")
        stop, following = (place.offset + place.num_bytes)[with_tail], with_tail + 1
        file = self.file_of_chunk[place.chunk]
        is_sound = (
            (place.offset[following] == stop)
            & (place.tail_bytes[with_tail] <= place.num_bytes[following])
            & (file[following] == file[with_tail])
        )
        if not is_sound.all():
            raise CatalogError(f"the tail of page {with_tail[np.argmin(is_sound)]} does not lie in the next page")


ARRAY_NAMES = tuple(field.name for field in fields(PageTable) if field.init)
"""Fields of a table that are arrays, in their order."""


def join_tables(tables: Sequence[PageTable]) -> PageTable:
    """One table over the files of a source.

    Args:
        tables: [F] the table of each file alone, in the order of the manifest; a file may have no page.

    Returns:
        Rows, chunks and files counted over all of them; O(P + C) time and memory.
    """
    if len(tables) == 1:
        return tables[0]
    page_base = np.cumsum([0, *(table.num_pages for table in tables)])
    row_base = np.cumsum([0, *(table.num_rows for table in tables)])
    numbered = list(enumerate(tables))
    end = np.zeros(1, np.uint32)
    pages, chunks = [table.num_pages for table in tables], [table.num_chunks for table in tables]
    return PageTable(
        page_start=np.concatenate([*(table.page_start[:-1] for table in tables), end]),
        page_row=np.concatenate([*(table.page_row[:-1] for table in tables), end]),
        tail_bytes=_join_optional([table.tail_bytes for table in tables], pages),
        page_crc=_join_optional([table.page_crc for table in tables], pages),
        chunk_page=np.concatenate([*(table.chunk_page[:-1] + page_base[i] for i, table in numbered), page_base[-1:]]),
        chunk_row=np.concatenate([*(table.chunk_row[:-1] + row_base[i] for i, table in numbered), row_base[-1:]]),
        chunk_offset=np.concatenate([table.chunk_offset for table in tables]),
        chunk_bytes=np.concatenate([table.chunk_bytes for table in tables]),
        file_of_chunk=np.repeat(np.arange(len(tables), dtype=np.int32), chunks),
        companion_offset=np.concatenate([table.companion_offset for table in tables]),
        companion_bytes=np.concatenate([table.companion_bytes for table in tables]),
        companion_crc=_join_optional([table.companion_crc for table in tables], chunks),
        kind=np.concatenate([table.kind for table in tables]),
    )


def _join_optional(parts: Sequence[NDArray[np.uint32]], lengths: Sequence[int]) -> NDArray[np.uint32]:
    """Arrays end to end, with zeros for missing ones; empty if all are missing."""
    if not any(map(len, parts)):
        return np.zeros(0, np.uint32)
    filled = [part if len(part) else np.zeros(length, np.uint32) for part, length in zip(parts, lengths, strict=True)]
    return np.concatenate(filled)


# --- The page table of one file, from what its scan found.
#
# A chunk of the table has pages of one column chunk that lie end to end, of fewer than MOST_IN_CHUNK bytes and rows
# before its last page; column chunks without pages are left out. Cost: O(P).


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
