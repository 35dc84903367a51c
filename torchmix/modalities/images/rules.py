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
from torchmix.modalities.images.header import import_pillow
from torchmix.modalities.pictures import Resizer, fault_of_ratio, patches_in_rows, resized_to_blocks
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

    @property
    def picture(self) -> tuple[int, int] | None:
        """(height, width) in pixels of every segment, where they are equal."""

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
    """Pixels of a patch's side."""
    size: int
    """Pixels of a tile's side, and of the small picture's; what is behind whole patches is not seen."""
    canvases: tuple[tuple[int, int], ...]
    """(height, width) in pixels of the canvases to choose from; multiples of `size`."""
    most_tiles: int | None = None
    """See `Anyres`."""
    resizer: Resizer = Resizer()

    @property
    def rule_id(self) -> str:
        """See `SizeRule`."""
        listed = ",".join(f"{height}x{width}" for height, width in self.canvases)
        most = "" if self.most_tiles is None else f":{self.most_tiles}"
        return f"anyres-1:{self.patch}:{self.size}:{listed}{most}"

    @property
    def picture(self) -> tuple[int, int]:
        """See `SizeRule`."""
        return self.size, self.size

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
        columns, rows = to_width // self.size * side, to_height // self.size * side
        is_wide = width / height > columns / rows
        kept_rows = _cut(height * (columns / width))
        kept_columns = _cut(width * (rows / height))
        rows = np.where(is_wide, rows - (rows - kept_rows) // 2 * 2, rows)
        columns = np.where(is_wide, columns, columns - (columns - kept_columns) // 2 * 2)
        if self.most_tiles is not None:  # as LLaVA-OneVision's processor counts what its model shrinks the grid to
            by = np.maximum(1, np.sqrt(rows * columns / (self.most_tiles * side**2)))  # a strip has none to shrink
            is_many = by > 1.1
            rows = np.where(is_many, rows // by, rows).astype(np.int64)
            columns = np.where(is_many, columns // by, columns).astype(np.int64)
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
        canvas[top : top + inner[1], left : left + inner[0]] = self.resizer.resized(image, *inner)
        size = self.size
        cut = canvas.reshape(height // size, size, width // size, size, 3).transpose(0, 2, 1, 3, 4)
        pictures = [self.resizer.resized(image, size, size), *cut.reshape(-1, size, size, 3)]
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
    resizer: Resizer = Resizer()

    @property
    def picture(self) -> None:
        """See `SizeRule`."""
        return None

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
        resized = self.resizer.resized(image, int(width[0]), int(height[0]))
        return patches_in_rows(resized, self.patch, self.merge)

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
    resizer: Resizer = Resizer()

    @property
    def picture(self) -> tuple[int, int]:
        """See `SizeRule`."""
        return self.size, self.size

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
        canvas = self.resizer.resized(image, columns * size, rows * size)
        cut = canvas.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4).reshape(-1, size, size, 3)
        tiles = list(cut)
        if len(tiles) > 1:
            tiles.append(self.resizer.resized(image, size, size))
        return np.concatenate([patches_in_rows(tile, self.patch, self.merge) for tile in tiles])

    def fault(self, width: int, height: int) -> str:
        """See `SizeRule`; nothing is refused."""
        return ""


# --- One size: an image is stretched to it, or its middle is cut out, or it is made a square first.
#
# Equal to the processors of CLIP, of LLaVA-1.5 with its padding, of SigLIP and of Gemma 3 without its pan and scan in
# transformers.


class FixedRule(msgspec.Struct, frozen=True, kw_only=True):
    """One picture of one size; implements `SizeRule`."""

    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of the side of a block that becomes one token."""
    height: int
    """Pixels of the picture; what is behind whole blocks of patches is not seen."""
    width: int
    """Pixels likewise."""
    fit: str
    """See `Fixed`."""
    shortest: int
    """Pixels of the shorter side before the middle is cut out."""
    fill: tuple[int, int, int] = (0, 0, 0)
    """The color of borders."""
    resizer: Resizer = Resizer()

    @property
    def rule_id(self) -> str:
        """See `SizeRule`."""
        return f"fixed-1:{self.patch}:{self.merge}:{self.height}:{self.width}"

    @property
    def picture(self) -> tuple[int, int]:
        """See `SizeRule`."""
        return self.height, self.width

    def sizes(self, width: Int64Array, height: Int64Array) -> ImageSizes:
        """See `SizeRule`."""
        block = self.patch * self.merge
        rows, columns = self.height // block * self.merge, self.width // block * self.merge
        one = np.ones(len(width), np.int64)
        return ImageSizes(
            segments=one,
            grid_height=one * rows,
            grid_width=one * columns,
            tokens=one * (rows * columns // self.merge**2),
        )

    def segments(self, image: Any) -> NDArray[np.uint8]:
        """See `SizeRule`; patches come by blocks."""
        if self.fit == "pad" and image.width != image.height:
            side = max(image.size)
            square = np.full((side, side, 3), self.fill, np.uint8)
            top, left = (side - image.height) // 2, (side - image.width) // 2
            square[top : top + image.height, left : left + image.width] = np.asarray(image)
            image = import_pillow().fromarray(square)
        if self.fit != "crop":
            return patches_in_rows(self.resizer.resized(image, self.width, self.height), self.patch, self.merge)
        short, long = min(image.size), max(image.size)
        other = int(self.shortest * long / short)
        width, height = (self.shortest, other) if image.width <= image.height else (other, self.shortest)
        resized = self.resizer.resized(image, width, height)
        is_rounded = self.resizer.arithmetic == "tensor"
        top, left = (
            round(rest / 2) if is_rounded else rest // 2 for rest in (height - self.height, width - self.width)
        )
        return patches_in_rows(resized[top : top + self.height, left : left + self.width], self.patch, self.merge)

    def fault(self, width: int, height: int) -> str:
        """See `SizeRule`."""
        longest = self.shortest * max(width, height) // min(width, height)
        if self.fit == "crop" and longest > MOST_SIDE:
            return f"{width} x {height} would become {longest} pixels long before its middle is cut out"
        return ""


MOST_SIDE = 1 << 16
"""Pixels of a side to which a picture is resized."""


# --- A size rule of the user's: `module:function` of the recipe.
#
# The function is pure; its name and its attribute `version`, if it has one, are part of the rule's id. It may say where
# the image goes: the size that it is resized to, and the left upper corner on the canvas, which crops what is outside
# and leaves borders of the color `fill`. Cost: a call for each distinct size.

Placed = tuple[tuple[int, int], tuple[int, int]]
"""(width, height) that an image is resized to, and (left, top) of it on the canvas; may be below 0."""
SizeFunction = Callable[[int, int], tuple[Any, ...]]


class OwnRule(msgspec.Struct, frozen=True, kw_only=True):
    """A function of the user's; implements `SizeRule`."""

    name: str
    """As the recipe writes it."""
    function: SizeFunction
    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of the side of a block; the order of patches follows from it."""
    fill: tuple[int, int, int] = (0, 0, 0)
    """The color of borders."""
    resizer: Resizer = Resizer()

    @property
    def rule_id(self) -> str:
        """See `SizeRule`."""
        return f"own-1:{self.patch}:{self.merge}:{self.name}:{getattr(self.function, 'version', '')}"

    @property
    def picture(self) -> None:
        """See `SizeRule`."""
        return None

    def sizes(self, width: Int64Array, height: Int64Array) -> ImageSizes:
        """See `SizeRule`.

        Raises:
            RecipeError: The function fails, or gives something else than a grid, tokens and a place.
        """
        known: dict[tuple[int, int], tuple[int, int, int]] = {}
        rows = np.zeros((len(width), 3), np.int64)
        for i, size in enumerate(zip(width.tolist(), height.tolist(), strict=True)):
            if size not in known:
                known[size] = self._ask(*size)[:3]
            rows[i] = known[size]
        return ImageSizes(
            segments=np.ones(len(width), np.int64), grid_height=rows[:, 0], grid_width=rows[:, 1], tokens=rows[:, 2]
        )

    def _ask(self, width: int, height: int) -> tuple[int, int, int, Placed]:
        try:
            (rows, columns), tokens, *placed = self.function(width, height)
            found = int(rows), int(columns), int(tokens)
            canvas = (found[1] * self.patch, found[0] * self.patch)
            (to_width, to_height), (left, top) = placed[0] if placed else (canvas, (0, 0))
            where: Placed = (int(to_width), int(to_height)), (int(left), int(top))
            if len(placed) > 1:
                raise ValueError(f"{2 + len(placed)} values")
        except Exception as error:
            raise RecipeError(
                f"{self.name}({width}, {height}) failed: {type(error).__name__}: {error}; it must return "
                "((rows, columns) of patches, tokens), or also ((width, height), (left, top))"
            ) from error
        if min(found) < 1 or found[0] % self.merge or found[1] % self.merge:
            raise RecipeError(
                f"{self.name}({width}, {height}) gives the grid {found[:2]} and {found[2]} tokens; all must be at "
                f"least 1, and the grid a multiple of merge {self.merge}"
            )
        if not all(1 <= side <= MOST_SIDE for side in where[0]):
            raise RecipeError(f"{self.name}({width}, {height}) resizes to {where[0]}; sides are 1 to {MOST_SIDE}")
        return *found, where

    def segments(self, image: Any) -> NDArray[np.uint8]:
        """See `SizeRule`."""
        rows, columns, _, ((width, height), (left, top)) = self._ask(image.width, image.height)
        resized = self.resizer.resized(image, width, height)
        whole_height, whole_width = rows * self.patch, columns * self.patch
        if (left, top) != (0, 0) or (height, width) != (whole_height, whole_width):
            canvas = np.full((whole_height, whole_width, 3), self.fill, np.uint8)
            y, x = max(0, top), max(0, left)
            seen = resized[max(0, -top) : max(0, whole_height - top), max(0, -left) : max(0, whole_width - left)]
            canvas[y : y + seen.shape[0], x : x + seen.shape[1]] = seen
            resized = canvas
        return patches_in_rows(resized, self.patch, self.merge)

    def fault(self, width: int, height: int) -> str:
        """See `SizeRule`; nothing is refused."""
        return ""


# --- The recipe's words for images -> a size rule. A new rule is a row here, and its key with its check in `SIZE_RULES`
# of `recipe/images.py`.
#
# What the words leave open is in the recipe's defaults. Cost: importing the user's function.


def resizer_of(images: Images) -> Resizer:
    """How the images of a source are resized."""
    return Resizer(arithmetic=images.resize, filter=images.filter)


def _tiles_of(images: Images, where: str) -> SizeRule:
    assert images.tiles is not None, "of a source with tiles"
    tiles = images.tiles
    return TilesRule(
        patch=images.patch,
        merge=images.merge,
        size=tiles.size,
        min=tiles.min,
        max=tiles.max,
        resizer=resizer_of(images),
    )


def _anyres_of(images: Images, where: str) -> SizeRule:
    assert images.anyres is not None, "of a source with anyres"
    return AnyresRule(
        patch=images.patch,
        size=images.anyres.size,
        canvases=canvases_of(images, where),
        most_tiles=images.anyres.most_tiles,
        resizer=resizer_of(images),
    )


def _fixed_of(images: Images, where: str) -> SizeRule:
    assert images.fixed is not None, "of a source with one size"
    fixed = images.fixed
    return FixedRule(
        patch=images.patch,
        merge=images.merge,
        height=fixed.height,
        width=fixed.width,
        fit=fixed.fit,
        shortest=fixed.shortest or max(fixed.height, fixed.width),
        fill=images.fill,
        resizer=resizer_of(images),
    )


def _own_of(images: Images, where: str) -> SizeRule:
    assert images.size is not None, "of a source with a function"
    return OwnRule(
        name=images.size,
        function=imported(images.size, f"{where}.size"),
        patch=images.patch,
        merge=images.merge,
        fill=images.fill,
        resizer=resizer_of(images),
    )


def _dynamic_of(images: Images, where: str) -> SizeRule:
    least, most = pixel_bounds(images)
    return DynamicRule(
        patch=images.patch, merge=images.merge, min_pixels=least, max_pixels=most, resizer=resizer_of(images)
    )


RULES: dict[str | None, Callable[[Images, str], SizeRule]] = {
    None: _dynamic_of,
    "tiles": _tiles_of,
    "anyres": _anyres_of,
    "fixed": _fixed_of,
    "size": _own_of,
}
"""By the keys of the recipe's `SIZE_RULES`; None: the rule without a key."""


def rule_of(images: Images, where: str) -> SizeRule:
    """The size rule of a source; `where` is the path of keys of its `images`."""
    return RULES[size_rule_of(images)](images, where)
