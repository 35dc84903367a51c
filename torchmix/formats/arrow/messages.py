"""An Arrow file -> the messages that hold its record batches, and where their buffers lie."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec
import numpy as np
import pyarrow as pa

from torchmix.array_types import Int64Array
from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.formats.look import FIRST_BYTES, known_by

# --- Metadata of Arrow's IPC messages: what kind they are, and where the buffers of a record batch lie.
#
# Bytes that are no such metadata are a ValueError, never a read outside of them. Cost: about 10 microseconds a
# message.
#
# Slots are those of Message.fbs, Schema.fbs and File.fbs in https://github.com/apache/arrow/blob/main/format/; tables,
# vectors and offsets are those of https://flatbuffers.dev/internals/

MOST_SIZE = 1 << 48
"""No count or place in a batch is more."""
CONTINUATION = b"\xff\xff\xff\xff"
_VERSIONS = (3, 4)  # V4 and V5, which Arrow writes since 0.8, and reads
_KINDS = {1: "schema", 2: "dictionary", 3: "batch"}
_CODECS: dict[int, Literal["lz4", "zstd"]] = {0: "lz4", 1: "zstd"}


class FlatTable(msgspec.Struct, frozen=True):
    """A table of a FlatBuffer; what is absent has its default."""

    content: bytes
    position: int

    @classmethod
    def root(cls, content: bytes) -> FlatTable:
        """The table that a FlatBuffer begins with."""
        return cls(content, _unsigned(content, 0))

    def number(self, slot: int, layout: str) -> int:
        """A scalar, 0 where there is none; `layout` is struct's letter for it."""
        place = self.place(slot)
        return 0 if place is None else int(_read(layout, self.content, place))

    def table(self, slot: int) -> FlatTable | None:
        """A table within this one."""
        place = self.place(slot)
        return None if place is None else FlatTable(self.content, place + _unsigned(self.content, place))

    def tables(self, slot: int) -> list[FlatTable]:
        """A vector of tables."""
        places = [place + 4 * i for place, count in [self._vector(slot)] for i in range(count)]
        return [FlatTable(self.content, place + _unsigned(self.content, place)) for place in places]

    def text(self, slot: int) -> str:
        """A string; empty if absent."""
        place, count = self._vector(slot)
        return self.content[place : place + count].decode()

    def structs(self, slot: int, num_bytes: int) -> Int64Array:
        """A vector of structs as int64, [structs, num_bytes / 8]."""
        place, count = self._vector(slot)
        cells = np.frombuffer(self.content, "<i8", count * num_bytes // 8, place) if count else np.zeros(0, np.int64)
        return cells.reshape(count, num_bytes // 8)

    def place(self, slot: int) -> int | None:
        """Where a field lies; None if it is absent."""
        vtable = self.position - _read("<i", self.content, self.position)
        if 4 + 2 * slot >= _read("<H", self.content, vtable):
            return None
        offset = _read("<H", self.content, vtable + 4 + 2 * slot)
        return self.position + offset if offset else None

    def _vector(self, slot: int) -> tuple[int, int]:
        place = self.place(slot)
        if place is None:
            return 0, 0
        place += _unsigned(self.content, place)
        count = _unsigned(self.content, place)
        if count > len(self.content):
            raise ValueError(f"a vector of {count} in {len(self.content)} bytes")
        return place + 4, count


class BatchLayout(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where the buffers of a record batch, or of a dictionary, lie in its body."""

    num_rows: int
    nodes: Int64Array
    """[fields, 2] rows and nulls of each field, parents before children."""
    buffers: Int64Array
    """[buffers, 2] first byte, in the body, and size of each buffer."""
    codec: Literal["lz4", "zstd"] | None
    """How each buffer is compressed."""
    variadic: Int64Array
    """[view fields] how many buffers of data each has."""


class Message(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the metadata of a message says."""

    kind: Literal["schema", "dictionary", "batch", "other"]
    body_bytes: int
    version: int
    """4 is V5, the usual one; older ones have a buffer more for unions."""
    header: FlatTable


def parse_message(metadata: bytes) -> Message:
    """Read the head of a message.

    Args:
        metadata: Its FlatBuffer, without what precedes it.

    Raises:
        ValueError: It is none.
    """
    table = FlatTable.root(metadata)
    header = table.table(2)
    body_bytes = table.number(3, "<q")
    if header is None or body_bytes < 0:
        raise ValueError("a message without a header, or of a negative size")
    kind, version = _KINDS.get(table.number(1, "<B"), "other"), table.number(0, "<h")
    if version not in _VERSIONS:
        raise ValueError(f"its metadata is of version {version + 1}, not of 4 or 5")
    return Message(kind=kind, body_bytes=body_bytes, version=version, header=header)  # type: ignore[arg-type]


def check_message(metadata: bytes) -> None:
    """Let pyarrow look at all of a message's metadata: `parse_message` reads the part of it that it needs.

    Raises:
        ValueError: It is damaged.
    """
    alone = bytearray(metadata)
    body_bytes = FlatTable.root(metadata).place(3)
    if body_bytes is not None:
        alone[body_bytes : body_bytes + 8] = bytes(8)  # no body follows
    try:
        pa.ipc.read_message(b"".join([CONTINUATION, len(alone).to_bytes(4, "little"), alone]))
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ValueError(str(error)) from None


def parse_batch(header: FlatTable) -> BatchLayout:
    """Read the header of a record batch.

    Raises:
        ValueError: It is none, or compressed in an unknown way.
    """
    compression = header.table(3)
    if compression is not None and (compression.number(1, "<b") or compression.number(0, "<b") not in _CODECS):
        raise ValueError("a compression of another kind than lz4 and zstd of each buffer")
    layout = BatchLayout(
        num_rows=header.number(0, "<q"),
        nodes=header.structs(1, 16),
        buffers=header.structs(2, 16),
        codec=_CODECS[compression.number(0, "<b")] if compression is not None else None,
        variadic=header.structs(4, 8)[:, 0],
    )
    for sizes in (np.array([layout.num_rows]), layout.nodes, layout.buffers, layout.variadic):
        if sizes.size and (sizes.min() < 0 or sizes.max() > MOST_SIZE):
            raise ValueError(f"a batch with sizes of {sizes.min()} and {sizes.max()}")
    return layout


def message_prefix(content: bytes) -> tuple[int, int]:
    """Bytes before a message's metadata, and bytes of it; 0 for the metadata at the end of a stream.

    Args:
        content: The first 8 bytes of a message, or fewer at the end of the file.

    Raises:
        ValueError: No message begins here.
    """
    if len(content) == 0:
        return 0, 0
    if content[:4] == CONTINUATION:
        prefix, size = 8, _read("<i", content, 4)
    else:
        prefix, size = 4, _read("<i", content, 0)  # as before Arrow 0.15
    if size < 0:
        raise ValueError(f"a message's size is {size}")
    return prefix, size


def _read(layout: str, content: bytes, place: int) -> int:
    if place < 0:
        raise ValueError(f"a position of {place}")
    try:
        value: int = struct.unpack_from(layout, content, place)[0]
    except struct.error as error:
        raise ValueError(str(error)) from None
    return value


def _unsigned(content: bytes, place: int) -> int:
    return _read("<I", content, place)


# --- An Arrow file -> the messages that hold its record batches.
#
# A file that is cut short or damaged is an error that names the place. A file (Feather version 2 is the same) is read
# by the blocks of its footer, a stream by walking from message to message: Hugging Face's caches are streams. Cost: a
# read of a few hundred bytes a batch, and another one in a stream.
#
# https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc

Read = Callable[[int, int], bytes]
"""Bytes of a file, by offset and number; fewer only where the file ends."""

MAGIC = b"ARROW1"
_BEGIN_BYTES = 8  # the magic, padded
_TAIL_BYTES = 10  # the footer's size and the magic
_OLD_MAGIC = b"FEA1"
_PREFIX_BYTES = 8
_BIG_ENDIAN = 1


class BatchMessage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The message of one record batch."""

    offset: int
    """Its first byte in the file."""
    metadata_offset: int
    """The first byte of its metadata."""
    body_offset: int
    """The first byte of its body."""
    body_bytes: int
    """Size of its body; it ends within the file."""
    header: FlatTable
    """What its metadata says of the batch."""
    dictionary: tuple[int, int] | None
    """Offset and size of the message with the values of the column's dictionary."""


class ArrowFile(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a file says of itself before its batches."""

    schema: pa.Schema
    fields: list[FlatTable]
    """The schema's fields as the file has them, for what pyarrow does not tell."""
    version: int
    """`Message.version`."""
    first_message: int
    """Where the messages behind the schema begin."""
    num_bytes: int
    """Size of the file."""
    blocks: list[tuple[int, int]] | None
    """Where messages begin, those with dictionaries first, and the sizes of their bodies; None for a stream."""


def open_arrow(read: Read, num_bytes: int) -> ArrowFile:
    """Read the schema of a file, and the footer if it has one.

    Args:
        read: Gives bytes of the file.
        num_bytes: Its size.

    Raises:
        SourceUnreadable: It is not of Arrow's formats, or is cut short.
    """
    begin = read(0, FIRST_BYTES)
    if not begin:
        raise SourceUnreadable("it is empty, without a schema; take it out")
    if begin[:4] == _OLD_MAGIC:
        raise SourceUnreadable("Feather version 1 is not read; write it again with `pyarrow.feather`")
    try:
        file = _open_file(read, num_bytes) if begin[: len(MAGIC)] == MAGIC else _open_stream(read, num_bytes)
        _read_names(file.schema)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise SourceUnreadable(
            f"its schema does not parse as that of an Arrow file or stream ({' '.join(str(error).split())}); "
            f"{known_by(begin, 'arrow') or 'is it of another format, or damaged?'}"
        ) from None
    return file


def _open_stream(read: Read, num_bytes: int) -> ArrowFile:
    prefix, size = message_prefix(read(0, _PREFIX_BYTES))
    if prefix + size > num_bytes:
        raise ValueError(f"{num_bytes} bytes, its schema has {size}")
    content = read(0, prefix + size)
    message = parse_message(content[prefix:])
    if message.kind != "schema":
        raise ValueError("no schema at its beginning")
    _refuse_big_endian(message.header)
    return ArrowFile(
        schema=pa.ipc.read_schema(pa.py_buffer(content)),
        fields=message.header.tables(1),
        version=message.version,
        first_message=prefix + size + message.body_bytes,
        num_bytes=num_bytes,
        blocks=None,
    )


def _open_file(read: Read, num_bytes: int) -> ArrowFile:
    """By its footer, where alone all writers put the schema in the same way."""
    tail = read(max(num_bytes - _TAIL_BYTES, 0), _TAIL_BYTES)
    size = int.from_bytes(tail[:4], "little", signed=True)
    if tail[4:] != MAGIC or not 0 < size <= num_bytes - _BEGIN_BYTES - _TAIL_BYTES:
        raise SourceUnreadable(
            f"not a whole Arrow file ({num_bytes} bytes without a footer at their end); is it still being "
            "written, or cut short?"
        )
    content = read(num_bytes - _TAIL_BYTES - size, size)
    footer = FlatTable.root(content)
    schema = footer.table(1)
    if schema is None:
        raise ValueError("no schema in its footer")
    _refuse_big_endian(schema)
    blocks = [(int(block[0]), int(block[2])) for slot in (2, 3) for block in footer.structs(slot, 24)]
    for offset, _ in blocks:
        if not _BEGIN_BYTES <= offset < num_bytes:
            raise ValueError(f"its footer places a batch at byte {offset} of {num_bytes}")
    alone = pa.BufferReader(b"".join([MAGIC, b"\0\0", content, tail]))
    return ArrowFile(
        schema=pa.ipc.open_file(alone).schema,
        fields=schema.tables(1),
        version=footer.number(0, "<h"),
        first_message=_BEGIN_BYTES,
        num_bytes=num_bytes,
        blocks=blocks,
    )


def _refuse_big_endian(schema: FlatTable) -> None:
    if schema.number(0, "<h") == _BIG_ENDIAN:
        raise ValueError("its numbers are big-endian; write it again on another machine")


def _read_names(fields: Iterable[pa.Field]) -> None:
    """Decode the names of fields and of those within them, which pyarrow does when they are asked for."""
    for field in fields:
        field.name  # noqa: B018
        _read_names(field.type.field(i) for i in range(field.type.num_fields))


def find_batches(file: ArrowFile, read: Read, dictionary_id: int | None) -> Iterator[BatchMessage]:
    """The batches of a file, in order; `dictionary_id` is the column's.

    Raises:
        CorruptPage: A message is damaged or cut short.
        SourceUnreadable: The column's dictionary comes in parts.
    """
    dictionary: tuple[int, int] | None = None
    blocks = iter(file.blocks) if file.blocks is not None else None
    offset, body_bytes = file.first_message, -1
    while True:
        if blocks is not None:
            offset, body_bytes = next(blocks, (-1, -1))
            if offset < 0:
                return
        try:
            prefix, size = message_prefix(read(offset, _PREFIX_BYTES))
            if not size and blocks is None:
                return
            body_offset = offset + prefix + size
            if body_offset > file.num_bytes:
                raise ValueError("the file ends within it")
            metadata = read(offset + prefix, size)
            message = parse_message(metadata)
            check_message(metadata)
            if message.kind not in ("dictionary", "batch"):
                raise ValueError("it is neither a record batch nor a dictionary")
            if body_bytes >= 0 and message.body_bytes != body_bytes:
                raise ValueError(f"its body has {message.body_bytes} bytes, {body_bytes} by the footer")
            if body_offset + message.body_bytes > file.num_bytes:
                raise ValueError("the file ends within it")
            is_dictionary = message.kind == "dictionary" and message.header.number(0, "<q") == dictionary_id
            is_part = is_dictionary and message.header.number(2, "<B")
        except ValueError as error:
            raise CorruptPage(
                f"no whole message at byte {offset}: {error}; the file is damaged or cut short, restore it"
            ) from None
        if is_part:
            raise SourceUnreadable(
                f"the dictionary of the column comes in parts (byte {offset}), which are not read; write the "
                "file again with the column's values, without a dictionary"
            )
        if is_dictionary:
            dictionary = (offset, body_offset + message.body_bytes - offset)
        elif message.kind == "batch":
            yield BatchMessage(
                offset=offset,
                metadata_offset=offset + prefix,
                body_offset=body_offset,
                body_bytes=message.body_bytes,
                header=message.header,
                dictionary=dictionary,
            )
        offset = body_offset + message.body_bytes


def has_rows(file: ArrowFile, read: Read) -> bool:
    """Whether a batch of the file has rows; a damaged one may.

    Raises:
        CorruptPage: As `find_batches`.
    """
    try:
        return any(parse_batch(batch.header).num_rows for batch in find_batches(file, read, None))
    except ValueError:
        return True
