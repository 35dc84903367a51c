"""Decoding: alpha, 16 bits, palettes, orientation, and headers that lie."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image, ImageOps, features

from tests.support.synthetic_images import (
    WAYS,
    exif_block,
    png_chunk,
    random_pixels,
    saved_turned,
    with_chunk,
    xmp_block,
)
from torchmix.errors import ItemUnreadable
from torchmix.modalities.images.decode import check_pixels, decode_image, decoder_id, grey_image
from torchmix.modalities.images.header import ImageHeader, header_of, orientation_of, read_header
from torchmix.modalities.images.kind import ImageModality
from torchmix.recipe.structs import Images

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
@pytest.mark.parametrize("kind, way", [(kind, way) for kind, ways in WAYS.items() for way in ways])
def test_orientation_has_one_rule(orientation: int, kind: str, way: str) -> None:
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[:10, :15] = 255  # the corner that is the first one before turning
    options = {"lossless": True} if kind == "WEBP" else {}
    content = saved_turned(Image.fromarray(pixels), kind, {way: orientation}, **options)
    header, decoded = header_of(content), decode_image(content, most_pixels=MOST)
    assert (header.width, header.height) == decoded.size == ((20, 30) if orientation > 4 else (30, 20))
    turned = np.asarray(decoded)[..., 0] > 128
    corners = [turned[2, 2], turned[2, -3], turned[-3, -3], turned[-3, 2]]  # clockwise
    assert corners.index(True) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 0, 6: 1, 7: 2, 8: 3}[orientation]


def test_exif_decides_before_xmp_though_its_value_may_be_none() -> None:
    xmp = xmp_block(6)
    for value, wanted in ((8, 8), (0, 1), (9, 1)):
        assert orientation_of({"exif": exif_block(value), "xmp": xmp}) == wanted
    without = Image.Exif()
    without[0x010F] = "a maker"
    assert orientation_of({"exif": without.tobytes(), "xmp": xmp}) == 6
    assert orientation_of({"exif": b"no block", "xmp": xmp}) == 1, "Pillow refuses to look further"
    assert orientation_of({"Raw profile type exif": "no digits\n\n\nxyz", "xmp": xmp}) == 1
    assert orientation_of({}) == 1


def test_a_picture_of_several_frames_is_turned_by_what_stands_before_its_second() -> None:
    frames = [Image.new("RGB", (30, 20), color) for color in ("red", "green")]
    content = saved(frames[0], "PNG", save_all=True, append_images=frames[1:])
    late = with_chunk(content, *png_chunk("exif", 6), late=True)
    early = with_chunk(content, *png_chunk("exif", 6), late=False)
    for image, size in ((late, (30, 20)), (early, (20, 30))):
        assert ImageOps.exif_transpose(Image.open(io.BytesIO(image))).size == size
        header = header_of(image)
        assert (header.width, header.height) == decode_image(image, most_pixels=MOST).size == size


def test_bytes_between_the_markers_of_a_jpeg_are_passed_over() -> None:
    content = saved(Image.new("RGB", (30, 20)), "JPEG", exif=exif_block(6))
    place = content.index(b"\xff\xdb")
    content = content[:place] + b"junk" + b"\xff\0" + bytes(5000) + content[place:]
    header = header_of(content)
    assert (header.width, header.height) == decode_image(content, most_pixels=MOST).size == (20, 30)
    with pytest.raises(ItemUnreadable, match="a JPEG without data"):
        header_of(content[: content.index(b"\xff\xda")])


def test_a_header_that_lies_is_bounded_before_it_is_decoded() -> None:
    small = saved(Image.new("RGB", (8, 4)), "PNG")
    ihdr = b"IHDR" + struct.pack(">II", 50_000, 50_000) + small[24:29]
    lying = small[:12] + ihdr + struct.pack(">I", zlib.crc32(ihdr)) + small[33:]
    with pytest.raises(ItemUnreadable, match="2500000000 pixels, more than most_pixels 1048576"):
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
    with pytest.raises(ItemUnreadable, match=message):
        header_of(content)


def test_a_truncated_image_is_named() -> None:
    content = saved(Image.fromarray(random_pixels(np.random.default_rng(1), 200, 100)), "JPEG")
    assert header_of(content).width == 200
    with pytest.raises(ItemUnreadable, match="does not decode"):
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


def crc_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_of(
    rows: bytes, width: int, height: int, *, depth: int = 8, colors: int = 2, interlaced: int = 0, parts: int = 3
) -> bytes:
    """A PNG whose rows are these bytes, in some chunks."""
    packed = zlib.compress(rows)
    size = len(packed) // parts + 1
    cut = [packed[at : at + size] for at in range(0, len(packed), size)]
    head = struct.pack(">IIBBBBB", width, height, depth, colors, 0, 0, interlaced)
    palette = crc_chunk(b"PLTE", bytes(range(256)) * 3) if colors == 3 else b""
    data = b"".join(crc_chunk(b"IDAT", each) for each in cut)
    return b"\x89PNG\r\n\x1a\n" + crc_chunk(b"IHDR", head) + palette + data + crc_chunk(b"IEND", b"")


@pytest.mark.parametrize("depth, colors", [(8, 2), (16, 2), (8, 6), (8, 0), (1, 0), (4, 3), (8, 4)])
@pytest.mark.parametrize("value", [0, 255])
def test_a_png_whose_pixels_end_early_is_named(depth: int, colors: int, value: int) -> None:
    width, height = 21, 9
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colors]
    row = b"\0" + bytes([value]) * -(-width * channels * depth // 8)
    words = {"depth": depth, "colors": colors}
    for rows in (height, height + 2):
        whole = decode_image(png_of(row * rows, width, height, **words), most_pixels=MOST)
        assert whole.size == (width, height)
    for rows in (1, 4, height - 1):
        with pytest.raises(ItemUnreadable, match=r"its pixels end \d+ bytes early|is truncated"):
            decode_image(png_of(row * rows, width, height, **words), most_pixels=MOST)
    with pytest.raises(ItemUnreadable, match=rf"its pixels end {3 * len(row)} bytes early"):
        decode_image(png_of(row * (height - 3), width, height, parts=1, **words), most_pixels=MOST)


def test_passes_of_an_interlaced_png_are_counted() -> None:
    for width, height in ((1, 1), (5, 3), (8, 8), (21, 9)):
        grids = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
        sizes = [(len(range(x, width, across)), len(range(y, height, down))) for x, y, across, down in grids]
        rows = [b"\0" + b"\7" * 3 * columns for columns, count in sizes if columns for _ in range(count)]
        found = np.asarray(decode_image(png_of(b"".join(rows), width, height, interlaced=1), most_pixels=MOST))
        assert found.shape == (height, width, 3) and (found == 7).all()
        if len(rows) > 1:
            with pytest.raises(ItemUnreadable, match=r"early|does not decode"):
                decode_image(png_of(b"".join(rows[:-1]), width, height, interlaced=1), most_pixels=MOST)


def test_a_lack_of_memory_in_pillow_is_no_bad_image(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(Image.new("RGB", (4, 4)), "PNG")

    def lacks(*_: object) -> None:
        raise OSError("out of memory when reading image file")

    monkeypatch.setattr(Image.Image, "load", lacks)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lacks)
    with pytest.raises(MemoryError, match="when reading"):
        decode_image(content, most_pixels=MOST)


def test_the_decoder_and_the_grey_image() -> None:
    assert decoder_id().startswith("pillow ") and "jpeg" in decoder_id()
    assert grey_image(3, 2).getpixel((2, 1)) == (128, 128, 128)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "AVIF"])
def test_a_browser_is_told_what_an_image_is(kind: str) -> None:
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    content = saved(Image.new("RGB", (8, 8)), kind)
    shown = ImageModality.of(Images(column="image", token=7), "images").preview(memoryview(content))
    assert shown.startswith(f'<img src="data:image/{kind.lower()};base64,')


def test_a_webp_above_the_bound_of_pillow_is_refused_by_its_header() -> None:
    header = ImageHeader(kind="webp", stored_width=16_000, stored_height=12_000, orientation=1)
    with pytest.raises(ItemUnreadable, match="decodes JPEG and PNG alone above 178956970"):
        check_pixels(header, 1 << 30)
    check_pixels(replace(header, kind="jpeg"), 1 << 30)


def test_an_image_above_the_bound_of_pillow_is_decoded_where_the_recipe_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pixels = random_pixels(np.random.default_rng(4), 60, 40)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for kind in ("PNG", "JPEG"):
        content = saved(Image.fromarray(pixels), kind)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            decoded = decode_image(content, most_pixels=MOST)
        assert decoded.size == (60, 40) and decoded.mode == "RGB"
        assert kind != "PNG" or np.array_equal(np.asarray(decoded), pixels)
    with pytest.raises(ItemUnreadable, match="more than most_pixels 99"):
        decode_image(content, most_pixels=99)
    assert Image.MAX_IMAGE_PIXELS == 100
