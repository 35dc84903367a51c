"""Images for the trials of all kinds: files of some forms, their patches by loops, and odd ones."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image

from tests.support.image_oracle import patches_of
from tests.support.image_sources import RULES
from tests.support.media import MediaKind
from tests.support.synthetic_images import WAYS, random_pixels, saved_turned


def make_picture(rng: np.random.Generator, number: int) -> bytes:
    """A picture of some ten pixels a side; some are turned."""
    kind = ("JPEG", "PNG", "WEBP")[number % 3]
    width, height = (int(side) for side in rng.integers(5, 90, 2))
    ways = {str(rng.choice(WAYS[kind])): int(rng.integers(1, 9))} if rng.random() < 0.5 else {}
    return saved_turned(Image.fromarray(random_pixels(rng, width, height)), kind, ways)


def png_of_size(width: int, height: int, *, depth: int = 8, body: bytes = b"") -> bytes:
    """A PNG that says this size, with these bytes as its pixels."""
    found = b"\x89PNG\r\n\x1a\n"
    size = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    for name, held in ((b"IHDR", size), (b"IDAT", zlib.compress(body, 9)), (b"IEND", b"")):
        found += struct.pack(">I", len(held)) + name + held + struct.pack(">I", zlib.crc32(name + held))
    return found


def saved(kind: str, width: int = 40, height: int = 30, **options: object) -> bytes:
    """A picture of noise in a file of a kind."""
    file = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, kind, **options)
    return file.getvalue()


def odd_pictures() -> dict[str, tuple[bytes, str]]:
    """See `MediaKind.odd`."""
    png, jpeg, webp = saved("PNG"), saved("JPEG"), saved("WEBP")
    sides = struct.pack(">HH", 30, 40)
    return {
        "a text": (b"what is seen, and no picture at all", "no image that Pillow reads"),
        "a sound": (b"RIFF\x24\0\0\0WAVEfmt ", "no image that Pillow reads"),
        "a PNG of 50,000 a side": (png_of_size(50_000, 50_000), "more than most_pixels"),
        "a PNG of no pixels": (png_of_size(0, 40), "0 x 40 pixels"),
        "a PNG cut off": (png[: len(png) // 2], "not decode"),
        "a JPEG cut off": (jpeg[: len(jpeg) // 2], "not decode"),
        "a JPEG cut in its header": (jpeg[:100], "data"),
        "a WebP cut off": (webp[: len(webp) // 2], "decode"),
        "a JPEG of 65,000 a side": (jpeg.replace(sides, b"\xfd\xe8\xfd\xe8", 1), "more than most_pixels"),
        "a strip": (png_of_size(8_001, 1, body=bytes(24_004)), "over 200 times"),
    }


IMAGE = MediaKind(
    kind="image",
    suffix="pic",
    words=RULES["dynamic"],
    sizes="patches",
    unit_array="pixel_values",
    make=make_picture,
    units=lambda content: patches_of(content, "dynamic")[0],
    tokens=lambda content: patches_of(content, "dynamic")[1],
    odd=odd_pictures,
    packages=("PIL",),
    shown=("<img", 'src="data:image/png'),
)
