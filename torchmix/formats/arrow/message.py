"""Metadata of Arrow's IPC messages: what kind they are, and where the buffers of a record batch lie.

In: bytes of a message's metadata, a FlatBuffer. Out: its kind, and a batch's nodes and buffers as arrays. Must hold:
bytes that are no such metadata are a ValueError, never a read outside of them. Cost: about 10 microseconds a message.

Slots are those of https://github.com/apache/arrow/blob/main/format/ Message.fbs, Schema.fbs and File.fbs; tables,
vectors and offsets are those of https://flatbuffers.dev/internals/
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec
import numpy as np
import pyarrow as pa

from torchmix.array_types import Int64Array

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

    def number(self, slot: int, layout: str, default: int = 0) -> int:
        """A scalar; `layout` is struct's letter for it."""
        place = self.place(slot)
        return default if place is None else int(_read(layout, self.content, place))

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
