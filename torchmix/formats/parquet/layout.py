"""Where the data pages of a column chunk lie.

In: an open file and a chunk of its footer. Out: byte ranges, and rows where they follow without decoding. Must
hold: a page's range covers its header and body, ranges rise within the chunk, and they are the writer's pages, also
where a row spans several of them. Rows come from the chunk's OffsetIndex if it has a sound one, else from the headers;
a v1 page of lists without an index does not tell its rows, only its values. Cost: an index
entry 2 us; without an index 10 us and one small read per page. Field numbers are those of parquet.thrift, see
parquet_footer.py and https://parquet.apache.org/docs/file-format/data-pages/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import CorruptPage
from torchmix.formats.parquet import thrift
from torchmix.formats.parquet.footer import Chunk, Leaf
from torchmix.storage.random_access import RandomAccessFile

_FIRST_PROBE_BYTES = 1024  # a page header has 20 to 100 bytes, unless it holds long statistics
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_RUN_LEVELS = 3


class PageHeader(NamedTuple):
    """A page's header; `body` and `stop` are positions in the buffer that was read."""

    kind: int
    body: int
    stop: int
    decoded_bytes: int
    checksum: int | None
    """CRC-32 of the body as it lies in the file."""
    num_values: int
    num_rows: int
    """-1 if the header does not tell."""
    encoding: int
    """How a data page's values are encoded."""
    levels_bytes: int
    """Bytes of a v2 data page's levels, which lie before the values and are never compressed; else -1."""
    is_compressed: bool
    """False where a v2 data page says that its values are not, whatever the chunk's codec."""
    has_run_levels: bool
    """Levels are in runs, each kind with its size before it in v1: not the encoding of before 2013."""

    @property
    def is_data(self) -> bool:
        return self.kind in (_DATA_PAGE, _DATA_PAGE_V2)

    @property
    def is_dictionary(self) -> bool:
        return self.kind == _DICTIONARY_PAGE


