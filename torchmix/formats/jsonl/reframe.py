"""A compressed file -> the same content in frames that can be read one by one.

In: a file of lines, plain, gzip or zstd in any number of frames. Out: the same bytes in frames of about `frame_bytes`,
each ending with a line, unless a line has more than LONG_LINES of them: such a line goes over several frames. Must
hold: every frame is decompressed again and compared before it is written, and OUT appears whole or not at all. Cost:
one pass; compression in as many threads as the process has processors; memory for two frames a thread.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pyarrow as pa

from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.formats.jsonl.frames import GZIP_WINDOW, MOST_FRAME_BYTES, Codec, codec_of_name, decompress

FRAME_BYTES = 1 << 20
LONG_LINES = 4
"""A frame that would have more than so many times its size ends inside a line."""
READ_BYTES = 1 << 20
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
