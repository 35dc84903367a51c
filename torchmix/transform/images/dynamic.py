"""Dynamic resolution: an image keeps its ratio, and its sides become multiples of a block of patches.

In: sizes of images. Out: their sizes by Qwen2-VL's `smart_resize`. Must hold: equal to the `smart_resize` of
transformers for every size. All operations are correctly rounded, so float64 arrays agree with Python's floats as long
as the order of divisions is kept; sides are rounded half to even. Source: transformers,
`models/qwen2_vl/image_processing_qwen2_vl.py`; the paper is arXiv:2409.12191. qwen-vl-utils clamps before it looks at
the bounds, so it differs for thin images.

`max_pixels` is no hard bound: a side is never below one block.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.transform.images.rule import ImageSizes, patches_in_rows

MOST_RATIO = 200
"""A longer side is refused if it is more than this many times the shorter one."""


class DynamicRule(msgspec.Struct, frozen=True, kw_only=True):
    """Qwen2-VL's resizing; implements `rule.SizeRule`."""

    patch: int
    """Pixels of a patch's side: 14 for Qwen2-VL and 2.5-VL, 16 for Qwen3-VL."""
    merge: int
    """Patches of the side of a block that becomes one token."""
    min_pixels: int
    """Smaller images are enlarged."""
    max_pixels: int
    """Larger images are shrunk."""

    @property
    def rule_id(self) -> str:
        """See `rule.SizeRule`."""
        return f"dynamic-1:{self.patch}:{self.merge}:{self.min_pixels}:{self.max_pixels}"

    def resized(self, width: Int64Array, height: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Pixels of n images after resizing, (width, height); 0 where an image is refused."""
        factor = self.patch * self.merge
        w, h = width.astype(np.float64), height.astype(np.float64)
        to_w, to_h = np.rint(w / factor) * factor, np.rint(h / factor) * factor
        is_large, is_small = to_w * to_h > self.max_pixels, to_w * to_h < self.min_pixels
        shrink, enlarge = np.sqrt(h * w / self.max_pixels), np.sqrt(self.min_pixels / (h * w))
        found = []
        for side, rounded in ((w, to_w), (h, to_h)):
            small = np.maximum(factor, np.floor(side / shrink / factor) * factor)
            large = np.ceil(side * enlarge / factor) * factor
            found.append(np.where(is_large, small, np.where(is_small, large, rounded)))
        is_refused = np.maximum(w, h) / np.minimum(w, h) > MOST_RATIO
        to_width, to_height = (np.where(is_refused, 0, side).astype(np.int64) for side in found)
        return to_width, to_height

    def sizes(self, width: Int64Array, height: Int64Array) -> ImageSizes:
        """See `rule.SizeRule`."""
        to_width, to_height = self.resized(width, height)
        grid_width, grid_height = to_width // self.patch, to_height // self.patch
        patches = grid_width * grid_height
        return ImageSizes(
            segments=(patches > 0).astype(np.int64),
            grid_height=grid_height,
            grid_width=grid_width,
            tokens=patches // self.merge**2,
        )

    def segments(self, image: Any) -> NDArray[np.uint8]:
        """See `rule.SizeRule`; patches come by blocks."""
        width, height = self.resized(np.array([image.width]), np.array([image.height]))
        resized = image.resize((int(width[0]), int(height[0])), resample=3)
        return patches_in_rows(np.asarray(resized), self.patch, self.merge)

    def fault(self, width: int, height: int) -> str:
        """See `rule.SizeRule`."""
        if max(width, height) / min(width, height) > MOST_RATIO:
            return f"one side of {width} x {height} is over {MOST_RATIO} times the other"
        return ""
