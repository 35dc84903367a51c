"""Frames of compressed files: gzip members and zstd frames, each of which decompresses by itself.

In: a file as a function that reads ranges. Out: its frames, each with its place and content; later, the content of some
adjacent frames. Must hold: frames tile the file, and a frame of more than MOST_FRAME_BYTES is refused before so much is
held, with the command that writes smaller ones. Cost: that of decompressing, and one copy.

A zstd frame tells where it ends by the headers of its blocks (https://datatracker.ietf.org/doc/html/rfc8878, section
3.1.1). A gzip member (https://datatracker.ietf.org/doc/html/rfc1952) ends where decompressing it ends.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Literal

import msgspec
import pyarrow as pa

from torchmix.errors import CorruptPage, SourceUnreadable

Codec = Literal["gzip", "zstd"]

MOST_FRAME_BYTES = 16 << 20
"""Content of a frame, at most; it is decompressed for any of its rows."""
READ_BYTES = 1 << 20
CODEC_OF_SUFFIX: dict[str, Codec] = {".gz": "gzip", ".zst": "zstd"}
GZIP_WINDOW = 31
"""Tells zlib that gzip's header and trailer are there."""

_ZSTD_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50  # of 16 kinds, in the low four bits


class Frame(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One frame of a file."""

    offset: int
    """Its first byte in the file."""
    num_bytes: int
    """Its size in the file."""
    content: bytes
    """What it decompresses to; nothing for a skippable frame."""


def codec_of_name(path: str | PurePath) -> Codec | None:
    """How a file is compressed, by the end of its name."""
    return CODEC_OF_SUFFIX.get(PurePath(path).suffix.lower())


def find_frames(read: Callable[[int, int], bytes], codec: Codec) -> Iterator[Frame]:
    """The frames of a file, in order.

    Args:
        read: Gives bytes of the file, by offset and number; fewer only where the file ends.
        codec: How it is compressed.

    Raises:
        SourceUnreadable: A frame holds more than MOST_FRAME_BYTES.
        CorruptPage: A frame is damaged, cut short, or none at all.
    """
    find = _find_zstd if codec == "zstd" else _find_gzip
    offset = 0
    while read(offset, 1):
        try:
            frame = find(read, offset)
        except (ValueError, OSError, zlib.error) as error:
            raise CorruptPage(
                f"no whole {codec} frame at byte {offset}: {' '.join(str(error).split()).rstrip('.')}; the "
                "file is damaged or cut short, restore it"
            ) from None
        if frame is None:
            raise SourceUnreadable(
                f"the {codec} frame at byte {offset} holds more than {MOST_FRAME_BYTES / 2**20:.4g} MiB, all "
                "of which would be decompressed for any of its rows; write smaller frames once, by `torchmix reframe "
                "IN OUT`"
            )
        yield frame
        offset += frame.num_bytes


def decompress(frames: bytes | memoryview, codec: Codec, most_bytes: int) -> bytes:
    """The content of adjacent frames.

    Raises:
        ValueError: It is more than `most_bytes`.
        OSError: A frame is damaged or cut short.
    """
    if not len(frames):
        return b""
    stream = pa.CompressedInputStream(pa.BufferReader(frames), codec)
    parts: list[bytes] = []
    left_bytes = most_bytes
    while part := stream.read(READ_BYTES):  # which takes memory for so much at once, whatever is there
        left_bytes -= len(part)
        if left_bytes < 0:
            raise ValueError(f"more than {most_bytes} bytes")
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _find_zstd(read: Callable[[int, int], bytes], offset: int) -> Frame | None:
    size = READ_BYTES
    while True:
        buffer = read(offset, size)
        try:
            num_bytes = zstd_frame_bytes(buffer)
        except EOFError:
            if len(buffer) < size:
                raise ValueError("the file ends within it") from None
            if size > MOST_FRAME_BYTES:
                return None
            size *= 2
            continue
        if buffer[:4] != _ZSTD_MAGIC.to_bytes(4, "little"):
            return Frame(offset=offset, num_bytes=num_bytes, content=b"")
        try:
            content = decompress(memoryview(buffer)[:num_bytes], "zstd", MOST_FRAME_BYTES)
        except ValueError:
            return None
        return Frame(offset=offset, num_bytes=num_bytes, content=content)


def zstd_frame_bytes(buffer: bytes) -> int:
    """Size of the zstd frame, skippable ones too, that some bytes begin with.

    Raises:
        EOFError: The frame goes on after these bytes.
        ValueError: No frame begins here.
    """
    magic = _number(buffer, 0, 4)
    if magic & ~15 == _SKIPPABLE_MAGIC:
        stop = 8 + _number(buffer, 4, 4)
        _number(buffer, stop, 0)
        return stop
    if magic != _ZSTD_MAGIC:
        raise ValueError(f"the magic is {magic:#010x}")
    descriptor = _number(buffer, 4, 1)
    is_single_segment = descriptor >> 5 & 1
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
    content_size_bytes = (is_single_segment, 2, 4, 8)[descriptor >> 6]
    position = 5 + (not is_single_segment) + dictionary_bytes + content_size_bytes
    is_last = 0
    while not is_last:
        header = _number(buffer, position, 3)
        is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == 3:
            raise ValueError("a block is of a reserved kind")
        position += 3 + (1 if kind == 1 else size)  # kind 1 is one byte, repeated
    position += 4 * (descriptor >> 2 & 1)  # a checksum
    _number(buffer, position, 0)
    return position


def _number(buffer: bytes, position: int, num_bytes: int) -> int:
    if position + num_bytes > len(buffer):
        raise EOFError
    return int.from_bytes(buffer[position : position + num_bytes], "little")


def _find_gzip(read: Callable[[int, int], bytes], offset: int) -> Frame | None:
    member = zlib.decompressobj(GZIP_WINDOW)
    parts: list[bytes] = []
    content_bytes = num_bytes = 0
    step = READ_BYTES >> 5  # what is read beyond the member is read again, and copied by zlib
    while not member.eof:
        buffer = member.unconsumed_tail or read(offset + num_bytes, step)
        if not buffer:
            raise ValueError("the file ends within it")
        if not member.unconsumed_tail:
            num_bytes += len(buffer)
        parts.append(member.decompress(buffer, MOST_FRAME_BYTES + 1 - content_bytes))
        content_bytes += len(parts[-1])
        if content_bytes > MOST_FRAME_BYTES:
            return None
    return Frame(offset=offset, num_bytes=num_bytes - len(member.unused_data), content=b"".join(parts))
