"""Size rules: how large an image is resized, and what the models see of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import RecipeError
from torchmix.lazy_names import imported
from torchmix.modalities.pictures import fault_of_ratio, patches_in_rows, resized_to_blocks
from torchmix.recipe.images import canvases_of, pixel_bounds, size_rule_of
from torchmix.recipe.structs import Images

# --- What a size rule gives: how large an image is resized, and what the models see of it.
#
# A pure function of the two numbers, so that a step is planned before an image is decoded; what alters a result alters
# `rule_id`. Cost: numpy operations on all sizes at once.
#
# An image becomes `segments` pictures of `grid_height x grid_width` patches each. Attention of the encoder stays
# inside a segment. A rule that resizes gives one segment; a rule that cuts tiles gives one a tile.


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


# --- Any resolution: an image as a small picture of the whole, and as tiles of the canvas that suits it best.
#
# Equal to `select_best_resolution` and `_get_unpadded_features` of transformers (`models/llava_next`) for every size.
# The canvas on which most pixels of the image are left wins, then the one with the least waste, then the one that is
# listed first. The image keeps its ratio on the canvas; black borders fill the rest, and the language model does not
# see them. A row of its tokens ends with a newline. The paper is arXiv:2310.03744.

_NEAR = 5e-8
"""transformers rounds to 7 decimals before it cuts to an integer."""


class AnyresRule(msgspec.Struct, frozen=True, kw_only=True):
    """LLaVA-NeXT's pictures and tiles; implements `SizeRule`."""

    patch: int
    """Pixels of a patch's side; divides `size`."""
    size: int
    """Pixels of a tile's side, and of the small picture's."""
    canvases: tuple[tuple[int, int], ...]
    """(height, width) in pixels of the canvases to choose from; multiples of `size`."""

    @property
    def rule_id(self) -> str:
        """See `SizeRule`."""
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
        """See `SizeRule`; the first segment is the small picture, the others are tiles by row."""
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
        """See `SizeRule`; patches of a segment come by row."""
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
        """See `SizeRule`; nothing is refused."""
        return ""


def _cut(values: NDArray[np.float64]) -> Int64Array:
    """Whole parts; a value just below an integer counts as that integer."""
    whole = np.floor(values)
    whole += whole + 1 - values <= _NEAR
    return whole.astype(np.int64)


# --- Dynamic resolution: an image keeps its ratio, and its sides become multiples of a block of patches.
#
# The arithmetic is in `modalities/pictures.py`.


class DynamicRule(msgspec.Struct, frozen=True, kw_only=True):
    """Qwen2-VL's resizing; implements `SizeRule`."""

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
        """See `SizeRule`."""
        return f"dynamic-1:{self.patch}:{self.merge}:{self.min_pixels}:{self.max_pixels}"

    def resized(self, width: Int64Array, height: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Pixels of n images after resizing, (width, height); 0 where an image is refused."""
        return resized_to_blocks(
            width, height, block=self.patch * self.merge, least=self.min_pixels, most=self.max_pixels
        )

    def sizes(self, width: Int64Array, height: Int64Array) -> ImageSizes:
        """See `SizeRule`."""
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
        """See `SizeRule`; patches come by blocks."""
        width, height = self.resized(np.array([image.width]), np.array([image.height]))
        resized = image.resize((int(width[0]), int(height[0])), resample=3)
        return patches_in_rows(np.asarray(resized), self.patch, self.merge)

    def fault(self, width: int, height: int) -> str:
        """See `SizeRule`."""
        return fault_of_ratio(width, height)


# --- Tiles: an image is resized to a grid of square tiles near its ratio, and a thumbnail of the whole is added.
#
# Equal to `get_optimal_tiled_canvas` of transformers (`models/got_ocr2/image_processing_got_ocr2.py`) with
# `crop_to_patches` and the thumbnail on, for every size. The grid with the nearest ratio wins; where two are equally
# near, the later one in order of tiles wins if the image has more than half its pixels. The paper is arXiv:2404.16821.


class TilesRule(msgspec.Struct, frozen=True, kw_only=True):
    """InternVL's tiles; implements `SizeRule`."""

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
        """See `SizeRule`."""
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
        """See `SizeRule`; a segment is a tile, and the last one the thumbnail where there are several."""
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
        """See `SizeRule`; tiles come by row, and the patches of a tile come by blocks."""
        columns, rows = (int(sides[0]) for sides in self.grids(np.array([image.width]), np.array([image.height])))
        size = self.size
        canvas = np.asarray(image.resize((columns * size, rows * size), resample=3))
        cut = canvas.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4).reshape(-1, size, size, 3)
        tiles = list(cut)
        if len(tiles) > 1:
            tiles.append(np.asarray(image.resize((size, size), resample=3)))
        return np.concatenate([patches_in_rows(tile, self.patch, self.merge) for tile in tiles])

    def fault(self, width: int, height: int) -> str:
        """See `SizeRule`; nothing is refused."""
        return ""


