"""What a size rule gives: how large an image is resized, and what the models see of it.

In: widths and heights of images, after they are turned. Out: their grid of patches, and their tokens
in the text. Must hold: a pure function of the two numbers, so that a step is planned before an image is decoded; what
alters a result alters `rule_id`. Cost: numpy operations on all sizes at once.

An image becomes `segments` pictures of `grid_height x grid_width` patches each. Attention of the encoder stays inside a
segment. A rule that resizes gives one segment; a rule that cuts tiles gives one a tile.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array


class ImageSizes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Sizes of n images; all 0 where an image is refused."""

    segments: Int64Array
    """[n] pictures that the image becomes."""
    grid_height: Int64Array
    """[n] rows of patches in each of them."""
    grid_width: Int64Array
    """[n] patches of a row."""
    tokens: Int64Array
    """[n] places in the text, without the ids around them."""

    @property
    def patches(self) -> Int64Array:
        """[n] patches of all segments."""
        return self.segments * self.grid_height * self.grid_width


class SizeRule(Protocol):
    """From the size of an image to its patches. Safe to share between threads."""

    @property
    def rule_id(self) -> str:
        """The rule with its version and settings; a part of the source's `transform_id`."""

    @property
    def patch(self) -> int:
        """Pixels of a patch's side."""

    def sizes(self, width: Int64Array, height: Int64Array) -> ImageSizes:
        """Sizes of n images of at least one pixel, [n] each."""

    def segments(self, image: Any) -> NDArray[np.uint8]:
        """The patches of an image, [patches, 3 * patch * patch].

        A patch lists its channels, then rows, then columns.

        Args:
            image: A Pillow image of mode RGB, with its orientation applied.
        """

    def fault(self, width: int, height: int) -> str:
        """Why an image of this size is refused; empty where it is not."""


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
