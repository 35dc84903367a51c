"""A Parquet file's footer -> one column's leaf and its chunks.

In: an open file and a column's name. Out: the leaf's place in the schema, and of each row group the column chunk:
codec, byte range, index. Must hold: every byte range lies within the file, and anything else that a footer may say ends
in `SourceUnreadable`. Cost: the footer is read once; about 10 us per row group and column of it, since what belongs to
other columns has to be stepped over. Field numbers are those of
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from torchmix.errors import SourceUnreadable
from torchmix.sources import thrift
from torchmix.sources.source import read_range

MAGIC = b"PAR1"
_MAGIC_ENCRYPTED = b"PARE"
_TAIL_BYTES = 8  # the footer's length and the magic
_REPEATED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Footer:
    """The end of a Parquet file."""

    num_bytes: int
    """Size of the file."""
    metadata: bytes
    """FileMetaData, encoded."""
    digest: str
    """32 hex digits of the SHA-256 of all that follows the last page and index: metadata, its length, magic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A top-level column that ends in one leaf, and where to find it."""

    index: int
    """Among the leaf columns of the file."""
    elements: tuple[bytes, ...]
    """SchemaElements from the column down to the leaf, encoded."""
    is_list: bool
    """A row holds several values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
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


def read_footer(file_descriptor: int, where: str) -> Footer:
    """Read the last bytes of an open file; `where` (source and path) begins every message.

    Raises:
        SourceUnreadable: not a Parquet file, cut short, or encrypted.
    """
    num_bytes = os.fstat(file_descriptor).st_size
    tail = read_range(file_descriptor, max(num_bytes - _TAIL_BYTES, 0), _TAIL_BYTES)
    if tail[4:] == _MAGIC_ENCRYPTED:
        raise SourceUnreadable(f"{where}: the file is encrypted; decrypt it first")
    if tail[4:] != MAGIC or num_bytes < len(MAGIC) + _TAIL_BYTES:
        raise SourceUnreadable(
            f"{where}: not a whole Parquet file ({num_bytes} bytes that do not end in {MAGIC.decode()}); "
            "is it still being written, cut short, or of another format?"
        )
    metadata_bytes = int.from_bytes(tail[:4], "little")
    if metadata_bytes > num_bytes - len(MAGIC) - _TAIL_BYTES:
        raise SourceUnreadable(
            f"{where}: the footer should have {metadata_bytes} bytes, more than the {num_bytes} of the file hold; "
            "the file is damaged or cut short"
        )
    metadata = read_range(file_descriptor, num_bytes - _TAIL_BYTES - metadata_bytes, metadata_bytes)
    digest = hashlib.sha256(metadata + tail).hexdigest()[:32]
    return Footer(num_bytes=num_bytes, metadata=metadata, digest=digest)


def read_column(footer: Footer, column: str, where: str) -> tuple[Leaf, list[Chunk]]:
    """Find a top-level column and its chunks, one for each row group.

    Raises:
        SourceUnreadable: no such column or two of that name, nested deeper than one list, encrypted, in another file,
            or the footer is damaged.
    """
    try:
        leaf = _find_leaf(footer.metadata, column, where)
        chunks = _read_chunks(footer.metadata, leaf, where)
        are_possible = [_is_possible(chunk, footer.num_bytes) for chunk in chunks]
    except (
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # whatever a field may turn out to be
        raise SourceUnreadable(f"{where}: damaged footer ({error!r}); restore the file") from None
    if not all(are_possible):
        chunk = chunks[are_possible.index(False)]
        raise SourceUnreadable(
            f"{where}: the footer places {chunk.num_bytes} bytes of column {column!r} at byte {chunk.start}, but the "
            f"file has {footer.num_bytes}; it is damaged or cut short, restore it"
        )
    return leaf, chunks


def _is_possible(chunk: Chunk, file_bytes: int) -> bool:
    sizes = (chunk.num_rows, chunk.num_values, chunk.codec, chunk.start, chunk.num_bytes, chunk.decoded_bytes)
    return min(sizes) >= 0 and chunk.start + chunk.num_bytes <= file_bytes and chunk.codec < 128


def _find_leaf(metadata: bytes, column: str, where: str) -> Leaf:
    _, position = thrift.find_field(metadata, 0, 2)
    _, num_elements, position = thrift.read_list_head(metadata, position)
    elements: list[tuple[thrift.Struct, bytes]] = []
    for _ in range(num_elements):
        start = position
        element, position = thrift.read_struct(metadata, start)
        elements.append((element, metadata[start:position]))

    leaves: list[Leaf] = []
    leaf_index, at = 0, 1
    while at < num_elements:
        start, open_nodes = at, 1
        num_leaves, num_lists = 0, 0
        while open_nodes:  # depth first, as the elements lie
            element = elements[at][0]
            children = element.get(5, 0)
            open_nodes += children - 1
            num_leaves += not children
            num_lists += element.get(3) == _REPEATED
            at += 1
        if elements[start][0][4] == column.encode():
            if num_leaves > 1 or num_lists > 1:
                raise SourceUnreadable(f"{where}: column {column!r} is nested deeper than one list")
            path = tuple(encoded for _, encoded in elements[start:at])
            leaves.append(Leaf(index=leaf_index, elements=path, is_list=num_lists > 0))
        leaf_index += num_leaves
    if len(leaves) != 1:
        raise SourceUnreadable(f"{where}: {len(leaves) or 'no'} columns are named {column!r}; there must be one")
    return leaves[0]


def _read_chunks(metadata: bytes, leaf: Leaf, where: str) -> list[Chunk]:
    chunks = []
    _, position = thrift.find_field(metadata, 0, 4)
    _, num_groups, position = thrift.read_list_head(metadata, position)
    for _ in range(num_groups):
        group, position = thrift.read_struct(metadata, position, keep=(1, leaf.index))
        column = group[1][0]
        if 8 in column or 3 not in column:
            raise SourceUnreadable(f"{where}: the column is encrypted; decrypt the file first")
        if 1 in column:
            raise SourceUnreadable(f"{where}: the column lies in another file, {column[1].decode()!r}; name that one")
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
