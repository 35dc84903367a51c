"""Bytes of pages of integers and of token lists -> their tokens, without making lists."""

from __future__ import annotations

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.formats.column import passes_over_rows
from torchmix.formats.decompress import decompress
from torchmix.formats.parquet import thrift
from torchmix.formats.parquet.footer import MAGIC, PageHeader, read_page_header
from torchmix.formats.source import PageRun

# --- Parquet's levels: runs of small numbers, of which nearly all are alike -> where the others are.
#
# Every number is looked at; levels that end too early are an error. What is expected only saves time: bytes that are
# those of the expected rows need not be taken apart. Cost: 10 ns a row as expected, else half a microsecond; 20
# microseconds a call. Encoding: https://parquet.apache.org/docs/file-format/data-pages/encodings/#RLE

_LEAST_LEVELS, _MOST_LEVELS = 16, 1 << 26
"""Rows of so many levels are written alike by all encoders known, if the row before is one, too."""
_MOST_MISSES = 8
_ONE_GROUP, _FIRST_OF_EIGHT = 3, 0xFE


class UnusualLevels:
    """Collects the places of unusual levels over several pages."""

    __slots__ = (
        "_alone",
        "_bits",
        "_expected",
        "_first",
        "_num_bits",
        "_parts",
        "_stop",
        "_usual",
        "_width",
        "num_levels",
    )

    def __init__(self, *, most: int, usual: int, expected: ExpectedRows | None = None) -> None:
        """Nothing is read yet.

        Args:
            most: The highest level there is, 1 or more.
            usual: The one that nearly all are.
            expected: For repetition levels up to 1: where rows should begin.
        """
        self._width = most.bit_length()
        self._usual = usual
        self._expected = expected
        self._parts: list[Int64Array] = []
        # Groups of numbers in bits: their first place, their size, and the end of their page.
        self._bits = bytearray()
        self._alone: list[int] = []
        self._first: list[int] = []
        self._num_bits: list[int] = []
        self._stop: list[int] = []
        self.num_levels = 0
        """Levels read so far."""

    def read(self, levels: bytes, position: int, count: int) -> int:
        """Read the levels of the next page.

        Args:
            levels: Hold them from `position` on.
            position: The position of the first run.
            count: How many there are.

        Returns:
            The position behind them.

        Raises:
            ValueError: They end before that.
        """
        place, width, usual, expected = self.num_levels, self._width, self._usual, self._expected
        stop = self.num_levels = place + count
        try:
            while place < stop:
                if expected is not None and (found := expected.match(levels, position, place, stop)) is not None:
                    part, position = found
                    self._parts.append(part[:-1])
                    place = int(part[-1])
                    continue
                header = levels[position]
                position += 1
                if header > 127:
                    header &= 127
                    shift = 7
                    while (byte := levels[position]) > 127:
                        header |= (byte & 127) << shift
                        shift += 7
                        position += 1
                    header |= byte << shift
                    position += 1
                size = header >> 1
                if header == _ONE_GROUP and levels[position] == _FIRST_OF_EIGHT and usual == width == 1:
                    self._alone.append(place)  # as a row of eight levels or more begins
                    place += 8
                    position += 1
                elif header & 1:
                    end = position + size * width
                    self._bits += levels[position:end]
                    self._first.append(place)
                    self._num_bits.append(8 * size * width)
                    self._stop.append(stop)
                    place += 8 * size
                    position = end
                else:
                    if levels[position] != usual:
                        self._parts.append(np.arange(place, min(place + size, stop)))
                    place += size
                    position += 1
        except IndexError:
            position = len(levels) + 1
        if position > len(levels):
            raise ValueError(f"{count} levels continue behind their {len(levels)} bytes")
        return position

    def places(self) -> Int64Array:
        """[n] places of levels other than the usual one, counted through all pages; rising."""
        parts = [*self._parts]
        if self._alone:
            parts.append(np.array(self._alone, np.int64))
        if self._bits:
            parts.append(self._places_in_bits())
        if len(parts) == 1:
            return parts[0]
        return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)

    def _places_in_bits(self) -> Int64Array:
        numbers = np.unpackbits(np.frombuffer(self._bits, np.uint8), bitorder="little")
        if self._width > 1:
            numbers = np.packbits(numbers.reshape(-1, self._width), axis=1, bitorder="little")[:, 0]
        found = np.flatnonzero(numbers != self._usual)
        sizes = np.array(self._num_bits, np.int64) // self._width
        ends = np.cumsum(sizes)
        run = np.searchsorted(ends, found, side="right")
        places = found + (np.array(self._first, np.int64) - (ends - sizes))[run]
        return places[places < np.array(self._stop, np.int64)[run]]  # the last group of a page is filled up


