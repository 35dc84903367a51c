"""What kinds that show pictures share: the size to which one is resized, and the patches that it is cut into."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array

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


# --- A picture -> its patches.


def patches_in_rows(pixels: NDArray[np.uint8], patch: int, merge: int = 1) -> NDArray[np.uint8]:
    """Cut a picture into patches.

    Args:
        pixels: [height, width, 3]; both are multiples of `patch * merge`.
        patch: Pixels of a patch's side.
        merge: Patches of the side of a block. Blocks come by row, and so do the patches inside each, as Qwen2-VL's
            processor orders them.

    Returns:
        uint8 [patches, 3 * patch * patch].
    """
    rows, columns = pixels.shape[0] // (patch * merge), pixels.shape[1] // (patch * merge)
    cut = pixels.reshape(rows, merge, patch, columns, merge, patch, 3)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3 * patch * patch)
