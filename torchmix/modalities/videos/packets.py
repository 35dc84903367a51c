"""What the tables and packets of a video say, without decoding it: frames, length, size, and how it is turned."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from torchmix.errors import ItemUnreadable, OptionError
from torchmix.modalities.modality import ReadRange

# --- How long a video is, how many frames it has and how large they are.
#
# libavformat reads the containers: of MP4 and MOV the tables of samples, of WebM and Matroska, which have none, and of
# fragments the times of all packets. How a viewer turns it stands in the header of an MP4's track, which is read here,
# since libavformat says it of decoded frames alone. Cost: of MP4 its tables, of others a pass over the file.

HEADER_VERSION = 1
"""Rises when a video of before gets other numbers; a part of the `transform_id` of sources with videos."""
MOST_FRAMES = 1 << 20
MOST_BOXES = 4096


class VideoHeader(NamedTuple):
    """What is known of a video before it is decoded."""

    frames: int
    milliseconds: int
    """From the first frame to the end of the last one."""
    width: int
    """Pixels of a row, after turning."""
    height: int
    """Rows, after turning."""


class RangeFile(io.RawIOBase):
    """A file of ranges, as libavformat reads it."""

    def __init__(self, read: ReadRange, num_bytes: int) -> None:
        """At its start."""
        super().__init__()
        self._read, self._num_bytes, self._place = read, num_bytes, 0

    def readable(self) -> bool:
        """See `io`."""
        return True

    def seekable(self) -> bool:
        """See `io`."""
        return True

    def read(self, size: int = -1) -> bytes:
        """See `io`."""
        count = self._num_bytes - self._place if size < 0 else min(size, self._num_bytes - self._place)
        found = self._read(self._place, count) if count > 0 else b""
        self._place += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        """See `io`."""
        self._place = max(0, offset + (0, self._place, self._num_bytes)[whence])
        return self._place

    def tell(self) -> int:
        """See `io`."""
        return self._place


def container_of(head: bytes) -> str | None:
    """`mov` or `matroska`, by the first bytes; None: it is no video that is read."""
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    return "matroska" if head[:4] == b"\x1a\x45\xdf\xa3" else None


def opened(file: Any, head: bytes) -> tuple[Any, Any]:
    """libavformat's container and its first stream of video.

    Raises:
        ItemUnreadable: It is no video of these kinds, or has no such stream.
    """
    av = import_av()
    kind = container_of(head)
    if kind is None:
        raise ItemUnreadable(f"it is no MP4, MOV, WebM or Matroska; it begins with {head[:8]!r}")
    try:
        container = av.open(file, format=kind, metadata_errors="replace")
    except Exception as error:  # libavformat's errors are of many kinds
        raise unreadable("it does not open", error) from None
    pictures = [stream for stream in container.streams.video if not stream.disposition & 0x400]  # covers of songs
    if not pictures:
        container.close()
        raise ItemUnreadable("it has no pictures, only sound")
    if pictures[0].codec_context is None:
        container.close()
        raise ItemUnreadable("its pictures are of a codec that is not known here")
    return container, pictures[0]


def unreadable(what: str, error: Exception) -> ItemUnreadable:
    """What an error of FFmpeg's libraries becomes."""
    message = " ".join(str(getattr(error, "strerror", None) or error).split())
    return ItemUnreadable(f"{what} ({type(error).__name__}: {message[:120]})")


def packets_of(container: Any, stream: Any) -> Iterator[Any]:
    """The packets of a stream that show something, in the order of decoding.

    Raises:
        ItemUnreadable: They cannot be read, have no time, or are too many.
    """
    count = 0
    try:
        for packet in container.demux(stream):
            if packet.size == 0 or packet.is_discard:
                continue
            if packet.pts is None:
                raise ItemUnreadable("a packet of it has no time")
            count += 1
            if count > MOST_FRAMES:
                raise ItemUnreadable(f"it has more than {MOST_FRAMES} frames")
            yield packet
    except ItemUnreadable:
        raise
    except Exception as error:
        raise unreadable("its packets cannot be read", error) from None