class ExpectedRows:
    """The repetition levels that rows of one list each should have: as bytes, and where they begin."""

    def __init__(self, counts: NDArray[np.integer[Any]]) -> None:
        """`counts`: [rows] levels of each row, 1 or more; the first begins at place 0."""
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        self._bytes, self._offsets = _encode(counts)
        is_other = (counts < _LEAST_LEVELS) | (counts >= _MOST_LEVELS)
        self._others = [*np.flatnonzero(is_other).tolist(), len(counts)]
        self._next_place = 0
        self._places: list[int] = self._starts.tolist()
        self._misses = 0

    def match(self, levels: bytes, position: int, place: int, stop: int) -> tuple[Int64Array, int] | None:
        """Compare the levels with the rows from `place` on, up to one of another kind or the end of the page.

        Returns:
            If they are those: the places of these rows and of what follows, and the position behind them; else None.
        """
        if not self._next_place <= place < self._places[-1]:
            return None
        row = bisect_left(self._places, place)
        end = self._others[bisect_left(self._others, row)]
        end = bisect_right(self._places, stop, row, end + 1) - 1
        if row >= end or self._places[row] != place:
            return None
        start, size = self._offsets[row], int(self._offsets[end] - self._offsets[row])
        if levels[position : position + size] != self._bytes[start : start + size]:
            self._misses += 1
            if self._misses > _MOST_MISSES:
                self._next_place = self._places[-1] + 1
            return None
        return self._starts[row : end + 1], position + size


def _encode(counts: NDArray[np.integer[Any]]) -> tuple[bytes, Int64Array]:
    """Rows of _LEAST_LEVELS or more as runs: eight numbers in bits, of which the first is 0, and then nothing but 1.

    Returns:
        The bytes, and [rows + 1] where in them each row begins; anything for other rows.
    """
    doubled = (np.maximum(counts, _LEAST_LEVELS) - 8) << 1  # the header of the run of 1
    sizes = 4 + (doubled > 0x7F) + (doubled > 0x3FFF).astype(np.int64) + (doubled > 0x1FFFFF)
    cells = np.empty((len(counts), 7), np.uint8)
    cells[:, 0], cells[:, 1] = 3, 0xFE
    for k in range(4):
        cells[:, 2 + k] = (doubled >> 7 * k) & 0x7F | 0x80
    last = np.arange(len(counts)) * 7 + sizes - 1
    flat = cells.ravel()
    flat[last - 1] &= 0x7F
    flat[last] = 1
    return cells[np.arange(7) < sizes[:, None]].tobytes(), np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


# --- Pages of integers, none of which is missing -> arrays, by pyarrow and a Parquet file in memory.
#
#     PAR1 | dictionary page | a header and values, for each page | ... | footer: one required column | its length |
#     PAR1
#
# Cost: decoding as pyarrow does it, 2.5 to 3.5 ns an integer of a dictionary; about 60 us a call and 20 us a chunk.

VALUE_BYTES = {1: 4, 2: 8}
"""Bytes of a value of Parquet's types of integers."""
REQUIRED = 0

_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_NO_LEVELS = b"\x15\x06\x15\x06\x00\x00"


