"""Bytes of pages of token lists -> their tokens, without making lists.

In: a run of pages, and the tokens of each row as the catalog has them. Out: the tokens end to end; None where this way
is not open, and the one by `parquet_page` must be taken, which also tells what is wrong.

pyarrow spends more than half of its time on levels, from which it makes lists. Here they are taken off the pages and
compared with the catalog. What is left is a column of plain integers, none of which is missing; pages of it, no longer
compressed, go to pyarrow as a Parquet file in memory:

    PAR1 | dictionary page | a header and values, for each page | footer: one required column | footer's length | PAR1

Must hold: rows begin where the catalog says, or the answer is None; so is it where a checksum of the file is wrong, for
columns whose lists lie in lists, for levels in bits alone, and codecs that pyarrow knows only within files.
Cost: a third to half of what pyarrow takes for the rows; the dictionary is unpacked once, as long as it is kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchmix.sources import thrift
from torchmix.sources.parquet_footer import MAGIC
from torchmix.sources.parquet_layout import PageHeader, read_page_header
from torchmix.sources.parquet_levels import ExpectedRows, UnusualLevels
from torchmix.sources.source import Int64Array, PageRun

_CODECS = {0: "", 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_REQUIRED, _REPEATED = 0, 2
_NO_LEVELS = b"\x15\x06\x15\x06\x00\x00"
_VALUE_BYTES = {1: 4, 2: 8}
"""Of Parquet's types of integers."""
_UNPACKED = "values"
_MANY_ROWS = 100
"""Levels of fewer rows are taken apart sooner than compared."""


def decode_values(run: PageRun) -> NDArray[np.integer[Any]] | None:
    """The tokens of a run's rows, end to end; None where pyarrow must read the rows, or where something is wrong."""
    column = _column(run.schema, run.codec)
    if column is None or run.tokens is None:
        return None
    try:
        dictionary = _dictionary(run, column)
        pages = _values_of_pages(run, column)
        if pages is None or not pages[0]:
            return None
        bodies, first, stop = pages
        values = _read(column, dictionary, bodies)
    except (pa.ArrowException, OSError, EOFError, ValueError):
        return None
    if values.dtype == np.uint64 and len(values) and values.view(np.int64).min() < 0:
        return None
    return values[first:stop]


class _Column(NamedTuple):
    """What the footer says of a column that can be read so."""

    type: int
    footer: tuple[bytes, bytes, bytes, bytes]
    """Of a file of this column alone, not null; see `_footer`."""
    most_definition: int
    codec: str
    """Empty if pages are not compressed."""


class _Page(NamedTuple):
    num_values: int
    encoding: int
    values: memoryview


@lru_cache(maxsize=1024)
def _column(schema: bytes, codec: int) -> _Column | None:
    _, position = thrift.find_field(schema, 0, 2)
    _, num_elements, position = thrift.read_list_head(schema, position)
    element: thrift.Struct = {}
    repetitions, start = [], position
    for _ in range(num_elements):
        start = position
        element, position = thrift.read_struct(schema, start)
        repetitions.append(element.get(3, _REQUIRED))
    if repetitions.count(_REPEATED) != 1 or element.get(1) not in _VALUE_BYTES or codec not in _CODECS:
        return None
    encoded = schema[start:position]
    _, repetition = thrift.find_field(encoded, 0, 3)
    return _Column(
        type=element[1],
        footer=_footer(element[1], encoded[:repetition] + bytes([_REQUIRED]) + encoded[repetition + 1 :], element[4]),
        most_definition=len(repetitions[1:]) - repetitions[1:].count(_REQUIRED),
        codec=_CODECS[codec],
    )


