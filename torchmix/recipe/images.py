"""What a recipe says of the images of a source: its checks, and the bounds that words leave open."""

from __future__ import annotations

import re
from collections.abc import Callable

from torchmix.errors import RecipeError
from torchmix.recipe.build import check_ranges
from torchmix.recipe.structs import Images

MIN_PIXELS, MAX_PIXELS = 3_136, 1_003_520
"""Defaults of Qwen2-VL's processor."""
CANVASES = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""Rows and columns of tiles of LLaVA-NeXT's canvases."""
MOST_TILES = 64
MOST_PIXELS = 89_478_485
"""Pillow warns of more."""
_CANVAS = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")


def check_images(images: Images, where: str) -> None:
    """Check what is of images alone; raises a RecipeError at the first fault."""
    check_ranges(images, where, patch=(1, 1024), merge=(1, 16), most_pixels=(1, MOST_PIXELS))
    rules = [key for key in SIZE_RULES if getattr(images, key) is not None]
    if len(rules) > 1:
        raise RecipeError(f"has {' and '.join(rules)}; an image has one rule of sizes", where)
    if rules and (images.min_pixels, images.max_pixels) != (None, None):
        raise RecipeError(f"min_pixels and max_pixels are of dynamic sizes, and it has {rules[0]}; remove them", where)
    least, most = pixel_bounds(images)
    if not 1 <= least <= most:
        raise RecipeError(f"min_pixels {least} and max_pixels {most} must be at least 1, in this order", where)
    for key in rules:
        SIZE_RULES[key](images, where)


def _check_tiles(images: Images, where: str) -> None:
    tiles = images.tiles
    assert tiles is not None, "of a source with tiles"
    if tiles.size < 1 or tiles.size % (images.patch * images.merge):
        message = f"{tiles.size} is no multiple of patch x merge = {images.patch * images.merge}"
        raise RecipeError(message, f"{where}.tiles.size")
    if not 1 <= tiles.min <= tiles.max <= MOST_TILES:
        message = f"min {tiles.min} and max {tiles.max} must be in [1, {MOST_TILES}], in this order"
        raise RecipeError(message, f"{where}.tiles")


def _check_anyres(images: Images, where: str) -> None:
    assert images.anyres is not None, "of a source with anyres"
    size = images.anyres.size
    if size < 1 or size % images.patch:
        raise RecipeError(f"{size} is no multiple of patch {images.patch}", f"{where}.anyres.size")
    canvases_of(images, where)


SIZE_RULES: dict[str, Callable[[Images, str], None]] = {
    "tiles": _check_tiles,
    "anyres": _check_anyres,
    "size": lambda images, where: None,  # the function is imported where it is used
}
"""The keys of `images` that name a size rule, with the check of their values; without one of them sizes are dynamic.
The rules are in the other half of the table, in `modalities/images/rules.py`."""


def size_rule_of(images: Images) -> str | None:
    """The key of `SIZE_RULES` that the images have; None: their sizes are dynamic."""
    return next((key for key in SIZE_RULES if getattr(images, key) is not None), None)


def pixel_bounds(images: Images) -> tuple[int, int]:
    """`min_pixels` and `max_pixels`."""
    return (
        MIN_PIXELS if images.min_pixels is None else images.min_pixels,
        MAX_PIXELS if images.max_pixels is None else images.max_pixels,
    )


def canvases_of(images: Images, where: str = "images") -> tuple[tuple[int, int], ...]:
    """(height, width) of each canvas of `anyres`.

    Raises:
        RecipeError: A text is no size, or no multiple of a tile's.
    """
    assert images.anyres is not None, "of a source with anyres"
    if images.anyres.canvases is None:
        return tuple((rows * images.anyres.size, columns * images.anyres.size) for rows, columns in CANVASES)
    found: list[tuple[int, int]] = []
    for text in images.anyres.canvases:
        match = _CANVAS.fullmatch(text)
        if not match or any(int(side) % images.anyres.size for side in match.groups()):
            message = f"{text!r} is no canvas; write HEIGHTxWIDTH, multiples of size {images.anyres.size}"
            raise RecipeError(message, f"{where}.anyres.canvases")
        found.append((int(match[1]), int(match[2])))
    if not found:
        raise RecipeError("is empty; name at least one canvas", f"{where}.anyres.canvases")
    return tuple(found)