class PlainColumn(NamedTuple):
    """What the footer says of a column, without its numbers."""

    head: bytes
    """Version and schema, up to the number of rows."""
    chunk: bytes
    """A row group, up to its number of values."""


class PlainPage(NamedTuple):
    """A data page."""

    num_values: int
    """1 or more."""
    encoding: int
    values: bytes | memoryview


class PlainChunk(NamedTuple):
    """Pages that share a dictionary."""

    dictionary: bytes
    """As `dictionary_page` made it; empty if there is none."""
    pages: Sequence[PlainPage]


def plain_column(element: bytes, type: int, name: bytes) -> PlainColumn:
    """A column of one integer a row, none missing.

    Args:
        element: Its SchemaElement, encoded, of which `type` and `name` are two fields.
        type: A key of VALUE_BYTES.
        name: As the element has it.
    """
    root = thrift.write_struct([(4, thrift.BINARY, b"schema"), (5, thrift.I32, 1)])
    schema = thrift.write_list(thrift.STRUCT, [root, _with_repetition(element)])
    any_encoding = thrift.write_list(thrift.I32, [b"\x00"])  # a list that must be there; pages name their own
    path = thrift.write_list(thrift.BINARY, [thrift.write_varint(len(name)) + name])
    # Left open are the metadata, in which the number of values is next, the chunk, and the row group around it.
    metadata = thrift.write_struct(
        [(1, thrift.I32, type), (2, thrift.LIST, any_encoding), (3, thrift.LIST, path), (4, thrift.I32, 0)], end=False
    )
    chunk = thrift.write_struct([(2, thrift.I64, 0), (3, thrift.STRUCT, metadata)], end=False)
    group = thrift.write_struct([(1, thrift.LIST, thrift.write_list(thrift.STRUCT, [chunk]))], end=False)
    head = thrift.write_struct([(1, thrift.I32, 2), (2, thrift.LIST, schema)], end=False)
    return PlainColumn(head=head + b"\x16", chunk=group + b"\x16")


