"""What the tables and packets of a video say, without decoding it: frames, length, size, and how it is turned."""

from __future__ import annotations

import io
import re
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
_SPARE_BYTES = 1 << 26
MOST_BOXES = 1 << 18


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


class _NoSpareError(MemoryError):
    """There is less memory than `check_spare` asks for."""


def check_spare() -> None:
    """Raise MemoryError where there is less memory than the tables of any video take."""
    try:
        bytearray(_SPARE_BYTES)
    except MemoryError as error:
        raise _NoSpareError("less than 64 MiB are left") from error


def opened(file: Any, head: bytes) -> tuple[Any, Any]:
    """libavformat's container and its first stream of video.

    Raises:
        ItemUnreadable: It is no video of these kinds, or has no such stream.
        MemoryError: There is no memory to open it.
    """
    av = import_av()
    kind = container_of(head)
    if kind is None:
        raise ItemUnreadable(f"it is no MP4, MOV, WebM or Matroska; it begins with {head[:8]!r}")
    try:
        try:
            container = av.open(file, format=kind, metadata_errors="replace")
        except MemoryError:  # libavformat's own bounds, as of 1,000 streams, are such errors, too
            check_spare()
            file.seek(0)
            container = av.open(file, format=kind, metadata_errors="replace")
    except _NoSpareError:
        raise
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
    except (ItemUnreadable, MemoryError):
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
    is_turned = container_of(head) == "mov" and _look_at_boxes(read, num_bytes)
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
    if is_turned:
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


# --- What the boxes of an MP4 say, before libavformat believes it.
#
# libavformat keeps some 64 bytes of each frame that a table says, also where a table says one size for all, and unpacks
# tables of any size. So a file of three kilobytes could take all memory: what tables say is compared with what they
# hold first. They are looked for by their names, in whatever box they are, as libavformat finds them.

_MEDIA_BOXES = (b"mdat", b"free", b"skip", b"wide", b"uuid")
"""Boxes of a file that no table stands in."""
_MOST_TABLE_BYTES = 1 << 28
_FLAGS_OF_PARTS = 0x1FF_0F05
_TABLE = re.compile(rb"stsz|stz2|trun|cmov")


def _look_at_boxes(read: ReadRange, num_bytes: int) -> bool:
    """Whether the track of pictures of an MP4 is shown turned by a quarter, so that its sides swap.

    Raises:
        ItemUnreadable: Its tables say more than they hold.
    """
    turned, unheld = None, 0
    for name, begin, end in _boxes(lambda at, count: read(at, min(count, num_bytes - at)), 0, num_bytes):
        if name in _MEDIA_BOXES:
            continue
        if end - begin > _MOST_TABLE_BYTES:
            raise ItemUnreadable(f"its box {name!r} has {end - begin} bytes, more than {_MOST_TABLE_BYTES}")
        held = read(begin, end - begin)
        unheld += sum(_unheld_frames(held, match.start()) for match in _TABLE.finditer(held))
        if unheld > MOST_FRAMES:
            raise ItemUnreadable(f"its tables say {unheld} frames of one size, more than {MOST_FRAMES}")
        if name == b"moov" and turned is None:
            turned = _turn_of(held)
    return bool(turned)


def _unheld_frames(held: bytes, at: int) -> int:
    """Frames that a table says without a number for each; `at` is where its name is, or the same letters."""
    if at < 4 or len(held) < at + 24:
        return 0
    (size,), name, left = struct.unpack_from(">I", held, at - 4), held[at : at + 4], len(held) - at + 4
    flags, first, second = struct.unpack_from(">III", held, at + (12 if size == 1 else 4))
    usual_flags = _FLAGS_OF_PARTS if name == b"trun" else 0
    if not (size < 2 or 8 <= size <= left) and flags & ~usual_flags:  # the numbers of another table
        return 0
    if name == b"cmov":
        raise ItemUnreadable("its tables are packed (cmov), which libavformat would unpack to any size")
    if name == b"trun":
        count, each = first, 4.0 * (flags & 0xF00).bit_count()
    elif name == b"stz2":
        count, each = second, (first & 0xFF) / 8
    else:
        count, each = second, 0.0 if first else 4.0
    if count * each > (left if size < 2 else min(size, left)):
        raise ItemUnreadable(f"it is cut off: a table of it says {count} frames")
    times = held[:at].rpartition(b"stts")[2]
    is_of_samples = name == b"stsz" and (times[4:8], times[12:16]) == (b"\0\0\0\1",) * 2  # of sound, in whole chunks
    return 0 if each or is_of_samples else count


def _turn_of(movie: bytes) -> bool | None:
    read: ReadRange = lambda at, count: movie[at : at + count]  # noqa: E731
    try:
        for track, begin, end in _boxes(read, 0, len(movie)):
            if track != b"trak":
                continue
            inside = list(_boxes(read, begin, end))
            kinds = [
                movie[at + 8 : at + 12]
                for media, first, last in inside
                if media == b"mdia"
                for handler, at, _ in _boxes(read, first, last)
                if handler == b"hdlr"
            ]
            for head, at, _ in inside if b"vide" in kinds else ():
                if head == b"tkhd":
                    across, _, _, _, down = struct.unpack_from(">iiiii", movie, at + (52 if movie[at] == 1 else 40))
                    return bool(across == 0 and down == 0)
    except (struct.error, IndexError):
        raise ItemUnreadable("the header of its track is cut off") from None
    return None


def _boxes(read: ReadRange, place: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Name of each box in a box or a file, and where its content begins and ends; one that says more is cut."""
    for _ in range(MOST_BOXES):
        if place + 8 > stop:
            return
        head = read(place, 16)
        size, name = struct.unpack_from(">I4s", head)
        begin = place + 8
        if size == 1:
            if len(head) < 16:
                return
            (size,) = struct.unpack_from(">Q", head, 8)
            begin += 8
        end = stop if size == 0 else min(place + size, stop)
        if end < begin:
            return
        yield name, begin, end
        place = end
    raise ItemUnreadable(f"it has more than {MOST_BOXES} boxes")


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
