"""A column chunk -> its pages with their rows, and the tokens of each row.

A page is one of the writer's pages in which a row begins, with those behind it in which none does; its rows are those
that begin in it; its tail reaches to the end of the page in which its last row ends. Where index or headers tell the
rows of pages, the chunk is decoded by the very path that reads it later, and what they tell is compared with what is
found. Else, or if they tell it wrongly, rows are found by what they hold: lists tell how many values Parquet counts in
a row, headers how many in a page.

Cost: the chunk is read and decoded once, up to SCAN_RUN_BYTES of it at a time; twice, if the index lies.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import BadRows
from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.formats.column import Kind, count_values, look_at_rows
from torchmix.formats.decompress import join_checksums
from torchmix.formats.parquet.footer import Chunk, ChunkPages, Leaf, find_pages
from torchmix.formats.parquet.page import decode_pages, decode_parts_of_rows, read_headers
from torchmix.formats.source import PageRun, SeenIds, join_seen
from torchmix.storage.random_access import RandomAccessFile
from torchmix.transform.tokenizer import Tokenizer

SCAN_RUN_BYTES = 4 << 20
"""A scan decodes adjacent pages together up to so many bytes without compression; a larger page comes alone."""

_MOST_VALUES = 2**31 - 1  # a row's tokens are counted in 32 bits, and so are the values of Arrow's lists


class ScannedChunk(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Pages and documents of one chunk, as `FileScan` joins them."""

    offset: Int64Array
    num_bytes: Int64Array
    tail_bytes: Int64Array
    rows: Int64Array
    crc: NDArray[np.uint32]
    """Checksum of each page with its tail."""
    dict_offset: int
    dict_bytes: int
    dict_crc: int
    split_pages: int
    tokens: Int64Array
    ids: SeenIds | None


