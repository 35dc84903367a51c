"""The size of an image from its header, turned as its orientation says, without decoding it."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any

import msgspec

from torchmix.errors import ItemUnreadable

# --- How a viewer turns an image, by what its file says beside the pixels.
#
# The rule is Pillow's: `Image.getexif` with `ImageOps.exif_transpose`, down to what it makes of damaged blocks. It is
# written again here, since Pillow's warns, raises, and needs an image that is open. EXIF decides where it has the tag,
# though its value may be none; then XMP does. Where Pillow raises, the image stays as it is stored.

TURNED = (5, 6, 7, 8)
"""Orientations that swap the sides."""
EXIF = "exif"
RAW_EXIF = "Raw profile type exif"
"""Keyword of the text chunk of a PNG that ImageMagick wrote before there was a chunk for EXIF: hexadecimal digits."""
XMP = "xmp"
XMP_TEXT = "XML:com.adobe.xmp"
ORIENTATION = 0x0112
"""The tag of EXIF and TIFF."""
_ORDERS = {b"II*\0": "<", b"MM\0*": ">", b"II\0*": "<", b"MM*\0": ">", b"MM\0+": ">"}
"""First bytes of a TIFF block, the wrong ones that are accepted too, and their order of bytes."""
_NUMBERS = {3: "H", 4: "L", 6: "b", 8: "h", 9: "l", 11: "f", 12: "d", 13: "L", 16: "Q"}
_UNIT_BYTES = {1: 1, 2: 1, 5: 8, 7: 1, 10: 8} | {kind: struct.calcsize(f"<{code}") for kind, code in _NUMBERS.items()}
"""Types of values in a TIFF block; those that stand in neither table are passed over."""
_IN_XMP = r'tiff:Orientation(?:="|>)([0-9])'


def orientation_of(info: Mapping[Any, Any]) -> int:
    """How a viewer turns it, 1 to 8, as EXIF numbers it; 1 where nothing says so.

    Args:
        info: What the file says beside the pixels, as Pillow has it in `Image.info`.
    """
    try:
        exif = info.get(EXIF)
        if exif is None and RAW_EXIF in info:
            exif = bytes.fromhex("".join(info[RAW_EXIF].split("\n")[3:]))
        found = None if exif is None else _in_exif(exif)
        if found is None:
            match: re.Match[Any] | None = None
            if text := info.get(XMP_TEXT):
                match = re.search(_IN_XMP, text)
            elif block := info.get(XMP):
                match = re.search(_IN_XMP.encode(), block)
            found = int(match[1]) if match else 1
    except (ValueError, TypeError, AttributeError, struct.error):  # where Pillow raises
        return 1
    return next((number for number in range(2, 9) if found == number), 1)


def _in_exif(exif: bytes) -> Any:
    """The first value of the tag, whatever it is; None where the block lacks it."""
    block = re.sub(b"^(Exif\0\0){1,2}", b"", exif)
    if not block:
        return None
    order = _ORDERS.get(block[:4])
    if order is None:
        raise ValueError("no TIFF block")
    (place,) = struct.unpack_from(f"{order}L", block, 4)
    if place + 2 > len(block):
        return None
    (count,) = struct.unpack_from(f"{order}H", block, place)
    seen, num_bytes_apart = set[int](), 0
    for entry in range(place + 2, min(place + 2 + 12 * count, len(block) - 11), 12):
        tag, kind, number, offset = struct.unpack_from(f"{order}HHLL", block, entry)
        size = number * _UNIT_BYTES.get(kind, 0)
        if tag in seen or not size:
            continue
        value = block[entry + 8 : entry + 8 + size]
        if size > 4:
            num_bytes_apart += size
            if num_bytes_apart > len(block):
                continue
            value = block[offset : offset + size]
            if len(value) < size:
                return None  # a reader of files stops here
        seen.add(tag)
        if tag == ORIENTATION:
            return _first_value(value, kind, order)
    return None


def _first_value(value: bytes, kind: int, order: str) -> Any:
    if kind in (5, 10):
        above, below = struct.unpack_from(f"{order}{'LL' if kind == 5 else 'll'}", value)
        return Fraction(above, below) if below else value
    return struct.unpack_from(order + _NUMBERS[kind], value)[0] if kind in _NUMBERS else value


# --- The size of an image from its header, without decoding it.
#
# The decoder turns an image as is found here, so index and tensors have one rule for all kinds, that of Pillow's
# `exif_transpose`: `header.py`. Chunks and markers are walked as Pillow's readers walk them. Headers can lie, so
# the decoder compares the size, and `most_pixels` bounds it. Cost: for JPEG the markers before the data, for PNG a
# look at each chunk, for WebP 30 bytes and a look at each chunk; another kind is opened by Pillow from all its bytes.

Read = Callable[[int, int], bytes]
"""Bytes of an image, by offset and number; fewer only where it ends."""

HEADER_VERSION = 2
"""Rises when an image of before gets another size; a part of the `transform_id` of sources with images."""
_SIZE_MARKERS = frozenset((*range(0xC0, 0xD0), 0xDE)) - {0xC4, 0xC8, 0xCC}
_BARE_MARKERS = frozenset((0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)))
"""Markers without a length; also those behind which Pillow looks for the next one."""
_XMP_OF_JPEG = b"http://ns.adobe.com/xap/1.0/\0"
BY_PILLOW = ("AVIF", "BMP", "DIB", "GIF", "JPEG2000", "PPM", "QOI", "TIFF")
"""Kinds that Pillow opens. Not others: PostScript starts a program, and an icon decodes a picture of any size."""
_JUNK_BYTES = 4096
_MOST_TEXT_BYTES = 1 << 20
"""A compressed text of a PNG with more is refused by Pillow."""


class ImageHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a header says."""

    kind: str
    """`jpeg`, `png`, `webp`, or Pillow's name of the format in lower case."""
    stored_width: int
    """Pixels of a row, as stored."""
    stored_height: int
    """Rows, as stored."""
    orientation: int = 1
    """How the viewer turns it, 1 to 8, as EXIF numbers it. A TIFF comes turned from its decoder."""

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
        ItemUnreadable: It is no image, is cut off, or has no pixels.
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
        raise ItemUnreadable(f"its header is cut off after {num_bytes} bytes") from None
    if header.stored_width < 1 or header.stored_height < 1:
        raise ItemUnreadable(f"its header says {header.stored_width} x {header.stored_height} pixels")
    return header


