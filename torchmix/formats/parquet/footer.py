"""A Parquet file's footer -> one column's leaf and its chunks.

In: an open file and the number of a leaf. Out: the leaf's place in the schema, and of each row group the column chunk:
codec, byte range, index. Must hold: every byte range lies within the file, and anything else that a footer may say ends
in `SourceUnreadable`. Cost: the footer is read once; about 10 us per row group and column of it, since what belongs to
other columns has to be stepped over. Field numbers are those of
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from torchmix.errors import SourceUnreadable
from torchmix.formats.parquet import thrift
from torchmix.storage.random_access import RandomAccessFile

MAGIC = b"PAR1"
_MAGIC_ENCRYPTED = b"PARE"
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
            "is it still being written, cut short, or of another format?"
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
