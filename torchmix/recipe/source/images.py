"""What a recipe says of the images of a source: its checks, and what of it decides tokens.

In: `images` of a source. Out: nothing, or the first fault; the settings of the column of images. Must hold: the words
decide, before anything is opened. Cost: none.
"""

from __future__ import annotations

import re

import msgspec

from torchmix.errors import RecipeError
from torchmix.recipe.source.format import format_of
from torchmix.recipe.source.image_structs import Images
from torchmix.recipe.structs import Packing, Source

MIN_PIXELS, MAX_PIXELS = 3_136, 1_003_520
"""Defaults of Qwen2-VL's processor."""
CANVASES = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""Rows and columns of tiles of LLaVA-NeXT's canvases."""
MOST_TILES = 64
MOST_PIXELS = 89_478_485
"""Pillow warns of more."""
_CANVAS = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")


def check_images(source: Source, where: str) -> None:
    """Check `images` of a source; raises a RecipeError at the first fault."""
    images = source.images
    if images is None:
        return
    if source.text is None and source.messages is None and source.interleaved is None:
        raise RecipeError("images stand in texts; name the column by text, messages or interleaved", where)
    where = f"{where}.images"
    if source.map is not None:
        raise RecipeError("a source has images or a map, not both; remove one", where)
    if source.keep is not None:
        raise RecipeError("ids of texts with images are not kept; remove keep", where)
    if not images.column:
        raise RecipeError("is empty; name the column of the images", f"{where}.column")
    if images.place is not None:
        if source.interleaved is None:
            raise RecipeError("is of the lists of texts of interleaved; remove it", f"{where}.place")
        if format_of(source) not in ("jsonl", "webdataset"):
            raise RecipeError("is read of JSON lines and WebDataset alone; write lists with nulls", f"{where}.place")
    if not images.marker:
        raise RecipeError("is empty; write a text such as <image>", f"{where}.marker")
    for key in ("token", "before", "after"):
        token = getattr(images, key)
        if token == "":
            raise RecipeError("is empty; name a token, or give its id", f"{where}.{key}")
        if isinstance(token, int) and not 0 <= token < 2**30:
            raise RecipeError(f"{token} is out of range; it must be in [0, 2^30)", f"{where}.{key}")
    for key, most in (("patch", 1024), ("merge", 16), ("most_pixels", MOST_PIXELS)):
        if not 1 <= getattr(images, key) <= most:
            raise RecipeError(f"{getattr(images, key)} is out of range; it must be in [1, {most}]", f"{where}.{key}")
    rules = [key for key in ("tiles", "anyres", "size") if getattr(images, key) is not None]
    if len(rules) > 1:
        raise RecipeError(f"has {' and '.join(rules)}; an image has one rule of sizes", where)
    if rules and (images.min_pixels, images.max_pixels) != (None, None):
        raise RecipeError(f"min_pixels and max_pixels are of dynamic sizes, and it has {rules[0]}; remove them", where)
    least, most = pixel_bounds(images)
    if not 1 <= least <= most:
        raise RecipeError(f"min_pixels {least} and max_pixels {most} must be at least 1, in this order", where)
    _check_tiles(images, where)
    if images.anyres is not None:
        size = images.anyres.size
        if size < 1 or size % images.patch:
            raise RecipeError(f"{size} is no multiple of patch {images.patch}", f"{where}.anyres.size")
        canvases_of(images, where)


def check_packing_of_images(packing: Packing, has_images: bool) -> None:
    """Check how documents with images become samples; raises a RecipeError."""
    if has_images and packing.method == "concat":
        message = "concat cuts documents anywhere, and images must stay whole; use best_fit"
        raise RecipeError(message, "packing.method")


def _check_tiles(images: Images, where: str) -> None:
    tiles = images.tiles
    if tiles is None:
        return
    if tiles.size < 1 or tiles.size % (images.patch * images.merge):
        message = f"{tiles.size} is no multiple of patch x merge = {images.patch * images.merge}"
        raise RecipeError(message, f"{where}.tiles.size")
    if not 1 <= tiles.min <= tiles.max <= MOST_TILES:
        message = f"min {tiles.min} and max {tiles.max} must be in [1, {MOST_TILES}], in this order"
        raise RecipeError(message, f"{where}.tiles")


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


def order_of_images(images: Images | None) -> dict[str, object] | None:
    """What of it decides which tokens a document has; where the files lie, and how they are decoded, do not."""
    if images is None:
        return None
    kept: dict[str, object] = msgspec.to_builtins(images)
    if images.place is None:
        kept.pop("place")
    for key in ("folder", "alpha", "most_pixels"):
        kept.pop(key)
    return kept