# --- A size rule of the user's: `module:function` of the recipe.
#
# The function is pure; its name and its attribute `version`, if it has one, are part of the rule's id. Cost: a call
# for each distinct size.

SizeFunction = Callable[[int, int], tuple[tuple[int, int], int]]


class OwnRule(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the user's; implements `SizeRule`."""

    name: str
    """As the recipe writes it."""
    function: SizeFunction
    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of the side of a block; the order of patches follows from it."""

    @property
    def rule_id(self) -> str:
        """See `SizeRule`."""
        return f"own-1:{self.patch}:{self.merge}:{self.name}:{getattr(self.function, 'version', '')}"

    def sizes(self, width: Int64Array, height: Int64Array) -> ImageSizes:
        """See `SizeRule`.

        Raises:
            RecipeError: The function fails, or gives something else than a grid and tokens.
        """
        known: dict[tuple[int, int], tuple[int, int, int]] = {}
        rows = np.zeros((len(width), 3), np.int64)
        for i, size in enumerate(zip(width.tolist(), height.tolist(), strict=True)):
            if size not in known:
                known[size] = self._ask(*size)
            rows[i] = known[size]
        return ImageSizes(
            segments=np.ones(len(width), np.int64), grid_height=rows[:, 0], grid_width=rows[:, 1], tokens=rows[:, 2]
        )

    def _ask(self, width: int, height: int) -> tuple[int, int, int]:
        try:
            (rows, columns), tokens = self.function(width, height)
            found = int(rows), int(columns), int(tokens)
        except Exception as error:
            raise RecipeError(
                f"{self.name}({width}, {height}) failed: {type(error).__name__}: {error}; it must return "
                "((rows, columns) of patches, tokens)"
            ) from error
        if min(found) < 1 or found[0] % self.merge or found[1] % self.merge:
            raise RecipeError(
                f"{self.name}({width}, {height}) gives the grid {found[:2]} and {found[2]} tokens; all must be at "
                f"least 1, and the grid a multiple of merge {self.merge}"
            )
        return found

    def segments(self, image: Any) -> NDArray[np.uint8]:
        """See `SizeRule`."""
        rows, columns, _ = self._ask(image.width, image.height)
        resized = image.resize((columns * self.patch, rows * self.patch), resample=3)
        return patches_in_rows(np.asarray(resized), self.patch, self.merge)

    def fault(self, width: int, height: int) -> str:
        """See `SizeRule`; nothing is refused."""
        return ""


# --- The recipe's words for images -> a size rule. A new rule is a row here, and its key with its check in `SIZE_RULES`
# of `recipe/images.py`.
#
# What the words leave open is in the recipe's defaults. Cost: importing the user's function.


def _tiles_of(images: Images, where: str) -> SizeRule:
    assert images.tiles is not None, "of a source with tiles"
    tiles = images.tiles
    return TilesRule(patch=images.patch, merge=images.merge, size=tiles.size, min=tiles.min, max=tiles.max)


def _anyres_of(images: Images, where: str) -> SizeRule:
    assert images.anyres is not None, "of a source with anyres"
    return AnyresRule(patch=images.patch, size=images.anyres.size, canvases=canvases_of(images, where))


def _own_of(images: Images, where: str) -> SizeRule:
    assert images.size is not None, "of a source with a function"
    function = imported(images.size, f"{where}.size")
    return OwnRule(name=images.size, function=function, patch=images.patch, merge=images.merge)


def _dynamic_of(images: Images, where: str) -> SizeRule:
    least, most = pixel_bounds(images)
    return DynamicRule(patch=images.patch, merge=images.merge, min_pixels=least, max_pixels=most)


RULES: dict[str | None, Callable[[Images, str], SizeRule]] = {
    None: _dynamic_of,
    "tiles": _tiles_of,
    "anyres": _anyres_of,
    "size": _own_of,
}
"""By the keys of the recipe's `SIZE_RULES`; None: the rule without a key."""


def rule_of(images: Images, where: str) -> SizeRule:
    """The size rule of a source; `where` is the path of keys of its `images`."""
    return RULES[size_rule_of(images)](images, where)