def _jpeg(read: Read, num_bytes: int) -> ImageHeader:
    info: dict[str, bytes] = {}
    size: tuple[int, int] | None = None
    place = 2
    while place < num_bytes:
        lead, marker = struct.unpack("BB", read(place, 2))
        if lead != 0xFF:
            if place == 2:
                raise ItemUnreadable("it is no whole JPEG: no marker at byte 2")
            junk = read(place, _JUNK_BYTES)
            place += len(junk) if (found := junk.find(b"\xff")) < 0 else found
        elif marker == 0xFF:  # fill bytes
            fill = read(place + 1, _JUNK_BYTES)
            place += 1 + max(0, len(fill) - len(fill.lstrip(b"\xff")) - 1)
        elif marker == 0 or marker in _BARE_MARKERS:
            place += 2
        elif marker < 0xC0:
            raise ItemUnreadable(f"it is no whole JPEG: no marker at byte {place}")
        elif marker == 0xDA:
            if size is None:
                break
            width, height = size
            orientation = orientation_of(info)
            return ImageHeader(kind="jpeg", stored_width=width, stored_height=height, orientation=orientation)
        else:
            (length,) = struct.unpack(">H", read(place + 2, 2))
            if marker in _SIZE_MARKERS:
                height, width = struct.unpack(">HH", read(place + 5, 4))
                size = width, height
            elif marker == 0xE1:
                _see_app1(info, read(place + 4, length - 2) if length > 2 else b"")
            place += max(2 + length, 4)
    what = "a size before its data" if place < num_bytes else "data"
    raise ItemUnreadable(f"it is a JPEG without {what}")


def _see_app1(info: dict[str, bytes], segment: bytes) -> None:
    if segment.startswith(b"Exif\0\0"):  # a long block is cut into several segments
        info[EXIF] = info[EXIF] + segment[6:] if EXIF in info else segment
    elif segment.startswith(_XMP_OF_JPEG):
        info[XMP] = segment.removeprefix(_XMP_OF_JPEG)


