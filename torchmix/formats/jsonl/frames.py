"""Frames of compressed files: gzip members and zstd frames, each of which decompresses by itself."""

from __future__ import annotations

import os
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Literal

import msgspec
import pyarrow as pa

from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.formats.look import FIRST_BYTES, known_by

# --- Where frames begin and end.
#
# Frames tile the file, and a frame of more than MOST_FRAME_BYTES is refused before so much is held, with the command
# that writes smaller ones.
#
# A zstd frame tells where it ends by the headers of its blocks (https://datatracker.ietf.org/doc/html/rfc8878, section
# 3.1.1). A gzip member (https://datatracker.ietf.org/doc/html/rfc1952) ends where decompressing it ends.

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
            known = known_by(read(0, FIRST_BYTES), codec) if not offset else ""
            raise CorruptPage(
                f"no whole {codec} frame at byte {offset}: {' '.join(str(error).split()).rstrip('.')}; "
                f"{known or 'the file is damaged or cut short, restore it'}"
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
        EOFError: The frame continues after these bytes.
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


# --- A compressed file -> the same content in frames that can be read one by one.
#
# Every frame is decompressed again and compared before it is written, and OUT appears whole or not at all. Cost: one
# pass; compression in as many threads as the process has processors; memory for two frames a thread.

FRAME_BYTES = 1 << 20
LONG_LINES = 4
"""A frame that would have more than so many times its size ends inside a line."""

LEVELS: dict[Codec, tuple[int, int, int]] = {"gzip": (1, 6, 9), "zstd": (1, 3, 22)}
"""The fastest, the usual and the densest level of each codec."""
_MAGIC: dict[bytes, Codec] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class Reframed(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    num_frames: int
    """Frames; 0 if OUT is plain."""
    content_bytes: int
    """Bytes of content, the same in both files."""
    read_bytes: int
    """Size of IN."""
    written_bytes: int
    """Size of OUT."""


def reframe(
    source: Path,
    target: Path,
    *,
    frame_bytes: int = FRAME_BYTES,
    level: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Reframed:
    """Write a file again in small frames.

    Args:
        source: IN; its compression is told by its first bytes.
        target: OUT, a new file; `.gz` or `.zst` is compressed so, any other name is not compressed.
        frame_bytes: Content of a frame, about; in [1, MOST_FRAME_BYTES // LONG_LINES].
        level: How hard to compress; None for the format's usual level.
        progress: Called with bytes read of IN since the last call.

    Raises:
        SourceUnreadable: IN cannot be read, or OUT exists or cannot be written.
        CorruptPage: IN is damaged or cut short, or a frame does not decompress to what it holds.
    """
    if not 1 <= frame_bytes <= MOST_FRAME_BYTES // LONG_LINES:
        raise ValueError(f"frames of {frame_bytes} bytes, not of 1 to {MOST_FRAME_BYTES // LONG_LINES}")
    if target.exists():
        raise SourceUnreadable(f"{target} exists; name another file, or remove it first")
    codec = codec_of_name(target)
    contents = _cut(_read_content(source, progress), frame_bytes)
    unfinished = target.with_name(f"{target.name}.{secrets.token_hex(4)}.unfinished")
    num_frames = content_bytes = 0
    try:
        with unfinished.open("xb") as file:
            for content, frame in _compress_all(contents, codec, level):
                if codec is not None and decompress(frame, codec, len(content)) != content:
                    raise CorruptPage(
                        f"{target}: frame {num_frames} does not decompress to what went into it; the memory of this "
                        "machine may be faulty, try another one"
                    )
                file.write(frame)
                num_frames += 1
                content_bytes += len(content)
            file.flush()
            os.fsync(file.fileno())
            written_bytes = file.tell()
        unfinished.rename(target)
    except OSError as error:
        raise SourceUnreadable(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return Reframed(
        num_frames=num_frames if codec is not None else 0,
        content_bytes=content_bytes,
        read_bytes=source.stat().st_size,
        written_bytes=written_bytes,
    )


def _read_content(source: Path, progress: Callable[[int], None] | None) -> Iterator[bytes]:
    """Blocks of what a file holds."""
    told_bytes = 0
    try:
        with source.open("rb") as opened:
            magic = opened.read(4)
        codec = next((name for start, name in _MAGIC.items() if magic.startswith(start)), None)
        with pa.OSFile(str(source)) as file:
            stream = file if codec is None else pa.CompressedInputStream(file, codec)
            while block := stream.read(READ_BYTES):
                if progress is not None:
                    progress(file.tell() - told_bytes)
                    told_bytes = file.tell()
                yield block
    except (OSError, pa.ArrowException) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise CorruptPage(f"{source}: cannot be read to its end: {what.rstrip('.')}; restore the file") from None


def _cut(blocks: Iterator[bytes], frame_bytes: int) -> Iterator[bytes]:
    """Contents of frames."""
    most_bytes = LONG_LINES * frame_bytes
    buffer = b""
    for block in blocks:
        buffer += block
        while len(buffer) >= frame_bytes:
            stop = buffer.find(b"\n", frame_bytes - 1) + 1
            if not stop and len(buffer) < most_bytes:
                break
            stop = min(stop or most_bytes, most_bytes)
            yield buffer[:stop]
            buffer = buffer[stop:]
    if buffer:
        yield buffer


def _compress_all(contents: Iterator[bytes], codec: Codec | None, level: int | None) -> Iterator[tuple[bytes, bytes]]:
    """Contents with their frames, in order."""
    num_threads = os.cpu_count() or 1
    with ThreadPoolExecutor(num_threads, "torchmix-reframe") as pool:
        coming: deque[tuple[bytes, Future[bytes]]] = deque()
        for content in contents:
            coming.append((content, pool.submit(_compress, content, codec, level)))
            if len(coming) > 2 * num_threads:
                done, frame = coming.popleft()
                yield done, frame.result()
        for done, frame in coming:
            yield done, frame.result()


def _compress(content: bytes, codec: Codec | None, level: int | None) -> bytes:
    """One frame, whole; `content` itself without a codec."""
    if codec is None:
        return content
    if level is None:
        level = LEVELS[codec][1]
    if codec == "gzip":
        member = zlib.compressobj(level, zlib.DEFLATED, GZIP_WINDOW)
        return member.compress(content) + member.flush()
    frame: bytes = pa.Codec("zstd", compression_level=level).compress(content, asbytes=True)
    return frame