def _values_of_pages(run: PageRun, column: _Column) -> tuple[list[_Page], int, int] | None:
    """The run's pages without levels, and which of their values are those of its rows; None if rows are others."""
    assert run.tokens is not None
    is_empty = run.tokens == 0
    counts = run.tokens + is_empty  # levels of each row
    is_expected = run.num_rows >= _MANY_ROWS and not run.begins_inside_row and not run.rows_behind
    row_begins = UnusualLevels(most=1, usual=1, expected=ExpectedRows(counts) if is_expected else None)
    missing = UnusualLevels(most=column.most_definition, usual=column.most_definition)
    parts: list[tuple[PageHeader, memoryview]] = []
    for header, body in _bodies(run.pages):
        if not header.has_run_levels:
            return None
        parts.append((header, _take_levels_off(header, body, column, row_begins, missing)))
    num_levels = row_begins.num_levels
    begins = row_begins.places()
    if len(begins) != run.num_rows + run.rows_behind or (len(begins) and not run.begins_inside_row and begins[0]):
        return None
    ends = np.append(begins, num_levels)[: run.num_rows + 1]
    if not np.array_equal(ends[1:] - ends[:-1], counts):
        return None
    absent = missing.places() if column.most_definition else np.zeros(0, np.int64)
    of_rows = absent[np.searchsorted(absent, ends[0]) : np.searchsorted(absent, ends[-1])]
    if not np.array_equal(of_rows, ends[:-1][is_empty]):
        return None
    first = int(ends[0] - np.searchsorted(absent, ends[0]))
    each = zip(parts, _values_of_each([header.num_values for header, _ in parts], absent), strict=True)
    pages = [_Page(count, header.encoding, values) for (header, values), count in each if count]  # 0 would end them all
    return pages, first, first + int(run.tokens.sum(dtype=np.int64))


def _take_levels_off(
    header: PageHeader, body: memoryview, column: _Column, row_begins: UnusualLevels, missing: UnusualLevels
) -> memoryview:
    """The values of a data page, which its levels come before: in v2 not compressed, in v1 with their sizes."""
    count = header.num_values
    if header.levels_bytes >= 0:
        levels = bytes(body[: header.levels_bytes])
        position = row_begins.read(levels, 0, count)
        if column.most_definition:
            missing.read(levels, position, count)
        values = body[header.levels_bytes :]
        if not header.is_compressed:
            return values
        return _unpack(values, column.codec, header.decoded_bytes - header.levels_bytes)
    content = _unpack(body, column.codec, header.decoded_bytes)
    position = 0
    for levels_of in (row_begins, missing) if column.most_definition else (row_begins,):
        size = int.from_bytes(content[position : position + 4], "little")
        levels_of.read(bytes(content[position + 4 : position + 4 + size]), 0, count)
        position += 4 + size
    return content[position:]


def _values_of_each(levels_of_page: Sequence[int], absent: Int64Array) -> list[int]:
    """Values of each page: its levels, less those that say that there is none."""
    if not len(absent):
        return list(levels_of_page)
    stop = np.cumsum(levels_of_page)
    before = np.searchsorted(absent, stop)
    counts: list[int] = (np.array(levels_of_page) - np.diff(before, prepend=0)).tolist()
    return counts


def _bodies(pages: bytes | memoryview) -> Iterator[tuple[PageHeader, memoryview]]:
    """Header and body of each data page.

    Raises:
        EOFError, ValueError: They are no whole pages, or a checksum is wrong.
    """
    view, position = memoryview(pages), 0
    while position < len(view):
        header = read_page_header(pages, position)
        if header.stop > len(view):
            raise EOFError(f"page of {header.stop - position} bytes")
        body = view[header.body : header.stop]
        if header.checksum is not None and zlib.crc32(body) != header.checksum:
            raise ValueError("wrong checksum")
        if header.is_data:
            yield header, body
        position = header.stop


def _unpack(body: memoryview, codec: str, num_bytes: int) -> memoryview:
    return memoryview(pa.Codec(codec).decompress(body, decompressed_size=num_bytes)) if codec else body


