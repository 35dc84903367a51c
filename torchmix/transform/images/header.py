"""The size of an image from its header, without decoding it.

In: the bytes of an image, all of them or by ranges. Out: its size as it is stored, its EXIF orientation, and its kind.
Must hold: the decoder turns an image by the orientation that is found here, so index and tensors have one rule for all
kinds: the EXIF block of a JPEG, of a PNG (also behind its data), and of a WebP. Headers can lie, so the decoder
compares the size, and `most_pixels` bounds it. Cost: for JPEG the markers before the data, for PNG a look at each
chunk, for WebP 30 bytes and a look at each chunk; any other kind is opened by Pillow from all its bytes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from torchmix.errors import ImageUnreadable

Read = Callable[[int, int], bytes]
"""Bytes of an image, by offset and number; fewer only where it ends."""

TURNED = (5, 6, 7, 8)
"""Orientations that swap the sides."""
_ORIENTATION = 0x0112
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MOST_EXIF_BYTES = 1 << 20


class ImageHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a header says."""

    kind: str
    """`jpeg`, `png`, `webp`, or Pillow's name of the format in lower case."""
    stored_width: int
    """Pixels of a row, as stored."""
    stored_height: int
    """Rows, as stored."""
    orientation: int = 1
    """How the viewer turns it, 1 to 8, as EXIF numbers it."""

    @property
    def width(self) -> int:
        """Pixels of a row after turning."""
        return self.stored_height if self.orientation in TURNED else self.stored_width

    @property
    def height(self) -> int:
        """Rows after turning."""
        return self.stored_width if self.orientation in TURNED else self.stored_height


def header_of(content: bytes | memoryview) -> ImageHeader:
    """The header of an image whose bytes are all here; as `read_header`."""
    view = memoryview(content)
    return read_header(lambda offset, count: bytes(view[offset : offset + count]), len(view))


def read_header(read: Read, num_bytes: int) -> ImageHeader:
    """The header of an image.

    Args:
        read: Reads ranges of it.
        num_bytes: Its size.

    Raises:
        ImageUnreadable: It is no image, is cut off, or has no pixels.
    """
    head = read(0, 32)
    try:
        if head[:2] == b"\xff\xd8":
            header = _jpeg(read, num_bytes)
        elif head[:8] == b"\x89PNG\r\n\x1a\n":
            header = _png(read, num_bytes)
        elif head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            header = _webp(read, num_bytes, head)
        else:
            header = _by_pillow(read(0, num_bytes))
    except (struct.error, IndexError):
        raise ImageUnreadable(f"its header is cut off after {num_bytes} bytes") from None
    if header.stored_width < 1 or header.stored_height < 1:
        raise ImageUnreadable(f"its header says {header.stored_width} x {header.stored_height} pixels")
    return header


def _jpeg(read: Read, num_bytes: int) -> ImageHeader:
    orientation, place = 0, 2
    while place < num_bytes:
        lead, marker, length = struct.unpack(">BBH", read(place, 4))
        if lead != 0xFF:
            raise ImageUnreadable(f"it is no whole JPEG: no marker at byte {place}")
        if marker == 0xFF:  # a fill byte
            place += 1
        elif marker in (0x01, 0xD8) or 0xD0 <= marker <= 0xD7:  # markers without a length
            place += 2
        elif marker in _SIZE_MARKERS:
            height, width = struct.unpack(">HH", read(place + 5, 4))
            return ImageHeader(
                kind="jpeg",
                stored_width=width,
                stored_height=height,
                orientation=orientation or _late_exif(read, place),
            )
        elif marker in (0xD9, 0xDA):
            break
        else:
            if marker == 0xE1 and not orientation:
                orientation = _jpeg_orientation(read(place + 4, length - 2))
            place += 2 + length
    raise ImageUnreadable("it is a JPEG without a size before its data")


def _late_exif(read: Read, place: int) -> int:
    """The orientation of an EXIF block behind the size and before the data; 1 where there is none."""
    while True:
        head = read(place, 4)
        if len(head) < 4 or head[0] != 0xFF or head[1] in (0xD9, 0xDA):
            return 1
        if head[1] == 0xFF:
            place += 1
            continue
        length = int.from_bytes(head[2:], "big")
        if head[1] == 0xE1 and (found := _jpeg_orientation(read(place + 4, length - 2))):
            return found
        place += 2 + length


def _jpeg_orientation(segment: bytes) -> int:
    return _orientation(segment[6:]) if segment[:6] == b"Exif\0\0" else 0


def _png(read: Read, num_bytes: int) -> ImageHeader:
    head = read(8, 16)
    if head[4:8] != b"IHDR":
        raise ImageUnreadable("it is a PNG that does not begin with its size")
    width, height = struct.unpack(">II", head[8:16])
    orientation, place = 1, 8
    while place + 8 <= num_bytes:
        length, name = struct.unpack(">I4s", read(place, 8))
        if name == b"IEND":
            break
        if name == b"eXIf" and length <= _MOST_EXIF_BYTES:
            orientation = _orientation(read(place + 8, length)) or 1
            break
        place += 12 + length
    return ImageHeader(kind="png", stored_width=width, stored_height=height, orientation=orientation)


def _webp(read: Read, num_bytes: int, head: bytes) -> ImageHeader:
    name = head[12:16]
    if name == b"VP8X":
        width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
        has_exif = bool(head[20] & 8)
    elif name == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        width, height, has_exif = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, False
    elif name == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", head[26:30]))
        has_exif = False
    else:
        raise ImageUnreadable(f"it is a WebP that begins with the chunk {name!r}")
    if len(head) < 30:
        raise ImageUnreadable(f"its header is cut off after {num_bytes} bytes")
    orientation, place = 1, 12
    while has_exif and place + 8 <= num_bytes:
        chunk, length = struct.unpack("<4sI", read(place, 8))
        if chunk == b"EXIF" and length <= _MOST_EXIF_BYTES:
            orientation = _orientation(read(place + 8, length).removeprefix(b"Exif\0\0")) or 1
            break
        place += 8 + length + length % 2
    return ImageHeader(kind="webp", stored_width=width, stored_height=height, orientation=orientation)


def _by_pillow(content: bytes) -> ImageHeader:
    image_module = import_pillow()
    try:
        with image_module.open(io.BytesIO(content)) as image:
            width, height = image.size
            return ImageHeader(kind=str(image.format).lower(), stored_width=width, stored_height=height)
    except Exception as error:  # Pillow's readers raise whatever they meet
        message = " ".join(str(error).split())
        raise ImageUnreadable(f"it is no image that Pillow reads ({type(error).__name__}: {message[:120]})") from None


def _orientation(exif: bytes) -> int:
    """The orientation in a TIFF block; 0 where there is none that is valid."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 0
    try:
        (place,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, place)
        for entry in range(place + 2, place + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, entry)
            if tag == _ORIENTATION:
                return value if kind == 3 and 1 <= value <= 8 else 0
    except struct.error:
        pass
    return 0


def import_pillow() -> Any:
    """Pillow's `Image` module.

    Raises:
        ImageUnreadable: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImageUnreadable("images need the package Pillow: pip install 'torchmix[images]'") from error
    return Image
