"""An Arrow file -> the messages that hold its record batches.

In: a file of either IPC format, as a function that reads ranges. Out: its schema, and for each batch where its message
lies and which dictionary its column needs. Must hold: a file that is cut short or damaged is an error that names the
place. A file (Feather version 2 is the same) is read by the blocks of its footer, a stream by walking from message to
message: Hugging Face's caches are streams. Cost: a read of a few hundred bytes a batch, and another one in a stream.

https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import pyarrow as pa

from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.formats.arrow.message import FlatTable, check_message, message_prefix, parse_message

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
    begin = read(0, _BEGIN_BYTES)
    if begin[:4] == _OLD_MAGIC:
        raise SourceUnreadable("Feather version 1 is not read; write it again with `pyarrow.feather`")
    try:
        file = _open_file(read, num_bytes) if begin[: len(MAGIC)] == MAGIC else _open_stream(read, num_bytes)
        _read_names(file.schema)
    except (ValueError, OSError, pa.ArrowException) as error:
        raise SourceUnreadable(
            f"its schema does not parse as that of an Arrow file or stream ({' '.join(str(error).split())}); "
            "is it of another format, or damaged?"
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
