"""Bytes of pages of token lists -> their tokens, without making lists.

In: runs of pages, and the tokens of each row as the catalog has them. Out: the tokens of each run, end to end; None
where this way is not open, and the one by `parquet_page` must be taken, which also tells what is wrong.

pyarrow spends more than half of its time on levels, from which it makes lists. Here they are taken off the pages and
compared with the catalog, or not even that where the bytes are known to be those that were indexed. What is left are
pages of plain integers, none of which is missing, for `parquet_plain`.

Must hold: rows begin where the catalog says, or the answer is None; so is it where a checksum of the file is wrong, for
columns whose lists lie in lists, for pages that may have bad rows, for levels in bits alone, and codecs that pyarrow
knows only within files. A run's answer depends on no other run.
Cost: a third to half of what pyarrow takes for the rows; the dictionary is unpacked once, as long as it is kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.formats.decompress import decompress
from torchmix.formats.good_rows import passes_over_rows
from torchmix.formats.parquet import thrift
from torchmix.formats.parquet.layout import PageHeader, read_page_header
from torchmix.formats.parquet.levels import ExpectedRows, UnusualLevels
from torchmix.formats.parquet.plain import (
    REQUIRED,
    VALUE_BYTES,
    PlainChunk,
    PlainColumn,
    PlainPage,
    dictionary_page,
    plain_column,
    read_chunks,
)
from torchmix.formats.source import PageRun

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
