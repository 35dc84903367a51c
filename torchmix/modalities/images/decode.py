"""Bytes of an image -> its pixels, turned and in RGB."""

from __future__ import annotations

import io
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
        image = _in_rgb(opened, alpha)
    except ItemUnreadable:
        raise
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever they meet
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