class ChunkPages(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The data pages of a chunk, as the writer cut them."""

    dict_offset: int
    """-1 if the chunk has no dictionary page."""
    dict_bytes: int
    offset: Int64Array
    num_bytes: Int64Array
    rows: Int64Array | None
    """Rows that begin in each page; None if neither index nor headers tell."""
    values: Int64Array | None
    """Values of each page, counted as in `Chunk.num_values`; None if the headers were not walked."""


def find_pages(file: RandomAccessFile, chunk: Chunk, leaf: Leaf, *, use_index: bool = True) -> ChunkPages:
    """Find the data pages of a chunk, by its OffsetIndex if it has a sound one (and `use_index`), else by the headers.

    Raises:
        CorruptPage: the headers do not add up to the chunk that the footer describes.
    """
    dict_offset, dict_bytes, first_page = -1, 0, chunk.start
    if not chunk.num_values:
        nothing = np.zeros(0, dtype=np.int64)
        return ChunkPages(dict_offset=-1, dict_bytes=0, offset=nothing, num_bytes=nothing, rows=nothing, values=nothing)
    _, first = next(_walk(file, chunk))
    if first.is_dictionary:
        dict_offset, dict_bytes = chunk.start, first.stop
        first_page = chunk.start + first.stop
    if use_index and chunk.index_offset >= 0:
        locations = _read_index(file, chunk, first_page)
        if locations is not None:
            offset, num_bytes, first_row = locations
            rows = np.diff(first_row, append=chunk.num_rows)
            return ChunkPages(
                dict_offset=dict_offset,
                dict_bytes=dict_bytes,
                offset=offset,
                num_bytes=num_bytes,
                rows=rows,
                values=None,
            )
    data_pages = [(offset, header) for offset, header in _walk(file, chunk) if header.is_data]
    values = np.array([header.num_values for _, header in data_pages], dtype=np.int64)
    rows_or_unknown = np.array([header.num_rows for _, header in data_pages], dtype=np.int64)
    if not leaf.is_list:
        rows_or_unknown = values
    return ChunkPages(
        dict_offset=dict_offset,
        dict_bytes=dict_bytes,
        offset=np.array([offset for offset, _ in data_pages], dtype=np.int64),
        num_bytes=np.array([header.stop for _, header in data_pages], dtype=np.int64),
        rows=None if rows_or_unknown.min() < 0 else rows_or_unknown,
        values=values,
    )


def read_page_header(buffer: thrift.Bytes, position: int) -> PageHeader:
    """Read the page header at `position`; the body need not be in the buffer.

    Raises:
        EOFError: the buffer ends inside the header.
        ValueError: not a page header.
    """
    fields, body = thrift.read_struct(buffer, position)
    try:
        kind, decoded_bytes, body_bytes = fields[1], fields[2], fields[3]
        checksum = fields[4] & 0xFFFFFFFF if 4 in fields else None
        num_values, num_rows, encoding, levels_bytes, is_compressed, has_run_levels = 0, -1, 0, -1, True, True
        if kind == _DATA_PAGE:
            data = fields[5]
            num_values, encoding = data[1], data[2]
            has_run_levels = data[3] == data[4] == _RUN_LEVELS
        elif kind == _DATA_PAGE_V2:
            data = fields[8]
            num_values, num_rows, encoding, levels_bytes = data[1], data[3], data[4], data[5] + data[6]
            is_compressed = data.get(7, True)
            if min(data[5], data[6]) < 0 or levels_bytes > min(body_bytes, decoded_bytes):
                raise ValueError(f"header at byte {position} has more levels than bytes")
        if min(decoded_bytes, body_bytes, num_values) < 0:
            raise ValueError(f"header at byte {position} has negative sizes")
        return PageHeader(
            kind,
            body,
            body + body_bytes,
            decoded_bytes,
            checksum,
            num_values,
            num_rows,
            encoding,
            levels_bytes,
            is_compressed,
            has_run_levels,
        )
    except (LookupError, TypeError, AttributeError):
        raise ValueError(f"no page header at byte {position}") from None


def _walk(file: RandomAccessFile, chunk: Chunk) -> Iterator[tuple[int, PageHeader]]:
    """Offset and header of each page, dictionary included; header positions count from the page's offset."""
    position, stop, left = chunk.start, chunk.start + chunk.num_bytes, chunk.num_values
    while left > 0:
        probe_bytes = _FIRST_PROBE_BYTES
        while True:
            probe = file.read(position, max(min(probe_bytes, stop - position), 0))
            try:
                header = read_page_header(probe, 0)
                break
            except (EOFError, ValueError) as error:
                if isinstance(error, ValueError) or len(probe) < probe_bytes:
                    raise CorruptPage(
                        f"no page header at byte {position}, {left} values before the end of the column "
                        f"chunk at bytes [{chunk.start}, {stop}): {error}; the file is damaged, restore it"
                    ) from None
                probe_bytes *= 16
        if header.stop > stop - position or header.num_values > left:
            raise CorruptPage(
                f"the page at bytes [{position}, {position + header.stop}), of {header.num_values} values, "
                f"exceeds its column chunk at bytes [{chunk.start}, {stop}), where {left} values are left; the file is "
                "damaged, restore it"
            )
        yield position, header
        position += header.stop
        left -= header.num_values


def _read_index(
    file: RandomAccessFile, chunk: Chunk, first_page: int
) -> tuple[Int64Array, Int64Array, Int64Array] | None:
    """Offset, size and first row of each data page; None where the index is damaged or contradicts the chunk."""
    try:
        index, _ = thrift.read_struct(file.read(chunk.index_offset, chunk.index_bytes))
        locations = np.array([(page[1], page[2], page[3]) for page in index[1]], dtype=np.int64).reshape(-1, 3)
    except (EOFError, ValueError, KeyError, TypeError, OverflowError):
        return None
    offset, num_bytes, first_row = locations.T
    stop = offset + num_bytes
    is_sound = (
        len(offset) > 0
        and offset[0] == first_page
        and stop[-1] <= chunk.start + chunk.num_bytes
        and bool(np.all(num_bytes > 0))
        and bool(np.all(stop[:-1] <= offset[1:]))
        and first_row[0] == 0
        and bool(np.all(np.diff(first_row, append=chunk.num_rows) >= 0))
    )
    return (offset, num_bytes, first_row) if is_sound else None
