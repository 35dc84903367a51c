"""How a viewer turns an image, by what its file says beside the pixels.

The rule is Pillow's: `Image.getexif` with `ImageOps.exif_transpose`, down to what it makes of damaged blocks. It is
written again here, since Pillow's warns, raises, and needs an image that is open. EXIF decides where it has the tag,
though its value may be none; then XMP does. Where Pillow raises, the image stays as it is stored.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

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