def dictionary_page(values: bytes | memoryview, value_bytes: int) -> bytes:
    """A dictionary page of integers end to end."""
    # DictionaryPageHeader: num_values, encoding
    head = b"".join([b"\x4c\x15", _integer(len(values) // value_bytes), b"\x15\x00\x00\x00"])
    return b"".join([_page_header(_DICTIONARY_PAGE, len(values)), head, values])


def read_chunks(column: PlainColumn, chunks: Sequence[PlainChunk]) -> list[NDArray[np.integer[Any]]]:
    """The integers of each chunk, of the type that the column's schema names; each in memory of its own.

    Raises:
        pa.ArrowException, OSError, ValueError: Pages do not decode, or to fewer integers than they say.
    """
    parts: list[bytes | memoryview] = [MAGIC]
    position, counts, groups = len(MAGIC), [], []
    for dictionary, pages in chunks:
        start = position
        parts.append(dictionary)
        first_page = position = position + len(dictionary)
        for page in pages:
            header = _data_page_header(page)
            parts += [header, page.values]
            position += len(header) + len(page.values)
        counts.append(sum(page.num_values for page in pages))
        groups.append(_row_group(column, counts[-1], start, first_page, position))
    footer = b"".join([column.head, _integer(sum(counts)), b"\x19", thrift.write_list(thrift.STRUCT, groups), b"\x00"])
    content = b"".join([*parts, footer, len(footer).to_bytes(4, "little"), MAGIC])
    file = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False)
    found = []
    for i, count in enumerate(counts):
        array = file.read_row_group(i, use_threads=False).column(0)
        if len(array) != count:
            raise ValueError(f"{len(array)} values of {count}")
        found.append(array.to_numpy() if array.num_chunks != 1 else array.chunk(0).to_numpy())
    return found


# Thrift's compact encoding of what differs between calls; a byte is the step from the field before, and a type.


@lru_cache(maxsize=4096)
def _integer(value: int) -> bytes:
    return thrift.write_varint(value << 1)


def _page_header(kind: int, num_bytes: int) -> bytes:
    """The beginning of a PageHeader: type, both sizes."""
    size = thrift.write_varint(num_bytes << 1)
    return b"".join([b"\x15", _integer(kind), b"\x15", size, b"\x15", size])


def _data_page_header(page: PlainPage) -> bytes:
    """DataPageHeader: num_values, encoding, those of levels."""
    head, num_values = _page_header(_DATA_PAGE, len(page.values)), _integer(page.num_values)
    return b"".join([head, b"\x2c\x15", num_values, b"\x15", _integer(page.encoding), _NO_LEVELS])


def _row_group(column: PlainColumn, count: int, start: int, first_page: int, stop: int) -> bytes:
    """RowGroup of a chunk at [start, stop), whose data pages begin at `first_page`, behind a dictionary if at all."""
    num_values, num_bytes = _integer(count), _integer(stop - start)
    dictionary = b"\x26" + _integer(start) if first_page > start else b""
    return b"".join(
        [
            *(column.chunk, num_values, b"\x16", num_bytes, b"\x16", num_bytes),  # both sizes
            *(b"\x26", _integer(first_page), dictionary, b"\x00\x00"),  # ends the metadata and the chunk
            *(b"\x16", num_bytes, b"\x16", num_values, b"\x00"),
        ]
    )


def _with_repetition(element: bytes) -> bytes:
    """The SchemaElement of a column that is there once in each row."""
    _, repetition = thrift.find_field(element, 0, 3)
    return element[:repetition] + bytes([REQUIRED]) + element[repetition + 1 :]


# --- Bytes of pages of token lists -> their tokens, without making lists.
#
# pyarrow spends more than half of its time on levels, from which it makes lists. Here they are taken off the pages and
# compared with the catalog, or not even that where the bytes are known to be those that were indexed. What is left are
# pages of plain integers, none of which is missing.
#
# Rows begin where the catalog says, or the answer is None; so is it where a checksum of the file is wrong, for columns
# whose lists lie in lists, for pages that may have bad rows, for levels in bits alone, and codecs that pyarrow knows
# only within files. A run's answer depends on no other run. Cost: a third to half of what pyarrow takes for the rows;
# the dictionary is unpacked once, as long as it is kept.

_CODECS = {0: "", 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_REPEATED = 2
_UNPACKED = "values"
_MANY_ROWS = 100
"""Levels of fewer rows are taken apart sooner than compared."""
_DAMAGE = (pa.ArrowException, OSError, EOFError, ValueError)


def decode_values(runs: Sequence[PageRun]) -> list[NDArray[np.integer[Any]] | None]:
    """The tokens of the rows of each run, end to end, in memory of their own.

    Returns:
        None for a run whose rows pyarrow must read, or where something is wrong.
    """
    found: list[NDArray[np.integer[Any]] | None] = [None] * len(runs)
    of_column: dict[PlainColumn, list[tuple[int, _Taken]]] = {}
    for i, run in enumerate(runs):
        column = _column(run.schema, run.kind)
        taken = None if column is None else _take(run, column)
        if column is not None and taken is not None:
            of_column.setdefault(column.plain, []).append((i, taken))
    for plain, several in of_column.items():
        numbers, takens = zip(*several, strict=True)
        for i, values in zip(numbers, _read(plain, takens), strict=True):
            found[i] = values
    return found


class _Column(NamedTuple):
    """What the footer says of a column that can be read so."""

    plain: PlainColumn
    value_bytes: int
    most_definition: int
    codec: str
    """Empty if pages are not compressed."""


class _Taken(NamedTuple):
    """A run's integers, and which of them are its rows'."""

    chunk: PlainChunk
    first: int
    stop: int


@lru_cache(maxsize=1024)
def _column(schema: bytes, codec: int) -> _Column | None:
    _, position = thrift.find_field(schema, 0, 2)
    _, num_elements, position = thrift.read_list_head(schema, position)
    element: thrift.Struct = {}
    repetitions, start = [], position
    for _ in range(num_elements):
        start = position
        element, position = thrift.read_struct(schema, start)
        repetitions.append(element.get(3, REQUIRED))
    if repetitions.count(_REPEATED) != 1 or element.get(1) not in VALUE_BYTES or codec not in _CODECS:
        return None
    return _Column(
        plain=plain_column(schema[start:position], element[1], element[4]),
        value_bytes=VALUE_BYTES[element[1]],
        most_definition=len(repetitions[1:]) - repetitions[1:].count(REQUIRED),
        codec=_CODECS[codec],
    )


def _read(column: PlainColumn, takens: Sequence[_Taken]) -> list[NDArray[np.integer[Any]] | None]:
    try:
        arrays = read_chunks(column, [taken.chunk for taken in takens])
    except _DAMAGE:
        if len(takens) == 1:
            return [None]
        return [_read(column, [taken])[0] for taken in takens]
    return [
        None if values.dtype == np.uint64 and values.view(np.int64).min() < 0 else values[first:stop]
        for values, (_, first, stop) in zip(arrays, takens, strict=True)
    ]


def _take(run: PageRun, column: _Column) -> _Taken | None:
    """What of a run is left without levels and compression; None if rows are others, or something is wrong."""
    if run.tokens is None or passes_over_rows(run):  # values of a bad row are in the file, and not among its tokens
        return None
    num_tokens = int(run.tokens.sum(dtype=np.int64) if run.offsets is None else run.offsets[-1])
    try:
        dictionary = _dictionary(run, column)
        parts = [(header, *_split(header, body, column, run)) for header, body in _bodies(run)]
        levels_of_page = [header.num_values for header, _, _ in parts]
        if run.is_as_indexed and not run.begins_inside_row and not run.rows_behind:
            first, absent = 0, _empty_rows(run.tokens, sum(levels_of_page) - num_tokens)
        else:
            first, absent = _compare_levels(run, column, parts)
    except _DAMAGE:
        return None
    counts = _values_of_each(levels_of_page, absent)
    each = zip(parts, counts, strict=True)
    # A page without values would end them all.
    pages = [PlainPage(count, header.encoding, values) for (header, _, values), count in each if count]
    if not pages:
        return None
    return _Taken(PlainChunk(dictionary, pages), first, first + num_tokens)


_Parts = Sequence[tuple[PageHeader, Sequence[memoryview], memoryview]]
"""Header, levels and values of each page of a run."""


def _empty_rows(tokens: Int32Array, num_absent: int) -> Int64Array:
    """[num_absent] levels without a value, of pages that are as they were indexed: one for each empty row.

    Raises:
        ValueError: There are not so many.
    """
    if not num_absent:
        return np.zeros(0, np.int64)
    is_empty = tokens == 0
    if np.count_nonzero(is_empty) != num_absent:
        raise ValueError("other rows are empty")
    levels: Int64Array = np.cumsum(tokens + is_empty, dtype=np.int64)[is_empty] - 1
    return levels


def _compare_levels(run: PageRun, column: _Column, parts: _Parts) -> tuple[int, Int64Array]:
    """Find where rows begin, and what is missing.

    Returns:
        The first value of the run's rows, and [n] levels without a value.

    Raises:
        ValueError: Rows are not as the catalog says.
    """
    assert run.tokens is not None
    is_empty = run.tokens == 0
    counts = run.tokens + is_empty  # levels of each row
    is_expected = run.num_rows >= _MANY_ROWS and not run.begins_inside_row and not run.rows_behind
    row_begins = UnusualLevels(most=1, usual=1, expected=ExpectedRows(counts) if is_expected else None)
    missing = UnusualLevels(most=column.most_definition, usual=column.most_definition)
    for header, levels, _ in parts:
        repetition = bytes(levels[0])
        position = row_begins.read(repetition, 0, header.num_values)
        if len(levels) > 1:
            missing.read(bytes(levels[1]), 0, header.num_values)
        elif column.most_definition:
            missing.read(repetition, position, header.num_values)
    num_levels = row_begins.num_levels
    begins = row_begins.places()
    if len(begins) != run.num_rows + run.rows_behind or (len(begins) and not run.begins_inside_row and begins[0]):
        raise ValueError("other rows")
    ends = np.append(begins, num_levels)[: run.num_rows + 1]
    if not np.array_equal(ends[1:] - ends[:-1], counts):
        raise ValueError("rows of other lengths")
    absent = missing.places() if column.most_definition else np.zeros(0, np.int64)
    of_rows = absent[np.searchsorted(absent, ends[0]) : np.searchsorted(absent, ends[-1])]
    if not np.array_equal(of_rows, ends[:-1][is_empty]):
        raise ValueError("other rows are empty")
    return int(ends[0] - np.searchsorted(absent, ends[0])), absent


def _split(header: PageHeader, body: memoryview, column: _Column, run: PageRun) -> tuple[list[memoryview], memoryview]:
    """Levels and values of a data page.

    Returns:
        In v2 all levels are one piece, which is not compressed; in v1 they are one or two, each with its size before
        it, and compressed with the values.
    """
    if not header.has_run_levels:
        raise ValueError("levels in bits")
    if header.levels_bytes >= 0:
        values = body[header.levels_bytes :]
        if header.is_compressed:
            values = _unpack(values, column, header.decoded_bytes - header.levels_bytes, run)
        return [body[: header.levels_bytes]], values
    content = _unpack(body, column, header.decoded_bytes, run)
    position, levels = 0, []
    for _ in range(2 if column.most_definition else 1):
        size = int.from_bytes(content[position : position + 4], "little")
        levels.append(content[position + 4 : position + 4 + size])
        position += 4 + size
    return levels, content[position:]


def _values_of_each(levels_of_page: Sequence[int], absent: Int64Array) -> list[int]:
    """Values of each page: its levels, less those that say that there is none."""
    if not len(absent):
        return list(levels_of_page)
    stop = np.cumsum(levels_of_page)
    before = np.searchsorted(absent, stop)
    counts: list[int] = (np.array(levels_of_page) - np.diff(before, prepend=0)).tolist()
    return counts


def _bodies(run: PageRun) -> Iterator[tuple[PageHeader, memoryview]]:
    """Header and body of each data page.

    Raises:
        EOFError, ValueError: They are no whole pages, or a checksum is wrong.
    """
    pages, position = run.pages, 0
    view = memoryview(pages)
    while position < len(view):
        header = read_page_header(pages, position)
        if header.stop > len(view):
            raise EOFError(f"page of {header.stop - position} bytes")
        body = view[header.body : header.stop]
        if not run.is_as_indexed and header.checksum is not None and zlib.crc32(body) != header.checksum:
            raise ValueError("wrong checksum")
        if header.is_data:
            yield header, body
        position = header.stop


def _unpack(body: memoryview, column: _Column, num_bytes: int, run: PageRun) -> memoryview:
    if not column.codec:
        return body
    return memoryview(decompress(body, column.codec, num_bytes, is_proven=run.is_as_indexed))


def _dictionary(run: PageRun, column: _Column) -> bytes:
    """The dictionary page, not compressed; empty if there is none."""
    if not len(run.companion):
        return b""
    if run.memo is not None and _UNPACKED in run.memo:
        return run.memo[_UNPACKED]
    header = read_page_header(run.companion, 0)
    body = memoryview(run.companion)[header.body : header.stop]
    if not header.is_dictionary or (header.checksum is not None and zlib.crc32(body) != header.checksum):
        raise ValueError("wrong header or checksum")
    page = dictionary_page(_unpack(body, column, header.decoded_bytes, run), column.value_bytes)
    if run.memo is not None:
        run.memo[_UNPACKED] = page
    return page