def _dictionary(run: PageRun, column: _Column) -> bytes:
    """The dictionary page, not compressed; empty if there is none."""
    if not len(run.dictionary):
        return b""
    if run.memo is not None and _UNPACKED in run.memo:
        return run.memo[_UNPACKED]
    header = read_page_header(run.dictionary, 0)
    body = memoryview(run.dictionary)[header.body : header.stop]
    if not header.is_dictionary or (header.checksum is not None and zlib.crc32(body) != header.checksum):
        raise ValueError("wrong header or checksum")
    values = _unpack(body, column.codec, header.decoded_bytes)
    num_values = len(values) // _VALUE_BYTES[column.type]
    # DictionaryPageHeader: num_values, encoding
    page = b"".join(
        [_page_header(_DICTIONARY_PAGE, len(values)), b"\x4c\x15", _integer(num_values), b"\x15\x00\x00\x00", values]
    )
    if run.memo is not None:
        run.memo[_UNPACKED] = page
    return page


# Thrift's compact encoding of what differs between runs; a byte is the step from the field before, and a type.


@lru_cache(maxsize=4096)
def _integer(value: int) -> bytes:
    return thrift.write_varint(value << 1)


def _page_header(kind: int, num_bytes: int) -> bytes:
    """The beginning of a PageHeader: type, both sizes."""
    size = thrift.write_varint(num_bytes << 1)
    return b"".join([b"\x15", _integer(kind), b"\x15", size, b"\x15", size])


def _read(column: _Column, dictionary: bytes, pages: Sequence[_Page]) -> NDArray[np.integer[Any]]:
    parts: list[bytes | memoryview] = [MAGIC, dictionary]
    for page in pages:
        # DataPageHeader: num_values, encoding, those of levels
        num_values, encoding = _integer(page.num_values), _integer(page.encoding)
        parts += [_page_header(_DATA_PAGE, len(page.values)), b"\x2c\x15", num_values, b"\x15", encoding, _NO_LEVELS]
        parts.append(page.values)
    num_bytes = _integer(sum(map(len, parts)) - len(MAGIC))
    num_values = _integer(sum(page.num_values for page in pages))
    first, second, third, fourth = column.footer
    # FileMetaData: version, schema, num_rows, row groups; ColumnMetaData from num_values on; RowGroup's sizes
    footer = b"".join(
        [
            *(first, num_values, second, num_values, b"\x16", num_bytes, b"\x16", num_bytes),
            *(b"\x26", _integer(len(MAGIC) + len(dictionary)), third if dictionary else b"\x00\x00", b"\x16"),
            *(num_bytes, b"\x16", num_values, fourth),
        ]
    )
    content = b"".join([*parts, footer, len(footer).to_bytes(4, "little"), MAGIC])
    array = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False).read(use_threads=False).column(0)
    values: NDArray[np.integer[Any]] = array.to_numpy() if array.num_chunks != 1 else array.chunk(0).to_numpy()
    return values


def _footer(type: int, element: bytes, name: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """What of a footer is the same for all runs; between come numbers."""
    root = thrift.write_struct([(4, thrift.BINARY, b"schema"), (5, thrift.I32, 1)])
    schema = thrift.write_list(thrift.STRUCT, [root, element])
    head = thrift.write_struct([(1, thrift.I32, 2), (2, thrift.LIST, schema)], end=False)
    metadata = thrift.write_struct(
        [
            (1, thrift.I32, type),
            (
                2,
                thrift.LIST,
                thrift.write_list(thrift.I32, [b"\x00"]),
            ),  # a list that must be there; pages name their own
            (3, thrift.LIST, thrift.write_list(thrift.BINARY, [thrift.write_varint(len(name)) + name])),
            (4, thrift.I32, 0),
        ],
        end=False,
    )
    of_one_struct = bytes([1 << 4 | thrift.STRUCT])
    chunk = thrift.write_struct([(2, thrift.I64, 0), (3, thrift.STRUCT, metadata)], end=False)
    group = thrift.write_struct([(1, thrift.LIST, of_one_struct + chunk)], end=False)
    groups = thrift.write_struct([(4, thrift.LIST, of_one_struct + group)], after=3, end=False)
    with_dictionary = thrift.write_struct([(11, thrift.I64, len(MAGIC))], after=9) + b"\x00"
    return head + b"\x16", groups + b"\x16", with_dictionary, b"\x00\x00"
