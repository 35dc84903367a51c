"""Bytes of an image -> its pixels, turned and in RGB."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any, Literal

import numpy as np

from torchmix.errors import ItemUnreadable
from torchmix.modalities.images.header import ImageHeader, header_of, import_pillow

# --- Bytes of an image -> its pixels, turned and in RGB.
#
# A pure function of the bytes within one build of Pillow and its libraries; JPEG pixels differ by 1 or 2 levels
# between builds, so `decoder_id` names them. An image whose header lies is refused before it is decoded: more pixels
# than `most_pixels`, or another size than the decoder finds.
#
# Alpha is composited on white, or dropped. 16 bits are shifted to 8, where Pillow's own conversion saturates. CMYK,
# palettes and grey are converted by Pillow.

Alpha = Literal["white", "drop"]
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Orientation -> Pillow's number of the transposition that undoes it."""
UNBOUNDED = ("jpeg", "png")
"""Kinds that are decoded although they are above Pillow's bound."""
PILLOW_PIXELS = 178_956_970
"""An image of more is refused by Pillow."""
MOST_SCANS = 1_000
"""A progressive JPEG has some ten; one of a megabyte may have 100,000, which would take an hour."""
_NO_MEMORY = "out of memory"
"""How an OSError of Pillow's begins where a decoder of its own lacks memory."""
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Values of a pixel by the color type of a PNG."""
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column and row, and steps across and down, of each pass of an interlaced PNG."""
_AT_ONCE = 1 << 20
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


def decoder_id() -> str:
    """The build that decodes here: versions of Pillow and of its libraries."""
    import_pillow()
    from PIL import __version__, features

    libraries = {name: features.version(name) for name in ("libjpeg_turbo", "jpg", "zlib", "webp", "avif")}
    return ",".join([f"pillow {__version__}", *(f"{name} {found}" for name, found in libraries.items() if found)])


def decode_image(content: bytes | memoryview, *, most_pixels: int, alpha: Alpha = "white") -> Any:
    """Decode an image.

    Args:
        content: Its bytes.
        most_pixels: Refuse an image with more.
        alpha: What becomes of transparent pixels: they turn white, or keep their hidden color.

    Raises:
        ItemUnreadable: It is no image, is damaged or cut off, or is not as large as its header says.
    """
    image_module = import_pillow()
    header = header_of(content)
    check_pixels(header, most_pixels)
    if header.kind == "jpeg" and (scans := bytes(content).count(b"\xff\xda")) > MOST_SCANS:
        raise ItemUnreadable(f"it is a JPEG of {scans} scans, more than {MOST_SCANS}; each one walks all of its pixels")
    try:
        opened = _opened(image_module, content, header)
        if opened.size != (header.stored_width, header.stored_height):
            raise ItemUnreadable(
                f"its header says {header.stored_width} x {header.stored_height} pixels, its decoder "
                f"{opened.width} x {opened.height}"
            )
        opened.load()
        if header.kind == "png":
            _check_rows(content, opened)
        image = _in_rgb(opened, alpha)
    except ItemUnreadable:
        raise
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever they meet
        if str(error).startswith(_NO_MEMORY):
            raise MemoryError(str(error)) from None
        message = " ".join(str(error).split())
        raise ItemUnreadable(f"it does not decode ({type(error).__name__}: {message[:120]})") from None
    turn = None if header.kind == "tiff" else _TURNS.get(header.orientation)  # Pillow turns that kind itself
    return image if turn is None else image.transpose(turn)


def _opened(image_module: Any, content: bytes | memoryview, header: ImageHeader) -> Any:
    """The image as Pillow opens it; one that is larger than Pillow's own bound, by the decoder of its kind, since that
    bound is of the whole process."""
    most, kinds = image_module.MAX_IMAGE_PIXELS, (header.kind.upper(),)
    if most is None or header.stored_width * header.stored_height <= most:
        return image_module.open(io.BytesIO(content), formats=kinds)
    image_module.init()
    if header.kind not in UNBOUNDED:
        return image_module.open(io.BytesIO(content), formats=kinds)  # which warns
    factory, _ = image_module.OPEN[header.kind.upper()]
    return factory(io.BytesIO(content), "")


def _check_rows(content: bytes | memoryview, image: Any) -> None:
    """Raise ItemUnreadable for a PNG whose pixels end early, which Pillow fills with zeros.

    One whose last row is zeros, or that is interlaced, is inflated once more, as far as its pixels go.
    """
    width, height, depth, colors, _, _, is_interlaced = struct.unpack_from(">IIBBBBB", content, 16)
    if not is_interlaced and image.crop((0, height - 1, width, height)).tobytes().strip(b"\0"):
        return
    left = 0
    for x, y, across, down in _ADAM7 if is_interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - x) // across), -(-(height - y) // down)
        left += max(0, rows) * (1 + -(-columns * depth * _PNG_CHANNELS[colors] // 8)) if columns > 0 else 0
    inflate, place = zlib.decompressobj(), 8
    try:
        while left > 0 and place + 8 <= len(content) and not inflate.eof:
            size, name = struct.unpack_from(">I4s", content, place)
            body = bytes(content[place + 8 : place + 8 + size]) if name == b"IDAT" else b""
            while body and left > 0:
                left -= len(inflate.decompress(body, _AT_ONCE))
                body = inflate.unconsumed_tail
            place += size + 12
        left -= len(inflate.flush()) if left > 0 else 0
    except zlib.error:  # of a checksum behind the last pixel, which Pillow does not look at
        return
    if left > 0:
        raise ItemUnreadable(f"its pixels end {left} bytes early")


def check_pixels(header: ImageHeader, most_pixels: int) -> None:
    """Raise ItemUnreadable for a header of too many pixels."""
    pixels = header.stored_width * header.stored_height
    if pixels > most_pixels:
        raise ItemUnreadable(
            f"its header says {header.stored_width} x {header.stored_height} = {pixels} pixels, more than most_pixels "
            f"{most_pixels}"
        )
    if pixels > PILLOW_PIXELS and header.kind not in UNBOUNDED:
        raise ItemUnreadable(f"Pillow decodes JPEG and PNG alone above {PILLOW_PIXELS} pixels, and it has {pixels}")


def grey_image(width: int, height: int) -> Any:
    """What stands for an image that cannot be read: all pixels 128."""
    return import_pillow().new("RGB", (width, height), (128, 128, 128))


def _in_rgb(image: Any, alpha: Alpha) -> Any:
    image_module = import_pillow()
    mode = image.mode
    if mode.startswith("I;16") or mode == "I":
        levels = np.asarray(image).astype(np.int64)
        return image_module.fromarray(np.clip(levels >> 8, 0, 255).astype(np.uint8)).convert("RGB")
    if mode in _WITH_ALPHA or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        if alpha == "drop":
            return with_alpha.convert("RGB")
        white = image_module.new("RGBA", with_alpha.size, (255, 255, 255, 255))
        return image_module.alpha_composite(white, with_alpha).convert("RGB")
    return image if mode == "RGB" else image.convert("RGB")
