"""Decoding: alpha, 16 bits, palettes, orientation, and headers that lie."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.support.synthetic_images import exif_block, random_pixels, with_late_exif
from torchmix.errors import ImageUnreadable
from torchmix.transform.images.decode import decode_image, decoder_id, grey_image
from torchmix.transform.images.header import header_of, read_header

MOST = 1 << 20


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_transparent_pixels_turn_white_or_keep_their_color() -> None:
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    content = saved(image, "PNG")
    assert decode_image(content, most_pixels=MOST).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(content, most_pixels=MOST, alpha="drop").getpixel((0, 0)) == (10, 20, 30)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    content = saved(palette, "PNG", transparency=1)
    assert decode_image(content, most_pixels=MOST).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(content, most_pixels=MOST, alpha="drop").getpixel((0, 0)) == (10, 20, 30)


def test_16_bits_are_shifted_where_pillow_saturates() -> None:
    levels = np.linspace(0, 65_535, 256).astype(np.uint16).reshape(16, 16)
    decoded = np.asarray(decode_image(saved(Image.fromarray(levels), "PNG"), most_pixels=MOST))
    assert np.array_equal(decoded[..., 0], levels >> 8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("where", ["jpeg", "png", "png behind its data", "webp"])
def test_orientation_has_one_rule(orientation: int, where: str) -> None:
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[:10, :15] = 255  # the corner that is the first one before turning
    image, exif = Image.fromarray(pixels), exif_block(orientation)
    if where == "png behind its data":
        content = with_late_exif(saved(image, "PNG"), orientation)
    elif where == "webp":
        content = saved(image, "WEBP", exif=exif, lossless=True)
    else:
        content = saved(image, where.upper(), exif=exif)
    header, decoded = header_of(content), decode_image(content, most_pixels=MOST)
    assert header.orientation == orientation
    assert (header.width, header.height) == decoded.size == ((20, 30) if orientation > 4 else (30, 20))
    turned = np.asarray(decoded)[..., 0] > 128
    corners = [turned[2, 2], turned[2, -3], turned[-3, -3], turned[-3, 2]]  # clockwise
    assert corners.index(True) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 0, 6: 1, 7: 2, 8: 3}[orientation]


def test_a_header_that_lies_is_bounded_before_it_is_decoded() -> None:
    small = saved(Image.new("RGB", (8, 4)), "PNG")
    ihdr = b"IHDR" + struct.pack(">II", 50_000, 50_000) + small[24:29]
    lying = small[:12] + ihdr + struct.pack(">I", zlib.crc32(ihdr)) + small[33:]
    with pytest.raises(ImageUnreadable, match="2500000000 pixels, more than most_pixels 1048576"):
        decode_image(lying, most_pixels=MOST)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "no image"),
        (b"hello world, this is no image at all", "no image that Pillow reads"),
        (b"\xff\xd8\xff\xe0", "cut off"),
        (b"\x89PNG\r\n\x1a\n", "does not begin with its size|cut off"),
        (b"RIFF\0\0\0\0WEBPABCD" + bytes(20), "begins with the chunk"),
    ],
)
def test_what_is_no_image_is_named(content: bytes, message: str) -> None:
    with pytest.raises(ImageUnreadable, match=message):
        header_of(content)


def test_a_truncated_image_is_named() -> None:
    content = saved(Image.fromarray(random_pixels(np.random.default_rng(1), 200, 100)), "JPEG")
    assert header_of(content).width == 200
    with pytest.raises(ImageUnreadable, match="does not decode"):
        decode_image(content[: len(content) // 2], most_pixels=MOST)


@pytest.mark.parametrize("kind, most_bytes", [("JPEG", 1000), ("WEBP", 64), ("PNG", 200)])
def test_a_header_is_read_without_the_data(kind: str, most_bytes: int) -> None:
    content = saved(Image.fromarray(random_pixels(np.random.default_rng(2), 700, 500)), kind)
    read_bytes = []

    def read(offset: int, count: int) -> bytes:
        read_bytes.append(count)
        return content[offset : offset + count]

    header = read_header(read, len(content))
    assert (header.width, header.height) == (700, 500)
    assert sum(read_bytes) <= most_bytes < len(content)


def test_the_decoder_and_the_grey_image() -> None:
    assert decoder_id().startswith("pillow ") and "jpeg" in decoder_id()
    assert grey_image(3, 2).getpixel((2, 1)) == (128, 128, 128)
