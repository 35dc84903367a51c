"""Bytes of a page of an Arrow file -> an Arrow array of the column.

In: a page's bytes, and those of its companion. Out: its rows as lists or strings. A
page is of one of three kinds. SLICES: rows that are read alone (arrow_slices.py), beside them their offsets. BATCH: all
buffers of a column in a batch, beside them the batch's metadata. MESSAGE: a batch from its beginning to the end of the
column, beside it the message of a dictionary. Must hold: bytes that are no such page are a ValueError. Cost: nothing is
copied but what is compressed, or wrapped in other types than lists and strings.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.formats.arrow.layout import Column
from torchmix.formats.arrow.message import BatchLayout, message_prefix, parse_batch, parse_message
from torchmix.formats.arrow.slices import SliceType, read_slices, slice_type
from torchmix.formats.decompress import decompress
from torchmix.formats.source import PageRun

SLICES, BATCH, MESSAGE = 0, 1, 2
"""`FileScan.kind` of a page."""
MOST_TIMES = {"lz4": 256, "zstd": 1 << 16}
"""A buffer that says it decompresses to more than so many times its size is damaged."""


class _PageSchema(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`FileScan.schema`: the column's type, as Arrow's IPC writes the schema of it alone, and its place in a batch."""

    held_type: bytes
    path: tuple[int, ...]
    nodes_before: int
    buffers_before: int
    views_before: int
    version: int


def encode_column(column: Column) -> bytes:
    """What a page needs of the file that it is in."""
    schema = pa.schema([pa.field("", column.held_type)]).serialize().to_pybytes()
    places = (column.nodes_before, column.buffers_before, column.views_before, column.version)
    return msgspec.msgpack.encode(_PageSchema(schema, column.path, *places))


_decode_page_schema = msgspec.msgpack.Decoder(_PageSchema).decode


@lru_cache(maxsize=1024)
def _decode_column(schema: bytes) -> tuple[Column, SliceType | None]:
    """The column of a page, from what `encode_column` gave, and how its rows lie."""
    held = _decode_page_schema(schema)
    column = Column(
        held_type=pa.ipc.read_schema(pa.py_buffer(held.held_type)).field(0).type,
        path=held.path,
        nodes_before=held.nodes_before,
        buffers_before=held.buffers_before,
        views_before=held.views_before,
        version=held.version,
    )
    return column, slice_type(column)


def read_page(run: PageRun, is_null: NDArray[np.bool_] | None) -> pa.Array:
    """The rows of one page.

    Args:
        run: The page.
        is_null: [rows] of SLICES, which rows are null.

    Returns:
        [rows] of texts, or of lists.

    Raises:
        ValueError: The bytes are no such page.
    """
    column, kind = _decode_column(run.schema)
    try:
        if run.kind == SLICES:
            assert kind is not None and is_null is not None, "a scan found slices"
            return read_slices(kind, run.companion, run.pages, is_null)
        if run.kind == BATCH:
            layout = parse_batch(parse_message(bytes(run.companion)).header)
            return column.read(layout, column_buffers(column, layout, run.pages, None, run), None)
        return _read_message(column, run)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, MemoryError):
            raise
        raise ValueError(str(error)) from None


def column_range(column: Column, layout: BatchLayout) -> tuple[int, int]:
    """Where the buffers of a column lie in the body of a batch: [first byte, last byte).

    Raises:
        ValueError: The batch has fewer than the schema.
    """
    first, stop = column.buffers(layout)
    offset, num_bytes = layout.buffers[first:stop].T
    is_full = num_bytes > 0
    if not is_full.any():
        return 0, 0
    return int(offset[is_full].min()), int((offset + num_bytes)[is_full].max())


def column_buffers(
    column: Column, layout: BatchLayout, content: bytes | memoryview, begin: int | None, run: PageRun
) -> list[pa.Buffer | None]:
    """The buffers of a column, without compression; None for those of no bytes.

    Args:
        column: The column.
        layout: Of the batch.
        content: Bytes of the batch's body.
        begin: Where they begin in it; None: where the column does.
        run: What they are of.

    Raises:
        ValueError: The column reaches beyond them, or a buffer is damaged.
    """
    first, stop = column.buffers(layout)
    if begin is None:
        begin = column_range(column, layout)[0]
    held = pa.py_buffer(content)
    buffers: list[pa.Buffer | None] = []
    for offset, num_bytes in layout.buffers[first:stop].tolist():
        if not num_bytes:
            buffers.append(None)
            continue
        if offset < begin or offset - begin + num_bytes > len(content):
            raise ValueError(f"a buffer of {num_bytes} bytes at {offset} lies outside of the page")
        buffer = held.slice(offset - begin, num_bytes)
        buffers.append(buffer if layout.codec is None else _decompress(buffer, layout.codec, run))
    return buffers


def _decompress(buffer: pa.Buffer, codec: str, run: PageRun) -> pa.Buffer | None:
    if len(buffer) < 8:
        raise ValueError(f"a compressed buffer of {len(buffer)} bytes")
    num_bytes = int.from_bytes(buffer.slice(0, 8).to_pybytes(), "little", signed=True)
    if num_bytes == -1:
        return buffer.slice(8)
    if not 0 <= num_bytes <= MOST_TIMES[codec] * len(buffer):
        raise ValueError(f"a buffer would decompress to {num_bytes} bytes")
    return decompress(buffer.slice(8), codec, num_bytes, is_proven=run.is_as_indexed) if num_bytes else None


def _read_message(column: Column, run: PageRun) -> pa.Array:
    value_type = column.dictionary_type
    assert value_type is not None, "a scan found a dictionary"
    prefix, size = message_prefix(bytes(run.companion[:8]))
    header = parse_message(bytes(run.companion[prefix : prefix + size])).header.table(1)
    if header is None:
        raise ValueError("a dictionary without values")
    layout = parse_batch(header)
    values = Column(
        held_type=value_type, path=(), nodes_before=0, buffers_before=0, views_before=0, version=column.version
    )
    dictionary = values.read(layout, column_buffers(values, layout, run.companion[prefix + size :], 0, run), None)
    prefix, size = message_prefix(bytes(run.pages[:8]))
    layout = parse_batch(parse_message(bytes(run.pages[prefix : prefix + size])).header)
    buffers = column_buffers(column, layout, run.pages[prefix + size :], 0, run)
    return column.read(layout, buffers, dictionary)
