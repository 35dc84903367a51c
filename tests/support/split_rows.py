"""Parquet files whose pages begin inside a row, as old pyarrow and DuckDB write them and today's pyarrow does not.

The pages are put together here from levels and values: any nesting of nullable lists and structs of one field around
int32 or int64, plain or with a dictionary, of any codec. pyarrow reads such files whole, so it stays the oracle.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.formats.parquet import thrift

INTEGERS = pa.list_(pa.int32())
CODEC_NUMBERS = {"none": 0, "snappy": 1, "gzip": 2, "brotli": 4, "zstd": 6, "lz4_raw": 7}
_PLAIN, _DICTIONARY, _RUNS = 0, 8, 3

Level = tuple[int, int, int | None]
"""Repetition, definition, and the value or None."""


def make_split_file(
    path: Path,
    documents: Sequence[Any],
    *,
    page_values: int,
    page_version: int = 1,
    column: str = "input_ids",
    type: pa.DataType = INTEGERS,
    codec: str = "none",
    dictionary: bool = False,
) -> Path:
    """Write one row group whose pages have `page_values` values each, wherever rows begin.

    A null or empty list counts as one value. `page_version` is 1 or 2; the rows that version 2 tells are those that
    begin in the page. `dictionary` and `codec` are the column chunk's.
    """
    levels = [level for document in documents for level in _stripe(document, type, 0, 0, 0)]
    template = io.BytesIO()
    pq.write_table(pa.table({column: pa.array([], type)}), template, store_schema=False)
    leaf = pq.ParquetFile(template).schema.column(0)
    entries = sorted({value for _, _, value in levels if value is not None}) if dictionary else []
    width = {"INT32": "<i4", "INT64": "<i8"}[leaf.physical_type]
    writer = _PageWriter(page_version, codec, leaf.max_definition_level, np.dtype(width), entries)
    pages = [writer.dictionary_page()] if dictionary else []
    for start in range(0, len(levels), page_values):
        pages.append(writer.data_page(levels[start : start + page_values]))
    body = b"".join(pages)
    names = [name.encode() for name in leaf.path.split(".")]
    first_page = 4 + (len(pages[0]) if dictionary else 0)
    chunk_fields: list[tuple[int, int, int | bytes]] = [
        (1, thrift.I32, 1 if width == "<i4" else 2),
        (2, thrift.LIST, thrift.write_list(thrift.I32, [b"\x00", b"\x06"])),
        (3, thrift.LIST, thrift.write_list(thrift.BINARY, [bytes([len(name)]) + name for name in names])),
        (4, thrift.I32, CODEC_NUMBERS[codec]),
        (5, thrift.I64, len(levels)),
        (6, thrift.I64, len(body)),
        (7, thrift.I64, len(body)),
        (9, thrift.I64, first_page),
    ]
    if dictionary:
        chunk_fields.append((11, thrift.I64, 4))
    chunk = thrift.write_struct([(2, thrift.I64, 0), (3, thrift.STRUCT, thrift.write_struct(chunk_fields))])
    group = thrift.write_struct(
        [
            (1, thrift.LIST, thrift.write_list(thrift.STRUCT, [chunk])),
            (2, thrift.I64, len(body)),
            (3, thrift.I64, len(documents)),
        ]
    )
    footer = thrift.write_struct(
        [
            (1, thrift.I32, 2),
            (2, thrift.LIST, _schema_of(template.getvalue())),
            (3, thrift.I64, len(documents)),
            (4, thrift.LIST, thrift.write_list(thrift.STRUCT, [group])),
        ]
    )
    path.write_bytes(b"PAR1" + body + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return path


def _stripe(value: Any, type: pa.DataType, repetition: int, definition: int, depth: int) -> Iterator[Level]:
    """Levels of one value, as in Dremel's paper; everything is nullable."""
    if value is None:
        yield repetition, definition, None
    elif isinstance(type, pa.ListType):
        if not value:
            yield repetition, definition + 1, None
        for i, entry in enumerate(value):
            yield from _stripe(entry, type.value_type, depth + 1 if i else repetition, definition + 2, depth + 1)
    elif isinstance(type, pa.StructType):
        [field] = type
        yield from _stripe(value[field.name], field.type, repetition, definition + 1, depth)
    else:
        yield repetition, definition + 1, value


class _PageWriter:
    def __init__(
        self, version: int, codec: str, most_definition: int, width: np.dtype[Any], entries: list[int]
    ) -> None:
        self.version, self.codec, self.width = version, codec, width
        self.most_definition = most_definition
        self.entries = {value: index for index, value in enumerate(entries)}

    def dictionary_page(self) -> bytes:
        body = np.array(list(self.entries), self.width).tobytes()
        data = thrift.write_struct([(1, thrift.I32, len(self.entries)), (2, thrift.I32, _PLAIN)])
        return self._page(2, 7, data, b"", body)

    def data_page(self, levels: list[Level]) -> bytes:
        runs = [_run_lengths(np.array([level[place] for level in levels]), 1) for place in (0, 1)]
        values = [value for _, definition, value in levels if definition == self.most_definition]
        encoding = _PLAIN
        if self.entries:
            encoding, index_bytes = _DICTIONARY, 1 + (len(self.entries) > 256)
            indices = np.array([self.entries[value] for value in values], np.int64)
            content = bytes([8 * index_bytes]) + _run_lengths(indices, index_bytes)
        else:
            content = np.array(values, self.width).tobytes()
        if self.version == 1:
            fields = [len(levels), encoding, _RUNS, _RUNS]
            body = b"".join(len(part).to_bytes(4, "little") + part for part in runs) + content
            return self._page(0, 5, _numbered(fields), b"", body)
        num_rows = sum(repetition == 0 for repetition, _, _ in levels)
        fields = [len(levels), len(levels) - len(values), num_rows, encoding, len(runs[1]), len(runs[0])]
        return self._page(3, 8, _numbered(fields), b"".join(runs), content)

    def _page(self, kind: int, field: int, data_header: bytes, plain: bytes, body: bytes) -> bytes:
        """`plain` is never compressed."""
        packed = body if self.codec == "none" else pa.Codec(self.codec).compress(body, asbytes=True)
        header = thrift.write_struct(
            [
                (1, thrift.I32, kind),
                (2, thrift.I32, len(plain) + len(body)),
                (3, thrift.I32, len(plain) + len(packed)),
                (field, thrift.STRUCT, data_header),
            ]
        )
        return header + plain + packed


def _numbered(values: list[int]) -> bytes:
    return thrift.write_struct([(number, thrift.I32, value) for number, value in enumerate(values, start=1)])


def _run_lengths(values: np.ndarray, value_bytes: int) -> bytes:
    """Small integers as runs of equal ones: the RLE half of Parquet's hybrid encoding."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    counts = np.diff(starts, append=len(values))
    return b"".join(
        thrift.write_varint(int(count) << 1) + int(values[start]).to_bytes(value_bytes, "little")
        for start, count in zip(starts, counts, strict=True)
    )


def _schema_of(content: bytes) -> bytes:
    """The encoded list of SchemaElements of a Parquet file."""
    footer = content[-8 - int.from_bytes(content[-8:-4], "little") : -8]
    _, start = thrift.find_field(footer, 0, 2)
    _, num_elements, position = thrift.read_list_head(footer, start)
    for _ in range(num_elements):
        _, position = thrift.read_struct(footer, position)
    return footer[start:position]
