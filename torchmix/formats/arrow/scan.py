"""Record batches of an Arrow file -> pages, and their bytes -> an Arrow array."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import BadRows
from torchmix.errors import CorruptPage
from torchmix.formats.arrow.column import (
    Column,
    SliceableColumn,
    SliceType,
    cut_rows,
    find_slices,
    null_rows,
    read_slices,
    row_starts,
    slice_type,
)
from torchmix.formats.arrow.messages import BatchLayout, BatchMessage, Read, message_prefix, parse_batch, parse_message
from torchmix.formats.decompress import decompress
from torchmix.formats.source import FileScan, PageRun, SeenIds, join_seen

# --- Bytes of a page of an Arrow file -> an Arrow array of the column.
#
# Bytes that are no such page are a ValueError.

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
        layout: The layout of the batch.
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


# --- Record batches of an Arrow file -> pages, decoded once to learn their tokens.
#
# What decides how a batch is cut is in the file alone. Cost: the column is read and decoded once; memory for the
# offsets of a batch and for a page.

LARGE_PAGE_BYTES = 1 << 20
"""A file with a larger page is named in messages, since it can be written with smaller ones."""

Look = Callable[[pa.Array, int, BadRows | None], tuple[Int64Array, SeenIds | None]]
"""Tokens of each row of an array, [rows], and what is seen of their ids; with source and path, the first row, and what
takes bad rows."""


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    offset: int
    num_bytes: int
    num_rows: int
    kind: int
    companion_offset: int
    companion_bytes: int


@dataclass(kw_only=True, slots=True)
class ArrowScan:
    """The pages of one file, as they are found."""

    path: str
    read: Read
    column: Column
    look: Look
    bad: BadRows | None
    num_rows: int = 0
    _schema: bytes = field(init=False)
    _pages: list[_Page] = field(default_factory=list)
    _tokens: list[Int64Array] = field(default_factory=list)
    _ids: list[SeenIds | None] = field(default_factory=list)
    _crc: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._schema = encode_column(self.column)

    def add(self, batch: BatchMessage) -> int:
        """Cut a batch into pages and decode them; returns the bytes of its column.

        Raises:
            SourceUnreadable: A null inside a list.
            CorruptPage: The batch does not decode.
        """
        try:
            layout = parse_batch(batch.header)
            begin, end = column_range(self.column, layout)
            if end > batch.body_bytes:
                raise ValueError(f"a buffer ends at byte {end} of a body of {batch.body_bytes}")
            slices = find_slices(self.column, layout)
            if not layout.num_rows:
                return 0
            if slices is None or not self._add_slices(batch, layout, slices):
                self._add_whole(batch, layout, begin, end)
        except ValueError as error:
            raise CorruptPage(
                f"the record batch at byte {batch.offset}, from row {self.num_rows} on, does not decode: "
                f"{' '.join(str(error).split())}; the file is damaged or cut short, restore it"
            ) from None
        return end - begin

    def as_scan(self, num_bytes: int, digest: str) -> FileScan:
        """The scan of a file of this size and identity; each page is a chunk, since each has its own beside it."""
        pages = self._pages
        return FileScan(
            num_bytes=num_bytes,
            footer_hash=digest,
            num_rows=self.num_rows,
            chunk_of_page=np.arange(len(pages), dtype=np.int32),
            page_offset=np.array([page.offset for page in pages], dtype=np.int64),
            page_bytes=np.array([page.num_bytes for page in pages], dtype=np.int64),
            page_rows=np.array([page.num_rows for page in pages], dtype=np.int64),
            companion_offset=np.array([page.companion_offset for page in pages], dtype=np.int64),
            companion_bytes=np.array([page.companion_bytes for page in pages], dtype=np.int64),
            kind=np.array([page.kind for page in pages], dtype=np.int8),
            tokens=np.concatenate([np.zeros(0, np.int64), *self._tokens]).astype(np.int32),
            ids=join_seen(self._ids),
            page_crc=np.array([page for page, _ in self._crc], dtype=np.uint32),
            companion_crc=np.array([companion for _, companion in self._crc], dtype=np.uint32),
            schema=self._schema,
            bad=self.bad,
            whole_chunks=any(page.kind != SLICES and page.num_bytes > LARGE_PAGE_BYTES for page in pages),
        )

    def _add_slices(self, batch: BatchMessage, layout: BatchLayout, slices: SliceableColumn) -> bool:
        """Pages of some rows each; False if no row has any bytes, so that none can be cut."""
        kind = slice_type(self.column)
        assert kind is not None, "slices were found"
        body, num_rows = batch.body_offset, layout.num_rows
        offsets_offset, offsets_bytes = slices.offsets or (0, 0)
        offsets = self.read(body + offsets_offset, min(offsets_bytes, (num_rows + 1) * kind.offset_bytes))
        starts = row_starts(kind, num_rows, offsets, slices.values[1])
        if starts[0] == starts[-1]:
            return False
        is_null = null_rows(
            [(self.read(body + offset, size), nulls) for (offset, size), nulls in slices.validity], num_rows
        )
        for first, stop in pairwise(cut_rows(starts).tolist()):
            page = _Page(
                offset=body + slices.values[0] + int(starts[first]),
                num_bytes=int(starts[stop] - starts[first]),
                num_rows=stop - first,
                kind=SLICES,
                companion_offset=body + offsets_offset + first * kind.offset_bytes if kind.offset_bytes else -1,
                companion_bytes=(stop - first + 1) * kind.offset_bytes if kind.offset_bytes else 0,
            )
            self._decode(page, is_null[first:stop])
        return True

    def _add_whole(self, batch: BatchMessage, layout: BatchLayout, begin: int, end: int) -> None:
        """One page of all rows."""
        if self.column.dictionary_type is not None:
            if batch.dictionary is None:
                raise ValueError("the dictionary of its column is not before it")
            self._decode(
                _Page(
                    offset=batch.offset,
                    num_bytes=batch.body_offset + end - batch.offset,
                    num_rows=layout.num_rows,
                    kind=MESSAGE,
                    companion_offset=batch.dictionary[0],
                    companion_bytes=batch.dictionary[1],
                )
            )
            return
        has_bytes = begin < end
        self._decode(
            _Page(
                offset=batch.body_offset + begin if has_bytes else batch.metadata_offset,
                num_bytes=end - begin if has_bytes else 1,  # a page has bytes, also where all rows are null
                num_rows=layout.num_rows,
                kind=BATCH,
                companion_offset=batch.metadata_offset,
                companion_bytes=batch.body_offset - batch.metadata_offset,
            )
        )

    def _decode(self, page: _Page, is_null: NDArray[np.bool_] | None = None) -> None:
        run = PageRun(
            pages=self.read(page.offset, page.num_bytes),
            companion=self.read(page.companion_offset, page.companion_bytes) if page.companion_bytes else b"",
            schema=self._schema,
            kind=page.kind,
            num_rows=page.num_rows,
            path=self.path,
            offset=page.offset,
            first_row=self.num_rows,
        )
        if len(run.pages) < page.num_bytes:
            raise ValueError(f"the file ends before byte {page.offset + page.num_bytes}")
        tokens, ids = self.look(read_page(run, is_null), self.num_rows, self.bad)
        self._tokens.append(tokens)
        self._ids.append(ids)
        self._pages.append(page)
        self._crc.append((zlib.crc32(run.pages), zlib.crc32(run.companion)))
        self.num_rows += page.num_rows
