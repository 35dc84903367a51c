"""A Parquet file's footer -> one column's leaf, its chunks, and where their data pages lie."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.formats.look import FIRST_BYTES, known_by
from torchmix.formats.parquet import thrift
from torchmix.storage.random_access import RandomAccessFile

# --- A Parquet file's footer -> one column's leaf and its chunks.
#
# Every byte range lies within the file, and anything else that a footer may say ends in `SourceUnreadable`. Cost: the
# footer is read once; about 10 us per row group and column of it, since what belongs to other columns has to be
# stepped over. Field numbers are those of
# https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift

MAGIC = b"PAR1"
_MAGIC_ENCRYPTED = b"PARE"
_MAY_BE = "is it still being written, cut short, or of another format?"
_TAIL_BYTES = 8  # the footer's length and the magic
_TYPE, _REPETITION, _NUM_CHILDREN = 1, 3, 5  # fields of a SchemaElement
_REPEATED = 2


class Footer(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a Parquet file."""

    num_bytes: int
    """Size of the file."""
    metadata: bytes
    """FileMetaData, encoded."""
    digest: str
    """32 hex digits of the SHA-256 of all that follows the last page and index: metadata, its length, magic."""


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf of the schema, and where to find it."""

    index: int
    """Among the leaf columns of the file."""
    elements: tuple[bytes, ...]
    """SchemaElements from the top-level column down to the leaf, encoded, each group with one child alone."""
    num_lists: int
    """Lists around a value, so a row may hold several values; Parquet's highest repetition level."""

    @property
    def is_list(self) -> bool:
        """A row may hold several values."""
        return self.num_lists > 0


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One column of one row group."""

    num_rows: int
    num_values: int
    """Values and nulls; an empty or null list counts as one."""
    codec: int
    start: int
    """First byte: of the dictionary page if there is one, else of the first data page."""
    num_bytes: int
    decoded_bytes: int
    index_offset: int
    """First byte of the OffsetIndex, -1 if there is none."""
    index_bytes: int


def read_footer(file: RandomAccessFile) -> Footer:
    """Read the last bytes of an open file.

    Raises:
        SourceUnreadable: not a Parquet file, cut short, or encrypted.
    """
    num_bytes = file.num_bytes
    tail = file.read(max(num_bytes - _TAIL_BYTES, 0), _TAIL_BYTES)
    if tail[4:] == _MAGIC_ENCRYPTED:
        raise SourceUnreadable("the file is encrypted; decrypt it first")
    if tail[4:] != MAGIC or num_bytes < len(MAGIC) + _TAIL_BYTES:
        raise SourceUnreadable(
            f"not a whole Parquet file ({num_bytes} bytes that do not end in {MAGIC.decode()}); "
            f"{known_by(file.read(0, FIRST_BYTES), 'parquet') or _MAY_BE}"
        )
    metadata_bytes = int.from_bytes(tail[:4], "little")
    if metadata_bytes > num_bytes - len(MAGIC) - _TAIL_BYTES:
        raise SourceUnreadable(
            f"the footer should have {metadata_bytes} bytes, more than the {num_bytes} of the file hold; "
            "the file is damaged or cut short"
        )
    metadata = file.read(num_bytes - _TAIL_BYTES - metadata_bytes, metadata_bytes)
    digest = hashlib.sha256(metadata + tail).hexdigest()[:32]
    return Footer(num_bytes=num_bytes, metadata=metadata, digest=digest)


def read_column(footer: Footer, index: int) -> tuple[Leaf, list[Chunk]]:
    """Find a leaf, by its number among the leaves, and its chunks, one for each row group.

    Raises:
        SourceUnreadable: encrypted, in another file, or the footer is damaged.
    """
    try:
        leaf = _find_leaf(footer.metadata, index)
        chunks = _read_chunks(footer.metadata, leaf)
        are_possible = [_is_possible(chunk, footer.num_bytes) for chunk in chunks]
    except (
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # whatever a field may turn out to be
        raise SourceUnreadable(f"damaged footer ({error!r}); restore the file") from None
    if not all(are_possible):
        chunk = chunks[are_possible.index(False)]
        raise SourceUnreadable(
            f"the footer places {chunk.num_bytes} bytes of a column at byte {chunk.start}, but the file has "
            f"{footer.num_bytes}; it is damaged or cut short, restore it"
        )
    return leaf, chunks


def _is_possible(chunk: Chunk, file_bytes: int) -> bool:
    sizes = (chunk.num_rows, chunk.num_values, chunk.codec, chunk.start, chunk.num_bytes, chunk.decoded_bytes)
    return min(sizes) >= 0 and chunk.start + chunk.num_bytes <= file_bytes and chunk.codec < 128


def _find_leaf(metadata: bytes, index: int) -> Leaf:
    _, position = thrift.find_field(metadata, 0, 2)
    _, num_elements, position = thrift.read_list_head(metadata, position)
    open_groups: list[list[Any]] = []  # from the root down: element, encoded element, children to come
    num_leaves = 0
    for _ in range(num_elements):  # depth first, as the elements lie
        start = position
        element, position = thrift.read_struct(metadata, start)
        open_groups.append([element, metadata[start:position], element.get(_NUM_CHILDREN, 0)])
        if not open_groups[-1][2]:
            if num_leaves == index:
                return _leaf(index, [(element, encoded) for element, encoded, _ in open_groups[1:]])
            num_leaves += 1
        while open_groups and not open_groups[-1][2]:
            open_groups.pop()
            if open_groups:
                open_groups[-1][2] -= 1
    raise ValueError(f"{num_leaves} leaves, no {index}")


def _leaf(index: int, path: list[tuple[thrift.Struct, bytes]]) -> Leaf:
    repetitions = [element[_REPETITION] for element, _ in path]
    if path[-1][0][_TYPE] not in range(8) or not set(repetitions) <= {0, 1, _REPEATED}:
        raise ValueError(f"leaf {index} is of no known type or repetition")
    return Leaf(
        index=index,
        elements=tuple(_with_one_child(encoded) for _, encoded in path),
        num_lists=repetitions.count(_REPEATED),
    )


def _with_one_child(element: bytes) -> bytes:
    """A SchemaElement; a group's children but one are struck off."""
    type, position = thrift.find_field(element, 0, _NUM_CHILDREN)
    if not type:
        return element
    stop = position
    while element[stop] > 127:
        stop += 1
    return element[:position] + b"\x02" + element[stop + 1 :]  # 1, as a zigzag


