"""Small images of every kind, orientation and order of chunks, from a random generator."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, features

MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "L", "1", "P", "RGBA", "LA", "I;16", "RGB;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L"),
    "TIFF": ("RGB", "CMYK"),
    "AVIF": ("RGB", "RGBA"),
}
WAYS = {
    "JPEG": ("exif", "xmp", "two segments"),
    "PNG": (
        "exif",
        "late exif",
        "raw",
        "late raw",
        "compressed raw",
        "xmp",
        "late xmp",
        "compressed xmp",
    ),
    "WEBP": ("exif", "xmp"),
    "AVIF": ("exif", "xmp"),
    "TIFF": ("tag", "tag xmp"),
}
"""How a file may say how it is turned. Pillow writes the EXIF orientation of an AVIF as `irot` and `imir`."""
ANIMATED = ("GIF", "PNG", "WEBP")
"""Kinds that may have several frames; the image is the first."""
SMOOTH = 6


@dataclass(frozen=True, kw_only=True)
class SyntheticImage:
    """An image and what is known of it."""

    content: bytes
    kind: str
    mode: str
    ways: tuple[str, ...]
    """Those of `WAYS` that it has."""


def random_pixels(rng: np.random.Generator, width: int, height: int, channels: int = 3) -> np.ndarray:
    """Smooth random pixels, [height, width, channels]."""
    small = rng.integers(0, 256, (height // SMOOTH + 2, width // SMOOTH + 2, channels)).astype(np.uint8)
    planes = [np.asarray(Image.fromarray(small[..., c]).resize((width, height), 3)) for c in range(channels)]
    return np.stack(planes, axis=-1)


def make_image(rng: np.random.Generator, *, most_side: int = 60) -> SyntheticImage:
    """An image of a random kind, mode, size and orientation, which one of the ways of its kind says, or several."""
    kinds = [kind for kind in MODES if kind != "AVIF" or features.check("avif")]
    kind = kinds[rng.integers(len(kinds))]
    mode = MODES[kind][rng.integers(len(MODES[kind]))]
    width, height = (int(side) for side in rng.integers(1, most_side, 2))
    ways = WAYS.get(kind, ())
    chosen = [way for way in ways if rng.random() < 1.2 / len(ways)]
    orientations = [int(rng.integers(0, 9)) for _ in chosen]
    options = _options(rng, kind, mode)
    if 0 in orientations:  # which libtiff does not write
        options.pop("compression", None)
    if mode == "RGB;16":
        content = _deep_png(rng, width, height, dict(zip(chosen, orientations, strict=True)))
        return SyntheticImage(content=content, kind=kind, mode=mode, ways=tuple(chosen))
    image = _image(rng, mode, width, height)
    if kind in ANIMATED and mode != "I;16" and rng.random() < 0.2:
        frames = [_image(rng, mode, width, height) for _ in range(int(rng.integers(1, 3)))]
        options |= {"save_all": True, "append_images": frames, "duration": 100}
    content = saved_turned(image, kind, dict(zip(chosen, orientations, strict=True)), **options)
    return SyntheticImage(content=content, kind=kind, mode=mode, ways=tuple(chosen))


def _options(rng: np.random.Generator, kind: str, mode: str) -> dict[str, Any]:
    """How a file of a kind is written."""
    if kind == "JPEG":
        options = {"quality": int(rng.integers(5, 101)), "progressive": bool(rng.integers(2))}
        options |= {"restart_marker_blocks": int(rng.integers(1, 9))} if rng.random() < 0.2 else {}
        return options | ({"subsampling": int(rng.integers(3))} if mode == "RGB" else {})
    if kind == "PNG":
        return {"compress_level": int(rng.integers(10))}
    if kind == "WEBP":
        return {"lossless": bool(rng.integers(2)), "quality": int(rng.integers(1, 101)), "method": 0}
    if kind == "AVIF":
        return {"speed": 10, "quality": int(rng.integers(20, 101))}
    if kind == "TIFF":
        return {"compression": (None, "tiff_lzw", "tiff_adobe_deflate", "packbits")[rng.integers(4)]}
    return {"interlace": int(rng.integers(2))} if kind == "GIF" else {}


def saved_turned(image: Image.Image, kind: str, ways: dict[str, int], **options: Any) -> bytes:
    """An image of a kind whose file says in some of `WAYS` how it is turned."""
    for way, orientation in ways.items():
        if way in ("exif", "two segments"):
            options["exif"] = exif_block(orientation)
        elif way == "xmp" and kind != "PNG":
            options["xmp"] = xmp_block(orientation)
        elif way == "tag":
            options["tiffinfo"] = options.get("tiffinfo", {}) | {0x0112: orientation}
        elif way == "tag xmp":
            options["tiffinfo"] = options.get("tiffinfo", {}) | {700: xmp_block(orientation)}
    file = io.BytesIO()
    image.save(file, kind, **options)
    content = file.getvalue()
    for way, orientation in ways.items():
        if way == "two segments":
            content = _in_two_segments(content)
        elif kind == "PNG" and way != "exif":
            content = with_chunk(content, *png_chunk(way.removeprefix("late "), orientation), late="late" in way)
    return content


def _image(rng: np.random.Generator, mode: str, width: int, height: int) -> Image.Image:
    if mode == "I;16":
        levels = random_pixels(rng, width, height, 1)[..., 0].astype(np.uint16) * 257
        return Image.fromarray(levels)
    rgba = Image.fromarray(random_pixels(rng, width, height, 4))
    return rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode) if mode != "LA" else rgba.convert("LA")


def _deep_png(rng: np.random.Generator, width: int, height: int, ways: dict[str, int]) -> bytes:
    """A PNG of 16 bits a channel, which Pillow reads and does not write."""
    levels = random_pixels(rng, width, height).astype(">u2") * 256 + rng.integers(0, 256, (height, width, 3))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    content = b"\x89PNG\r\n\x1a\n"
    size = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    for name, body in ((b"IHDR", size), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b"")):
        content += _chunk(name, body)
    for way, orientation in ways.items():
        content = with_chunk(content, *png_chunk(way.removeprefix("late "), orientation), late="late" in way)
    return content


def exif_block(orientation: int) -> bytes:
    """An EXIF block with an orientation, behind another tag."""
    exif = Image.Exif()
    exif[0x010F] = "a maker of cameras"
    exif[0x0112] = orientation
    return exif.tobytes()


def xmp_block(orientation: int) -> bytes:
    """An XMP block with an orientation, as an attribute or as an element."""
    said = (
        f' tiff:Orientation="{orientation}"/>'
        if orientation % 2
        else f"><tiff:Orientation>{orientation}</tiff:Orientation></rdf:Description>"
    )
    return f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description{said}</rdf:RDF></x:xmpmeta>'.encode()


def png_chunk(way: str, orientation: int) -> tuple[bytes, bytes]:
    """Name and content of a chunk that says in one of the ways of a PNG how it is turned."""
    block = exif_block(orientation)
    raw = f"\nexif\n{len(block):8}\n{block.hex()[:72]}\n{block.hex()[72:]}\n".encode()
    return {
        "exif": (b"eXIf", block.removeprefix(b"Exif\0\0")),
        "raw": (b"tEXt", b"Raw profile type exif\0" + raw),
        "compressed raw": (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw)),
        "xmp": (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp_block(orientation)),
        "compressed xmp": (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp_block(orientation))),
    }[way]


def with_chunk(png: bytes, name: bytes, content: bytes, *, late: bool) -> bytes:
    """A PNG with one more chunk, before or behind its data."""
    chunk = _chunk(name, content)
    end = png.rindex(b"IEND") - 4 if late else 33
    return png[:end] + chunk + png[end:]


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _in_two_segments(jpeg: bytes) -> bytes:
    """A JPEG whose EXIF block is cut into two segments."""
    start = jpeg.index(b"\xff\xe1")
    stop = start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big")
    block = jpeg[start + 4 : stop].removeprefix(b"Exif\0\0")
    parts = [b"Exif\0\0" + part for part in (block[:20], block[20:])]
    cut = b"".join(b"\xff\xe1" + struct.pack(">H", 2 + len(part)) + part for part in parts)
    return jpeg[:start] + cut + jpeg[stop:]