class ChunkScan(msgspec.Struct, frozen=True, kw_only=True):
    """What the chunks of a file share while they are scanned."""

    file: RandomAccessFile
    path: str
    kind: Kind
    tokenizer: Tokenizer
    leaf: Leaf
    schema: bytes
    bad: BadRows | None = None
    """Takes rows that cannot be read; None: the first one is an error."""
    is_without_values: bool = False
    """Rows are lists of no values, for which the file has nulls."""

    def scan(self, chunk: Chunk, first_row: int) -> ScannedChunk:
        """Scan a chunk; `first_row` is its first, in the file.

        Raises:
            SourceUnreadable: A token is null, or a row has too many.
            CorruptPage: A page does not decode, or pages, footer and rows do not go together.
        """
        self.file.will_read(chunk.start, chunk.num_bytes)
        bad = None if self.bad is None else BadRows()
        try:
            scanned = self._scan_by_rows(chunk, first_row, bad)
        except CorruptPage:
            if not self.leaf.is_list:
                raise
            scanned = None  # pages that begin inside a row do not decode by themselves either
        if scanned is None:
            bad = None if self.bad is None else BadRows()
            scanned = self._scan_by_values(chunk, first_row, bad)
        if self.bad is not None and bad is not None:
            self.bad.extend(bad)
        return scanned

    def _scan_by_rows(self, chunk: Chunk, first_row: int, bad: BadRows | None) -> ScannedChunk | None:
        """As `scan`; None where index and headers do not tell the rows, or tell them wrongly."""
        pages = find_pages(self.file, chunk, self.leaf)
        if pages.rows is None or pages.rows.sum() != chunk.num_rows:
            return None
        dictionary = self._read_dictionary(pages)
        tokens: list[Int64Array] = []
        values: list[Int64Array] = []
        seen: list[SeenIds | None] = []
        values_of_page: list[int] = []
        checksums: list[int] = []
        row = first_row
        for start, stop in _cut_runs(pages, chunk):
            num_rows = int(pages.rows[start:stop].sum())
            run = self._run(chunk, pages, dictionary, slice(start, stop), num_rows, row)
            headers = read_headers(run)
            if [header.stop for header in headers] != np.cumsum(pages.num_bytes[start:stop]).tolist():
                return None  # together they are pages, but not those of the index
            values_of_page += [header.num_values for header in headers]
            checksums += _checksums(run, pages.num_bytes[start:stop])
            for array in decode_pages(run):
                counts, ids = look_at_rows(self._rows(array), self.kind, row, self.tokenizer, bad)
                tokens.append(counts)
                values.append(count_values(array))
                seen.append(ids)
                row += len(array)
        starts, page_starts = _first_values(_join(values)), _first_values(np.array(values_of_page, dtype=np.int64))
        first_rows, begins_inside = _rows_of_pages(starts, page_starts)
        if first_rows is None or begins_inside.any() or not np.array_equal(np.diff(first_rows), pages.rows):
            return None
        kept = pages.rows > 0
        return ScannedChunk(
            offset=pages.offset[kept],
            num_bytes=pages.num_bytes[kept],
            tail_bytes=np.zeros(int(kept.sum()), dtype=np.int64),
            rows=pages.rows[kept],
            crc=np.array(checksums, dtype=np.uint32)[kept],
            dict_offset=pages.dict_offset,
            dict_bytes=pages.dict_bytes,
            dict_crc=zlib.crc32(dictionary),
            split_pages=0,
            tokens=_join(tokens),
            ids=join_seen(seen),
        )

    def _scan_by_values(self, chunk: Chunk, first_row: int, bad: BadRows | None) -> ScannedChunk:
        """As `scan`; which rows begin in a page, and whether one continues in it, follows from the values in each."""
        pages = find_pages(self.file, chunk, self.leaf, use_index=False)
        assert pages.values is not None
        dictionary = self._read_dictionary(pages)
        tokens: list[Int64Array] = []
        values: list[Int64Array] = []
        seen: list[SeenIds | None] = []
        checksums: list[int] = []
        row = first_row
        for start, stop in _cut_runs(pages, chunk):
            goes_on = start > 0 and self.leaf.is_list
            run = self._run(chunk, pages, dictionary, slice(start, stop), 0, row - goes_on, begins_inside_row=goes_on)
            checksums += _checksums(run, pages.num_bytes[start:stop])
            for array in decode_parts_of_rows(run):
                found, ids = look_at_rows(
                    self._rows(array),
                    self.kind,
                    row - goes_on,
                    self.tokenizer,
                    bad,
                    num_opening=int(goes_on and not self.is_without_values),
                )
                seen.append(ids)
                for counts, parts in ((found, tokens), (count_values(array), values)):
                    if goes_on:  # the first row is one value that we put there, and the end of the row before
                        parts[-1][-1] += counts[0] - 1
                    if len(counts) > goes_on:
                        parts.append(counts[int(goes_on) :])
                row += len(array) - goes_on
                goes_on = False
        tokens_of_row, starts, page_starts = _join(tokens), _first_values(_join(values)), _first_values(pages.values)
        if self.is_without_values:
            tokens_of_row[:] = 0
        if bad is not None and len(bad.rows):
            tokens_of_row[np.asarray(bad.rows) - first_row] = 0  # of which another page may hold good parts
        first_rows, begins_inside = _rows_of_pages(starts, page_starts)
        if first_rows is None or (len(starts) - 1, starts[-1]) != (chunk.num_rows, chunk.num_values):
            raise CorruptPage(
                f"the column chunk at bytes [{chunk.start}, {chunk.start + chunk.num_bytes}) decodes to "
                f"{len(starts) - 1} rows of {starts[-1]} values, its pages tell {page_starts[-1]} values, the footer "
                f"{chunk.num_rows} rows of {chunk.num_values}; the file is damaged, restore it"
            )
        kept = np.flatnonzero(np.diff(first_rows))
        stop_byte = np.append(pages.offset[kept][1:], (pages.offset + pages.num_bytes)[-1:])
        tail_bytes = np.where(begins_inside, pages.num_bytes, 0)[kept]
        tail_bytes = np.append(tail_bytes[1:], np.zeros(min(len(kept), 1), dtype=np.int64))
        if begins_inside.any():
            self._check_size(tokens_of_row, first_rows[np.append(kept, len(pages.offset))], first_row)
        num_bytes = stop_byte - pages.offset[kept]
        return ScannedChunk(
            offset=pages.offset[kept],
            num_bytes=num_bytes,
            tail_bytes=tail_bytes,
            rows=np.diff(first_rows)[kept],
            crc=self._checksums_with_tails(pages, kept, num_bytes + tail_bytes, checksums),
            dict_offset=pages.dict_offset,
            dict_bytes=pages.dict_bytes,
            dict_crc=zlib.crc32(dictionary),
            split_pages=int(begins_inside.sum()),
            tokens=tokens_of_row,
            ids=join_seen(seen),
        )

    def _check_size(self, tokens: Int64Array, first_rows: Int64Array, first_row: int) -> None:
        """Raise unless each page can be decoded with its tail, which is at most the whole of the next page."""
        of_page = np.add.reduceat(tokens, first_rows[:-1])
        row = int(tokens.argmax())
        if of_page.max() + np.append(of_page[1:], 0).max() > _MOST_VALUES:
            raise SourceUnreadable(
                f"row {first_row + row} has {tokens[row]} tokens, and rows are split over pages: what "
                f"must be decoded together exceeds {_MOST_VALUES} tokens; cut the row, or write pages that end at rows"
            )

    def _checksums_with_tails(
        self, pages: ChunkPages, kept: Int64Array, num_bytes: Int64Array, checksums: list[int]
    ) -> NDArray[np.uint32]:
        """Checksums of the pages in which rows begin, each with those behind it in which none does, and with its tail.

        Args:
            pages: The writer's.
            kept: Which of them have rows that begin there.
            num_bytes: The number of bytes of each of those, with its tail.
            checksums: The checksum of each of the writer's.
        """
        joined = []
        for first, wanted_bytes in zip(kept.tolist(), num_bytes.tolist(), strict=True):
            checksum, have_bytes, page = checksums[first], int(pages.num_bytes[first]), first + 1
            while have_bytes < wanted_bytes and pages.offset[page] == pages.offset[first] + have_bytes:
                page_bytes = int(pages.num_bytes[page])
                checksum = join_checksums(checksum, checksums[page], page_bytes)
                have_bytes, page = have_bytes + page_bytes, page + 1
            if have_bytes < wanted_bytes:  # something else than data lies between
                checksum = zlib.crc32(self.file.read(int(pages.offset[first]), wanted_bytes))
            joined.append(checksum)
        return np.array(joined, dtype=np.uint32)

    def _rows(self, array: pa.Array) -> pa.Array:
        """Rows as their type says."""
        return pa.nulls(len(array), pa.list_(pa.int32())) if self.is_without_values else array

    def _read_dictionary(self, pages: ChunkPages) -> bytes:
        return self.file.read(pages.dict_offset, pages.dict_bytes) if pages.dict_bytes else b""

    def _run(
        self,
        chunk: Chunk,
        pages: ChunkPages,
        dictionary: bytes,
        of_chunk: slice,
        num_rows: int,
        first_row: int,
        *,
        begins_inside_row: bool = False,
    ) -> PageRun:
        offset = int(pages.offset[of_chunk.start])
        num_bytes = int(pages.offset[of_chunk.stop - 1] + pages.num_bytes[of_chunk.stop - 1]) - offset
        return PageRun(
            pages=self.file.read(offset, num_bytes),
            companion=dictionary,
            schema=self.schema,
            kind=chunk.codec,
            num_rows=num_rows,
            path=self.path,
            offset=offset,
            first_row=first_row,
            begins_inside_row=begins_inside_row,
        )


