"""Any resolution: an image as a small picture of the whole, and as tiles of the canvas that suits it best.

In: sizes of images. Out: their sizes as LLaVA-NeXT makes them. Must hold: equal to `select_best_resolution` and
`_get_unpadded_features` of transformers (`models/llava_next`) for every size. The canvas on which most pixels of the
image are left wins, then the one with the least waste, then the one that is listed first. The image keeps its ratio on
the canvas; black borders fill the rest, and the language model does not see them. A row of its tokens ends with a
newline. The paper is arXiv:2310.03744.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.transform.images.rule import ImageSizes, patches_in_rows

_NEAR = 5e-8
"""transformers rounds to 7 decimals before it cuts to an integer."""


class AnyresRule(msgspec.Struct, frozen=True, kw_only=True):
    """LLaVA-NeXT's pictures and tiles; implements `rule.SizeRule`."""

    patch: int
    """Pixels of a patch's side; divides `size`."""
    size: int
    """Pixels of a tile's side, and of the small picture's."""
    canvases: tuple[tuple[int, int], ...]
    """(height, width) in pixels of the canvases to choose from; multiples of `size`."""

    @property
    def rule_id(self) -> str:
        """See `rule.SizeRule`."""
        listed = ",".join(f"{height}x{width}" for height, width in self.canvases)
        return f"anyres-1:{self.patch}:{self.size}:{listed}"

    def canvas_of(self, width: Int64Array, height: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Pixels of the canvas of n images, (width, height)."""
        best = np.full(len(width), -1, np.int64)
        least_waste = np.zeros(len(width), np.int64)
        to_width, to_height = np.zeros(len(width), np.int64), np.zeros(len(width), np.int64)
        for canvas_height, canvas_width in self.canvases:
            scale = np.minimum(canvas_width / width, canvas_height / height)
            kept = np.floor(width * scale).astype(np.int64) * np.floor(height * scale).astype(np.int64)
            kept = np.minimum(kept, width * height)
            waste = canvas_width * canvas_height - kept
            is_better = (kept > best) | ((kept == best) & (waste < least_waste))
            best, least_waste = np.where(is_better, kept, best), np.where(is_better, waste, least_waste)
            to_width = np.where(is_better, canvas_width, to_width)
            to_height = np.where(is_better, canvas_height, to_height)
        return to_width, to_height

    def sizes(self, width: Int64Array, height: Int64Array) -> ImageSizes:
        """See `rule.SizeRule`; the first segment is the small picture, the others are tiles by row."""
        to_width, to_height = self.canvas_of(width, height)
        side = self.size // self.patch
        columns, rows = to_width // self.patch, to_height // self.patch
        is_wide = width / height > columns / rows
        kept_rows = _cut(height * (columns / width))
        kept_columns = _cut(width * (rows / height))
        rows = np.where(is_wide, rows - (rows - kept_rows) // 2 * 2, rows)
        columns = np.where(is_wide, columns, columns - (columns - kept_columns) // 2 * 2)
        return ImageSizes(
            segments=1 + (to_width // self.size) * (to_height // self.size),
            grid_height=np.full(len(width), side),
            grid_width=np.full(len(width), side),
            tokens=side * side + rows * columns + rows,
        )

    def segments(self, image: Any) -> NDArray[np.uint8]:
        """See `rule.SizeRule`; patches of a segment come by row."""
        width, height = (int(side[0]) for side in self.canvas_of(np.array([image.width]), np.array([image.height])))
        to_width, to_height = width / image.width, height / image.height
        if to_width < to_height:
            inner = width, min(math.ceil(image.height * to_width), height)
        else:
            inner = min(math.ceil(image.width * to_height), width), height
        canvas = np.zeros((height, width, 3), np.uint8)
        top, left = (height - inner[1]) // 2, (width - inner[0]) // 2
        canvas[top : top + inner[1], left : left + inner[0]] = np.asarray(image.resize(inner, resample=3))
        size = self.size
        cut = canvas.reshape(height // size, size, width // size, size, 3).transpose(0, 2, 1, 3, 4)
        pictures = [np.asarray(image.resize((size, size), resample=3)), *cut.reshape(-1, size, size, 3)]
        return np.concatenate([patches_in_rows(picture, self.patch) for picture in pictures])

    def fault(self, width: int, height: int) -> str:
        """See `rule.SizeRule`; nothing is refused."""
        return ""


def _cut(values: NDArray[np.float64]) -> Int64Array:
    """Whole parts; a value just below an integer counts as that integer."""
    whole = np.floor(values)
    whole += whole + 1 - values <= _NEAR
    return whole.astype(np.int64)
