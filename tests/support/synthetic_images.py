"""Small images of every kind, orientation and order of chunks, from a random generator."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "L", "1", "P", "RGBA", "LA", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L"),
    "TIFF": ("RGB", "CMYK"),
}
SMOOTH = 6


@dataclass(frozen=True, kw_only=True)
class SyntheticImage:
    """An image and what is known of it."""

    content: bytes
    kind: str
    mode: str
    orientation: int


def random_pixels(rng: np.random.Generator, width: int, height: int, channels: int = 3) -> np.ndarray:
    """Smooth random pixels, [height, width, channels]."""
    small = rng.integers(0, 256, (height // SMOOTH + 2, width // SMOOTH + 2, channels)).astype(np.uint8)
    planes = [np.asarray(Image.fromarray(small[..., c]).resize((width, height), 3)) for c in range(channels)]
    return np.stack(planes, axis=-1)


def make_image(rng: np.random.Generator, *, most_side: int = 60) -> SyntheticImage:
    """An image of a random kind, mode, size and orientation."""
    kind = list(MODES)[rng.integers(len(MODES))]
    mode = MODES[kind][rng.integers(len(MODES[kind]))]
    width, height = (int(side) for side in rng.integers(1, most_side, 2))
    image = _image(rng, mode, width, height)
    orientation = int(rng.integers(0, 9)) if kind in ("JPEG", "PNG", "WEBP") else 0
    options: dict[str, object] = {}
    if kind == "WEBP":
        options["lossless"] = bool(rng.integers(2))
    if orientation and not (kind == "PNG" and rng.integers(2)):
        options["exif"] = exif_block(orientation)
    file = io.BytesIO()
    image.save(file, kind, **options)
    content = file.getvalue()
    if orientation and "exif" not in options:
        content = with_late_exif(content, orientation)
    return SyntheticImage(content=content, kind=kind, mode=mode, orientation=orientation)


def _image(rng: np.random.Generator, mode: str, width: int, height: int) -> Image.Image:
    if mode == "I;16":
        levels = random_pixels(rng, width, height, 1)[..., 0].astype(np.uint16) * 257
        return Image.fromarray(levels)
    rgba = Image.fromarray(random_pixels(rng, width, height, 4))
    return rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode) if mode != "LA" else rgba.convert("LA")


def exif_block(orientation: int) -> bytes:
    """An EXIF block with an orientation alone."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def with_late_exif(png: bytes, orientation: int) -> bytes:
    """A PNG whose eXIf chunk stands behind its data."""
    block = exif_block(orientation).removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(block)) + b"eXIf" + block
    chunk += struct.pack(">I", zlib.crc32(chunk[4:]))
    end = png.rindex(b"IEND") - 4
    return png[:end] + chunk + png[end:]
