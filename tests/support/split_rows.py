"""Parquet files whose pages begin inside a row, as old pyarrow and DuckDB write them and today's pyarrow does not.

The pages are put together here from levels and values: list<int32> (nullable list, nullable element), plain encoding,
no compression. pyarrow reads such files whole, so it stays the oracle.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.sources import thrift

_NULL_LIST, _EMPTY_LIST, _ELEMENT = 0, 1, 3  # definition levels; 2 is a null element


def make_split_file(
    path: Path,
    documents: Sequence[Sequence[int] | None],
    *,
    page_values: int,
    page_version: int = 1,
    column: str = "input_ids",
) -> Path:
    """Write one row group whose pages have `page_values` values each, wherever rows begin.

    A null or empty document counts as one value. `page_version` is 1 or 2; the rows that version 2 tells are those that
    begin in the page.
    """
    repetition, definition, values = _levels(documents)
    pages = []
    for start in range(0, len(repetition), page_values):
        some = slice(start, start + page_values)
        element = definition[some] == _ELEMENT
        before = int((definition[:start] == _ELEMENT).sum())
        pages.append(_page(repetition[some], definition[some], values[before : before + element.sum()], page_version))
    body = b"".join(pages)
    template = io.BytesIO()
    pq.write_table(pa.table({column: pa.array([[1]], pa.list_(pa.int32()))}), template, store_schema=False)
    schema = _schema_of(template.getvalue())
    path_names = [name.encode() for name in (column, "list", "element")]
    chunk_metadata = thrift.write_struct(
        [
            (1, thrift.I32, 1),
            (2, thrift.LIST, thrift.write_list(thrift.I32, [b"\x00", b"\x06"])),
            (3, thrift.LIST, thrift.write_list(thrift.BINARY, [bytes([len(name)]) + name for name in path_names])),
            (4, thrift.I32, 0),
            (5, thrift.I64, len(repetition)),
            (6, thrift.I64, len(body)),
            (7, thrift.I64, len(body)),
            (9, thrift.I64, 4),
        ]
    )
    chunk = thrift.write_struct([(2, thrift.I64, 0), (3, thrift.STRUCT, chunk_metadata)])
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
            (2, thrift.LIST, schema),
            (3, thrift.I64, len(documents)),
            (4, thrift.LIST, thrift.write_list(thrift.STRUCT, [group])),
        ]
    )
    path.write_bytes(b"PAR1" + body + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    return path


def _levels(documents: Sequence[Sequence[int] | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    repetition: list[int] = []
    definition: list[int] = []
    values: list[int] = []
    for document in documents:
        if not document:
            repetition.append(0)
            definition.append(_NULL_LIST if document is None else _EMPTY_LIST)
        else:
            repetition += [0] + [1] * (len(document) - 1)
            definition += [_ELEMENT] * len(document)
            values += document
    return np.array(repetition), np.array(definition), np.array(values, dtype="<i4")


def _page(repetition: np.ndarray, definition: np.ndarray, values: np.ndarray, page_version: int) -> bytes:
    levels = [_run_lengths(repetition), _run_lengths(definition)]
    if page_version == 1:
        body = b"".join(len(part).to_bytes(4, "little") + part for part in levels) + values.tobytes()
        data_header = thrift.write_struct(
            [(1, thrift.I32, len(repetition)), (2, thrift.I32, 0), (3, thrift.I32, 3), (4, thrift.I32, 3)]
        )
        kind, field = 0, 5
    else:
        body = b"".join(levels) + values.tobytes()
        data_header = thrift.write_struct(
            [
                (1, thrift.I32, len(repetition)),
                (2, thrift.I32, len(repetition) - len(values)),
                (3, thrift.I32, int((repetition == 0).sum())),
                (4, thrift.I32, 0),
                (5, thrift.I32, len(levels[1])),
                (6, thrift.I32, len(levels[0])),
            ],
        )
        kind, field = 3, 8
    header = thrift.write_struct(
        [
            (1, thrift.I32, kind),
            (2, thrift.I32, len(body)),
            (3, thrift.I32, len(body)),
            (field, thrift.STRUCT, data_header),
        ]
    )
    return header + body


def _run_lengths(levels: np.ndarray) -> bytes:
    """Levels below 256 as runs of equal ones: the RLE half of Parquet's hybrid encoding."""
    starts = np.flatnonzero(np.diff(levels, prepend=-1))
    counts = np.diff(starts, append=len(levels))
    return b"".join(
        thrift.write_varint(int(count) << 1) + bytes([levels[start]])
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
