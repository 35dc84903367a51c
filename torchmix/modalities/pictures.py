"""What kinds that show pictures share: the size to which one is resized, how, and the patches that it is cut into."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import OptionError

# --- Sides that are multiples of a block of patches, near the ratio of a picture and within bounds of its pixels.
#
# Equal to the `smart_resize` of transformers for every size. All operations are correctly rounded, so float64 arrays
# agree with Python's floats as long as the order of divisions is kept; sides are rounded half to even. Source:
# transformers, `models/qwen2_vl/image_processing_qwen2_vl.py`; the paper is arXiv:2409.12191. qwen-vl-utils clamps
# before it looks at the bounds, so it differs for thin images.
#
# `most` is no hard bound: a side is never below one block.

MOST_RATIO = 200
"""A longer side is refused if it is more than this many times the shorter one."""


def resized_to_blocks(
    width: Int64Array,
    height: Int64Array,
    *,
    block: int,
    least: int,
    most: int,
    frames: Int64Array | int = 1,
    kept_frames: Int64Array | int = 1,
) -> tuple[Int64Array, Int64Array]:
    """Sides of n pictures after resizing, (width, height); 0 where the ratio is above MOST_RATIO.

    Args:
        width: [n] 1 or more.
        height: [n] 1 or more.
        block: Pixels of the side of a block.
        least: Fewer pixels, of all frames together, are enlarged.
        most: More are shrunk.
        frames: [n] frames of each as it is, as `smart_resize` of Qwen's videos counts them.
        kept_frames: [n] frames that it is rounded to.
    """
    w, h = width.astype(np.float64), height.astype(np.float64)
    to_w, to_h = np.rint(w / block) * block, np.rint(h / block) * block
    volume, kept = frames * h * w, kept_frames * to_h * to_w
    is_large, is_small = kept > most, kept < least
    shrink, enlarge = np.sqrt(volume / most), np.sqrt(least / volume)
    found = []
    for side, rounded in ((w, to_w), (h, to_h)):
        small = np.maximum(block, np.floor(side / shrink / block) * block)
        large = np.ceil(side * enlarge / block) * block
        found.append(np.where(is_large, small, np.where(is_small, large, rounded)))
    is_refused = np.maximum(w, h) / np.minimum(w, h) > MOST_RATIO
    to_width, to_height = (np.where(is_refused, 0, side).astype(np.int64) for side in found)
    return to_width, to_height


def fault_of_ratio(width: int, height: int) -> str:
    """Why a picture of this size is refused; empty where it is not."""
    if max(width, height) / min(width, height) > MOST_RATIO:
        return f"one side of {width} x {height} is over {MOST_RATIO} times the other"
    return ""


# --- A picture -> another size, and its bytes -> the numbers that an encoder takes.
#
# Two families of processors exist. Those of Pillow resize with 22 bits of precision, and normalise in two divisions.
# Those of torchvision hand bytes to torch, which rounds the weights to 16 bits, and normalise in one. Both resize rows
# first and round to bytes in between; about 3 % of the bytes differ by one level. The latter is written here after
# `aten/src/ATen/native/cpu/UpSampleKernel.cpp`, where torch runs it on a processor with AVX2. Cost: Pillow's, or an
# operation of numpy for each weight under the filter.

Arithmetic = Literal["pillow", "tensor"]
Filter = Literal["bicubic", "bilinear"]
_PILLOW = {"bilinear": 2, "bicubic": 3}
_REACH = {"bilinear": 1, "bicubic": 2}


class Resizer(msgspec.Struct, frozen=True, kw_only=True):
    """How pictures are resized."""

    arithmetic: Arithmetic = "pillow"
    filter: Filter = "bicubic"

    def resized(self, image: Any, width: int, height: int) -> NDArray[np.uint8]:
        """The pixels of a Pillow image of mode RGB in another size, [height, width, 3]."""
        if self.arithmetic == "pillow":
            return np.asarray(image.resize((width, height), resample=_PILLOW[self.filter]))
        pixels = np.asarray(image)
        for axis, size in ((1, width), (0, height)):
            if pixels.shape[axis] != size:
                pixels = _resized_axis(pixels, axis, size, self.filter)
        return pixels


def _resized_axis(pixels: NDArray[np.uint8], axis: int, size: int, kind: Filter) -> NDArray[np.uint8]:
    first, weights, precision = _weights(pixels.shape[axis], size, kind)
    lines = np.moveaxis(pixels, axis, 0)
    total = np.full((size, *lines.shape[1:]), 1 << (precision - 1), np.int32)
    last = len(lines) - 1
    for k in range(weights.shape[1]):
        of_line = weights[:, k].reshape(-1, *(1,) * (lines.ndim - 1))
        total += of_line * lines[np.minimum(first + k, last)]
    return np.moveaxis(np.clip(total >> precision, 0, 255).astype(np.uint8), 0, axis)


@lru_cache(maxsize=64)
def _weights(before: int, after: int, kind: Filter) -> tuple[Int64Array, NDArray[np.int32], int]:
    """The first pixel under the filter at each place, [after]; weights in fixed point [after, most]; their bits."""
    scale = before / after
    reach = _REACH[kind] * max(scale, 1.0)
    center = scale * (np.arange(after) + 0.5)
    first = np.maximum((center - reach + 0.5).astype(np.int64), 0)
    count = np.minimum((center + reach + 0.5).astype(np.int64), before) - first
    most = int(np.ceil(reach)) * 2 + 1
    count = np.clip(count, 0, most)
    k = np.arange(most)
    x = np.abs((k + first[:, None] - center[:, None] + 0.5) * (1.0 / scale if scale >= 1.0 else 1.0))
    if kind == "bilinear":
        weights = np.where(x < 1.0, 1.0 - x, 0.0)
    else:
        a = -0.5
        near, far = ((a + 2.0) * x - (a + 3.0)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
        weights = np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
    weights = np.where(k < count[:, None], weights, 0.0)
    weights = weights / np.cumsum(weights, axis=1)[:, -1:]  # summed in the order of the loop
    largest = float(weights.max())
    precision = next((bits for bits in range(22) if int(0.5 + largest * (1 << (bits + 1))) >= 1 << 15), 22)
    fixed = np.trunc(weights * (1 << precision) + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    return first, fixed, precision


def levels(arithmetic: Arithmetic, mean: Sequence[float], deviation: Sequence[float]) -> NDArray[np.float32]:
    """What each byte of each channel becomes, [channels, 256], as processors of that family normalise.

    Args:
        arithmetic: The family.
        mean: Of each channel, whose bytes are divided by 255 first.
        deviation: Of each channel.
    """
    middle, width = np.asarray(mean, np.float32)[:, None], np.asarray(deviation, np.float32)[:, None]
    byte = np.arange(256)
    if arithmetic == "pillow":
        scaled = (byte.astype(np.float64) * (1 / 255)).astype(np.float32)
        of_pillow: NDArray[np.float32] = (scaled - middle) / width
        return of_pillow
    whole = np.float32(1 / (1 / 255))
    of_tensors: NDArray[np.float32] = (byte.astype(np.float32) - middle * whole) / (width * whole)
    return of_tensors


def levels_of_words(words: Any, arithmetic: Arithmetic) -> NDArray[np.float32]:
    """`levels` by the options of a source.

    Raises:
        OptionError: They lack `mean` and `deviation`.
    """
    if words.mean is None or words.deviation is None:
        message = f"the {words.kind}s of a source have no mean and no deviation to be normalised by; write both"
        raise OptionError(f"{message}, or `processor`")
    return levels(arithmetic, words.mean, words.deviation)


# --- A picture -> its patches.


def patches_in_rows(pixels: NDArray[np.uint8], patch: int, merge: int = 1) -> NDArray[np.uint8]:
    """Cut a picture into patches.

    Args:
        pixels: [height, width, 3]; what is behind the last whole block is left out.
        patch: Pixels of a patch's side.
        merge: Patches of the side of a block. Blocks come by row, and so do the patches inside each, as Qwen2-VL's
            processor orders them.

    Returns:
        uint8 [patches, 3 * patch * patch].
    """
    rows, columns = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
    seen = pixels[: rows * merge * patch, : columns * merge * patch]
    cut = seen.reshape(rows, merge, patch, columns, merge, patch, 3)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3 * patch * patch)


def picture_of_patches(
    patches: NDArray[np.uint8], rows: int, columns: int, patch: int, merge: int
) -> NDArray[np.uint8]:
    """The picture that `patches_in_rows` cut into patches, [rows * patch, columns * patch, 3]."""
    cut = patches.reshape(rows // merge, columns // merge, merge, merge, 3, patch, patch)
    return np.ascontiguousarray(cut.transpose(0, 2, 5, 1, 3, 6, 4)).reshape(rows * patch, columns * patch, 3)


# --- A picture as an element of a page, in a form that every browser shows.

MOST_SIDE = 240
"""Pixels of the longer side; of larger pictures pixels are left out evenly."""


def png_image(picture: NDArray[np.uint8]) -> str:
    """A picture, uint8 [height, width, 3], as an element of a page."""
    step = -(-max(picture.shape[:2]) // MOST_SIDE)
    seen = np.ascontiguousarray(picture[::step, ::step])
    height, width = seen.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), seen.reshape(height, -1)], axis=1).tobytes()
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        file += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    return f'<img src="data:image/png;base64,{base64.b64encode(file).decode("ascii")}">'