def _png(read: Read, num_bytes: int) -> ImageHeader:
    head = read(8, 16)
    if head[4:8] != b"IHDR":
        raise ItemUnreadable("it is a PNG that does not begin with its size")
    width, height = struct.unpack(">II", head[8:16])
    info: dict[str, str | bytes] = {}
    place, frames, has_frame, is_animated, is_behind_data = 8, 0, False, False, False
    while place + 8 <= num_bytes:
        length, name = struct.unpack(">I4s", read(place, 8))
        if name == b"IEND":
            break
        if name in (b"IDAT", b"fdAT") and not is_behind_data:
            is_behind_data, is_animated = True, frames > 1 or (frames == 1 and not has_frame)
        elif name == b"fcTL":
            if is_behind_data and is_animated:  # what follows is of the next frame
                break
            has_frame = True
        elif name == b"acTL" and not is_behind_data:
            again = frames > 0
            (frames,) = struct.unpack(">I", read(place + 8, 4))
            frames = 0 if again or frames > 0x8000_0000 else frames
        elif name == b"eXIf":
            info[EXIF] = b"Exif\0\0" + read(place + 8, length)
        elif name in (b"tEXt", b"zTXt", b"iTXt"):
            _see_text(info, name, read, place + 8, length)
        place += 12 + length
    return ImageHeader(kind="png", stored_width=width, stored_height=height, orientation=orientation_of(info))


def _see_text(info: dict[str, str | bytes], name: bytes, read: Read, place: int, length: int) -> None:
    """Take a text chunk of a PNG, if it says how the image is turned."""
    keyword, _, _ = read(place, min(length, 80)).partition(b"\0")
    if keyword.decode("latin-1") not in (EXIF, RAW_EXIF, XMP, XMP_TEXT):
        return
    _, _, held = read(place, length).partition(b"\0")
    key = keyword.decode("latin-1")
    if name == b"tEXt":
        info[key] = held if key == EXIF else held.decode("latin-1")
    elif name == b"zTXt":
        text = _inflated(held[1:])
        info[key] = "" if text is None else text.decode("latin-1")
    else:
        parts = held[2:].split(b"\0", 2)
        if len(held) < 2 or len(parts) < 3 or (held[0] and held[1]):
            return
        found = _inflated(parts[2]) if held[0] else parts[2]
        if found is None:
            return
        if key == XMP_TEXT:
            info[XMP] = found
        with suppress(UnicodeError):
            _, _, info[key] = (part.decode() for part in (*parts[:2], found))


def _inflated(held: bytes) -> bytes | None:
    try:
        return zlib.decompressobj().decompress(held, _MOST_TEXT_BYTES)
    except zlib.error:
        return None


def _webp(read: Read, num_bytes: int, head: bytes) -> ImageHeader:
    name, flags = head[12:16], 0
    if name == b"VP8X":
        width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
        flags = head[20]
    elif name == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif name == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack("<HH", head[26:30]))
    else:
        raise ItemUnreadable(f"it is a WebP that begins with the chunk {name!r}")
    if len(head) < 30:
        raise ItemUnreadable(f"its header is cut off after {num_bytes} bytes")
    keys = {chunk: key for chunk, key, flag in ((b"EXIF", EXIF, 8), (b"XMP ", XMP, 4)) if flags & flag}
    info: dict[str, bytes] = {}
    place, stop = 12, min(num_bytes, 8 + int.from_bytes(head[4:8], "little"))
    while keys and place + 8 <= stop:
        chunk, length = struct.unpack("<4sI", read(place, 8))
        if chunk in keys and (found := read(place + 8, length)):
            info[keys[chunk]] = found
        keys.pop(chunk, None)
        place += 8 + length + length % 2
    return ImageHeader(kind="webp", stored_width=width, stored_height=height, orientation=orientation_of(info))


def _by_pillow(content: bytes) -> ImageHeader:
    image_module = import_pillow()
    try:
        image_module.init()
        kinds = [kind for kind in BY_PILLOW if kind in image_module.OPEN]  # an old Pillow lacks some
        with image_module.open(io.BytesIO(content), formats=kinds) as image:
            kind, (width, height), info = str(image.format).lower(), image.size, image.info
            if kind == "tiff" and ORIENTATION in image.tag_v2:  # its size is that of the turned image
                info = {}
            orientation = orientation_of(info)
            return ImageHeader(kind=kind, stored_width=width, stored_height=height, orientation=orientation)
    except image_module.UnidentifiedImageError:
        known = ", ".join(("JPEG", "PNG", "WebP", *BY_PILLOW))
        begins = f"it begins with {content[:8]!r}"
        raise ItemUnreadable(f"it is no image that Pillow reads here, as {known}; {begins}") from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise whatever they meet
        message = " ".join(str(error).split())
        raise ItemUnreadable(f"it is no image that Pillow reads ({type(error).__name__}: {message[:120]})") from None


def import_pillow() -> Any:
    """Pillow's `Image` module.

    Raises:
        ItemUnreadable: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ItemUnreadable("images need the package Pillow: pip install Pillow") from error
    return Image