def _checksums(run: PageRun, num_bytes: Int64Array) -> list[int]:
    """CRC-32 of each page of a run, header and body, whether or not the writer left one: its own covers no header."""
    view, stops = memoryview(run.pages), np.cumsum(num_bytes).tolist()
    return [zlib.crc32(view[start:stop]) for start, stop in pairwise([0, *stops])]


def _cut_runs(pages: ChunkPages, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Ranges of adjacent pages, each of at most SCAN_RUN_BYTES decoded, or of one page."""
    most_bytes = SCAN_RUN_BYTES * chunk.num_bytes // max(chunk.decoded_bytes, 1)
    offset, stop_byte = pages.offset, pages.offset + pages.num_bytes
    start = 0
    for i in range(1, len(offset) + 1):
        ends = i == len(offset) or offset[i] != stop_byte[i - 1] or stop_byte[i] - offset[start] > most_bytes
        if ends:
            yield start, i
            start = i


def _rows_of_pages(starts: Int64Array, page_starts: Int64Array) -> tuple[Int64Array | None, NDArray[np.bool_]]:
    """First row that begins in each page or behind it, [pages + 1], and whether the page begins inside a row, [pages].

    Args:
        starts: [rows + 1] the first value of each row, and their number.
        page_starts: [pages + 1] the same of pages.

    Returns:
        None for the rows if the values are not as many.
    """
    if starts[-1] != page_starts[-1]:
        return None, np.zeros(len(page_starts) - 1, dtype=np.bool_)
    first_rows = np.searchsorted(starts, page_starts)
    return first_rows, (starts[first_rows] != page_starts)[:-1]


def _first_values(counts: Int64Array) -> Int64Array:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])


def _join(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, dtype=np.int64)