def _read_chunks(metadata: bytes, leaf: Leaf) -> list[Chunk]:
    chunks = []
    _, position = thrift.find_field(metadata, 0, 4)
    _, num_groups, position = thrift.read_list_head(metadata, position)
    for _ in range(num_groups):
        group, position = thrift.read_struct(metadata, position, keep=(1, leaf.index))
        column = group[1][0]
        if 8 in column or 3 not in column:
            raise SourceUnreadable("the column is encrypted; decrypt the file first")
        if 1 in column:
            raise SourceUnreadable(f"the column lies in another file, {column[1].decode()!r}; name that one")
        fields = column[3]
        first_page, dictionary = fields[9], fields.get(11, 0)
        chunks.append(
            Chunk(
                num_rows=group[3],
                num_values=fields[5],
                codec=fields[4],
                start=dictionary if 0 < dictionary < first_page else first_page,
                num_bytes=fields[7],
                decoded_bytes=fields[6],
                index_offset=column.get(4, -1),
                index_bytes=column.get(5, 0),
            )
        )
    return chunks


# --- Where the data pages of a column chunk lie.
#
# A page's range covers its header and body, ranges rise within the chunk, and they are the writer's pages, also where
# a row spans several of them. Rows come from the chunk's OffsetIndex if it has a sound one, else from the headers; a
# v1 page of lists without an index does not tell its rows, only its values. Cost: an index entry 2 us; without an
# index 10 us and one small read per page. Field numbers are those of parquet.thrift, see
# https://parquet.apache.org/docs/file-format/data-pages/

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