def read_header(read: ReadRange, num_bytes: int, *, most_pixels: int, most_seconds: int) -> VideoHeader:
    """What is known of a video without decoding it.

    Args:
        read: Reads ranges of it.
        num_bytes: Its size.
        most_pixels: Larger frames are refused.
        most_seconds: A longer one is refused.

    Raises:
        ItemUnreadable: It is no video of these kinds, is cut off, empty, or is refused.
    """
    head = read(0, 64)
    container, stream = opened(RangeFile(read, num_bytes), head)
    with container:
        width, height = stream.codec_context.width, stream.codec_context.height
        if width < 1 or height < 1:
            raise ItemUnreadable(f"its header says {width} x {height} pixels")
        if width * height > most_pixels:
            raise ItemUnreadable(f"its header says {width} x {height} pixels, more than most_pixels {most_pixels}")
        times = _times(container, stream, num_bytes, is_table=container_of(head) == "mov")
    if not times:
        raise ItemUnreadable("it has no frames")
    first, last = min(times), max(times)
    # One frame lasts 1/25 s: the rate that libavformat guesses for it differs from one opening of the file to another.
    step = (last - first) / (len(times) - 1) if len(times) > 1 else 0.04
    seconds = last - first + step
    if not 0 < seconds <= most_seconds:
        raise ItemUnreadable(f"its packets last {seconds:.1f} s, and most_seconds is {most_seconds}")
    if container_of(head) == "mov" and _is_turned(read, num_bytes):
        width, height = height, width
    return VideoHeader(len(times), max(1, round(seconds * 1000)), width, height)


def _times(container: Any, stream: Any, num_bytes: int, *, is_table: bool) -> list[float]:
    """Seconds of each frame; in an MP4 with tables those of decoding, which are as far apart."""
    base = float(stream.time_base or 0)
    entries = stream.index_entries if is_table else ()
    if is_table and len(entries) and len(entries) == stream.frames:
        if len(entries) > MOST_FRAMES:
            raise ItemUnreadable(f"it has more than {MOST_FRAMES} frames")
        if max(entry.pos + entry.size for entry in entries) > num_bytes:
            raise ItemUnreadable(f"it is cut off: its tables name frames behind byte {num_bytes}")
        return [entry.timestamp * base for entry in entries if not entry.is_discard]
    return [packet.pts * base for packet in packets_of(container, stream)]


def _is_turned(read: ReadRange, num_bytes: int) -> bool:
    """Whether the track of pictures of an MP4 is shown turned by a quarter, so that its sides swap."""
    try:
        for start, stop in _boxes(read, 0, num_bytes, b"moov"):
            for track_start, track_stop in _boxes(read, start, stop, b"trak"):
                if any(
                    read(place + 8, 4) == b"vide"
                    for begin, end in _boxes(read, track_start, track_stop, b"mdia")
                    for place, _ in _boxes(read, begin, end, b"hdlr")
                ):
                    for place, _ in _boxes(read, track_start, track_stop, b"tkhd"):
                        matrix = place + (52 if read(place, 1) == b"\1" else 40)
                        across, _, _, _, down = struct.unpack(">iiiii", read(matrix, 20))
                        return bool(across == 0 and down == 0)
    except struct.error:
        raise ItemUnreadable("the header of its track is cut off") from None
    return False


def _boxes(read: ReadRange, place: int, stop: int, name: bytes) -> Iterator[tuple[int, int]]:
    """Where the content of each box of a name begins and ends, in a box or a file."""
    for _ in range(MOST_BOXES):
        if place + 8 > stop:
            return
        size, found = struct.unpack(">I4s", read(place, 8))
        begin = place + 8
        if size == 1:
            (size,) = struct.unpack(">Q", read(begin, 8))
            begin += 8
        end = stop if size == 0 else place + size
        if end < begin or end > stop:
            return
        if found == name:
            yield begin, end
        place = end


def decoder_id() -> str:
    """The build that decodes here: versions of FFmpeg's libraries."""
    versions = import_av().library_versions
    names = ("libavcodec", "libavformat", "libswscale")
    return ",".join(f"{name} {'.'.join(map(str, versions[name]))}" for name in names)


def import_av() -> Any:
    """PyAV.

    Raises:
        OptionError: It is not installed; a source that masks bad rows must not take it for one.
    """
    try:
        import av
    except ImportError as error:
        raise OptionError(f"videos need the package av: pip install av ({error})") from error
    return av
