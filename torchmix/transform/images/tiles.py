"""Tiles: an image is resized to a grid of square tiles near its ratio, and a thumbnail of the whole is added.

In: sizes of images. Out: their sizes as InternVL cuts them. Must hold: equal to `get_optimal_tiled_canvas` of
transformers (`models/got_ocr2/image_processing_got_ocr2.py`) with `crop_to_patches` and the thumbnail on, for every
size. The grid with the nearest ratio wins; where two are equally near, the later one in order of tiles wins if the
image has more than half its pixels. The paper is arXiv:2404.16821.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.transform.images.rule import ImageSizes, patches_in_rows


class TilesRule(msgspec.Struct, frozen=True, kw_only=True):
    """InternVL's tiles; implements `rule.SizeRule`."""

    patch: int
    """Pixels of a patch's side; divides `size`."""
    merge: int
    """Patches of the side of a block that becomes one token."""
    size: int
    """Pixels of a tile's side."""
    min: int
    """Fewest tiles of an image, the thumbnail not counted."""
    max: int
    """Most tiles of an image, the thumbnail not counted."""

    @property
    def rule_id(self) -> str:
        """See `rule.SizeRule`."""
        return f"tiles-1:{self.patch}:{self.merge}:{self.size}:{self.min}:{self.max}"

    def grids(self, width: Int64Array, height: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Tiles of n images, (columns, rows)."""
        ratio = width.astype(np.float64) / height
        pixels = (width * height).astype(np.float64)
        best = np.full(len(width), np.inf)
        columns, rows = np.ones(len(width), np.int64), np.ones(len(width), np.int64)
        for i, j in self._choices():
            distance = np.abs(ratio - i / j)
            is_large = pixels > 0.5 * self.size * self.size * i * j
            is_better = (distance < best) | ((distance == best) & is_large)
            best = np.minimum(best, distance)
            columns, rows = np.where(is_better, i, columns), np.where(is_better, j, rows)
        return columns, rows

    def _choices(self) -> list[tuple[int, int]]:
        sides = range(1, self.max + 1)
        found = [(i, j) for i in sides for j in sides if self.min <= i * j <= self.max]
        return sorted(found, key=lambda pair: pair[0] * pair[1])

    def sizes(self, width: Int64Array, height: Int64Array) -> ImageSizes:
        """See `rule.SizeRule`; a segment is a tile, and the last one the thumbnail where there are several."""
        columns, rows = self.grids(width, height)
        segments = columns * rows
        segments += segments > 1
        side = self.size // self.patch
        return ImageSizes(
            segments=segments,
            grid_height=np.full(len(width), side),
            grid_width=np.full(len(width), side),
            tokens=segments * (side // self.merge) ** 2,
        )

    def segments(self, image: Any) -> NDArray[np.uint8]:
        """See `rule.SizeRule`; tiles come by row, and the patches of a tile come by blocks."""
        columns, rows = (int(sides[0]) for sides in self.grids(np.array([image.width]), np.array([image.height])))
        size = self.size
        canvas = np.asarray(image.resize((columns * size, rows * size), resample=3))
        cut = canvas.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4).reshape(-1, size, size, 3)
        tiles = list(cut)
        if len(tiles) > 1:
            tiles.append(np.asarray(image.resize((size, size), resample=3)))
        return np.concatenate([patches_in_rows(tile, self.patch, self.merge) for tile in tiles])

    def fault(self, width: int, height: int) -> str:
        """See `rule.SizeRule`; nothing is refused."""
        return ""
