"""What a recipe says of the images of a source: its checks, and the bounds that words leave open."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from torchmix.errors import RecipeError
from torchmix.recipe.build import check_ranges
from torchmix.recipe.model_folder import ModelFolder, ReadProcessor, must_be, of_settings
from torchmix.recipe.structs import Images

MIN_PIXELS, MAX_PIXELS = 3_136, 1_003_520
"""Defaults of Qwen2-VL's processor."""
CANVASES = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""Rows and columns of tiles of LLaVA-NeXT's canvases."""
MOST_TILES = 64
MOST_PIXELS = 1 << 30
"""Three GiB of bytes."""
_CANVAS = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")


def check_images(images: Images, where: str) -> None:
    """Check what is of images alone; raises a RecipeError at the first fault."""
    check_ranges(images, where, patch=(1, 1024), merge=(1, 16), most_pixels=(1, MOST_PIXELS), frames=(1, 16))
    if not all(0 <= level <= 255 for level in images.fill):
        raise RecipeError(f"{images.fill} is no color; its levels are 0 to 255", f"{where}.fill")
    check_levels(images, where)
    rules = [key for key in SIZE_RULES if getattr(images, key) is not None]
    if len(rules) > 1:
        raise RecipeError(f"has {' and '.join(rules)}; an image has one rule of sizes", where)
    if rules and (images.min_pixels, images.max_pixels) != (None, None):
        raise RecipeError(f"min_pixels and max_pixels are of dynamic sizes, and it has {rules[0]}; remove them", where)
    least, most = pixel_bounds(images)
    if not 1 <= least <= most:
        raise RecipeError(f"min_pixels {least} and max_pixels {most} must be at least 1, in this order", where)
    if images.tower == "pictures" and (not rules or rules == ["size"] or images.frames > 1):
        message = "pictures are of tiles, anyres or fixed, whose sizes are equal, and of one frame"
        raise RecipeError(message, f"{where}.tower")
    for key in rules:
        SIZE_RULES[key](images, where)


def check_levels(words: Any, where: str) -> None:
    """Check `mean` and `deviation`; raises a RecipeError at the first fault."""
    if (words.mean is None) != (words.deviation is None):
        raise RecipeError("has mean or deviation without the other; write both, or none", where)
    if words.deviation is not None and min(words.deviation) <= 0:
        raise RecipeError(f"{words.deviation} must be above 0", f"{where}.deviation")


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
    if size < images.patch:
        raise RecipeError(f"{size} is less than patch {images.patch}", f"{where}.anyres.size")
    check_ranges(images.anyres, f"{where}.anyres", most_tiles=(1, 1 << 10))
    canvases_of(images, where)


def _check_fixed(images: Images, where: str) -> None:
    fixed, block = images.fixed, images.patch * images.merge
    assert fixed is not None, "of a source with one size"
    check_ranges(fixed, f"{where}.fixed", height=(block, 1 << 14), width=(block, 1 << 14))
    if fixed.fit == "pad" and fixed.height != fixed.width:
        raise RecipeError(f"pad makes squares, and this is {fixed.height} x {fixed.width}", f"{where}.fixed.fit")
    if fixed.shortest is not None and (fixed.fit != "crop" or fixed.shortest < max(fixed.height, fixed.width)):
        message = f"{fixed.shortest} is of crop, and at least {max(fixed.height, fixed.width)}"
        raise RecipeError(message, f"{where}.fixed.shortest")


SIZE_RULES: dict[str, Callable[[Images, str], None]] = {
    "tiles": _check_tiles,
    "anyres": _check_anyres,
    "fixed": _check_fixed,
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


def canvases_of(images: Images, where: str) -> tuple[tuple[int, int], ...]:
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


# --- A model's own processor of images -> the options above.
#
# A row reads the settings of one class of transformers; defaults are those of the class. What was compared with which
# model is in docs/images.md.

CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
"""Mean and deviation of CLIP's images."""
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
FILTERS = {2: "bilinear", 3: "bicubic"}
"""By the number that Pillow and transformers give a filter."""
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def of_picture(settings: Mapping[str, Any], *, resample: int, mean: tuple[list[float], list[float]]) -> dict[str, Any]:
    """What the processors of all classes have."""
    must_be(settings, do_resize=True, do_rescale=True, do_convert_rgb=True)
    told = of_settings(settings, resample=resample, image_mean=mean[0], image_std=mean[1], do_normalize=True)
    told |= of_settings(settings, rescale_factor=1 / 255)
    if abs(told["rescale_factor"] - 1 / 255) > 1e-9:
        raise RecipeError(f"its rescale_factor is {told['rescale_factor']}, and torchmix follows 1/255 alone")
    if told["resample"] not in FILTERS:
        raise RecipeError(f"its resample is {told['resample']}, and torchmix follows 2 (bilinear) and 3 (bicubic)")
    middle, width = ([0.0] * 3, [1.0] * 3) if not told["do_normalize"] else (told["image_mean"], told["image_std"])
    return {"filter": FILTERS[told["resample"]], "mean": middle, "deviation": width}


def _side(settings: Mapping[str, Any], key: str, default: dict[str, int]) -> dict[str, int]:
    """A size of settings: a number is both sides of a square, or the shorter one where the default says so."""
    size = of_settings(settings, **{key: default})[key]
    if isinstance(size, int):
        return dict.fromkeys(default, size)
    return {name: int(value) for name, value in size.items() if value is not None}


def _square(size: Mapping[str, int]) -> int:
    found = {*size.values()}
    if len(found) != 1:
        raise RecipeError(f"its size is {dict(size)}, and torchmix follows squares here")
    return found.pop()


def _patch_of(folder: ModelFolder, default: int) -> int:
    """Pixels of a patch's side, by the vision part of the model."""
    found = folder.of_model("vision_config", "patch_size") or folder.processor.get("patch_size") or default
    found = found[0] if isinstance(found, list) and len({*found}) == 1 else found
    if not isinstance(found, int):
        raise RecipeError(f"its patch_size is {found!r}, and torchmix follows a whole number")
    return found


def qwen_tokens(folder: ModelFolder, kind: str) -> dict[str, Any]:
    """The ids that stand for a part of an item and around it, where `config.json` has Qwen's names for them."""
    names = {"token": f"{kind}_token_id", "before": "vision_start_token_id", "after": "vision_end_token_id"}
    return {key: folder.of_model(name) for key, name in names.items() if isinstance(folder.of_model(name), int)}


def qwen_pixels(settings: Mapping[str, Any], least: int, most: int) -> dict[str, int]:
    """`min_pixels` and `max_pixels` of Qwen's processors, which older files have under these names."""
    size = _side(settings, "size", {"shortest_edge": least, "longest_edge": most})
    found = of_settings(
        settings, min_pixels=size.get("shortest_edge", least), max_pixels=size.get("longest_edge", most)
    )
    return {key: int(value) for key, value in found.items()}


def _qwen2_vl(folder: ModelFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    told = of_settings(settings, patch_size=14, merge_size=2, temporal_patch_size=2)
    return {
        "patch": told["patch_size"],
        "merge": told["merge_size"],
        "frames": told["temporal_patch_size"],
        **qwen_pixels(settings, 56 * 56, 28 * 28 * 1280),
        **qwen_tokens(folder, "image"),
        **of_picture(settings, resample=3, mean=CLIP),
    }


def _internvl(folder: ModelFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    told = of_settings(settings, min_patches=1, max_patches=12)
    size, patch = _square(_side(settings, "size", {"height": 384, "width": 384})), _patch_of(folder, 14)
    ratio = folder.of_model("downsample_ratio") or 0.5
    tiles = {"size": size, "min": told["min_patches"], "max": told["max_patches"]}
    merge = round(1 / ratio)
    return {"patch": patch, "merge": merge, "tiles": tiles, "tower": "pictures"} | of_picture(
        settings, resample=3, mean=CLIP
    )


def _fixed(height: int, width: int, patch: int, merge: int = 1, **fit: Any) -> dict[str, Any]:
    return {
        "patch": patch,
        "merge": merge,
        "fixed": {"height": height, "width": width, **fit},
        "tower": "pictures",
    }


def _clip(folder: ModelFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    must_be(folder.processor, vision_feature_select_strategy="default")  # the token of the class is left out
    size, told = _side(settings, "size", {"shortest_edge": 224}), of_settings(settings, do_center_crop=True)
    shown = of_picture(settings, resample=3, mean=CLIP)
    patch = _patch_of(folder, 14)
    if settings.get("do_pad"):
        side = _square(_side(settings, "crop_size", {"height": 224, "width": 224}) if told["do_center_crop"] else size)
        fill = [int(level * 255) for level in shown["mean"]]
        return _fixed(side, side, patch, fit="pad") | shown | {"fill": fill}
    if not told["do_center_crop"]:
        if "height" not in size:
            raise RecipeError("it neither crops nor has a height; its pictures have no one size")
        return _fixed(size["height"], size["width"], patch) | shown
    crop = _side(settings, "crop_size", {"height": 224, "width": 224})
    if "shortest_edge" not in size:
        raise RecipeError(f"its size is {size} with do_center_crop, and torchmix follows shortest_edge there")
    return _fixed(crop["height"], crop["width"], patch, fit="crop", shortest=size["shortest_edge"]) | shown


def _siglip(folder: ModelFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    size = _side(settings, "size", {"height": 224, "width": 224})
    return _fixed(size["height"], size["width"], _patch_of(folder, 14)) | of_picture(settings, resample=3, mean=HALF)


def _gemma3(folder: ModelFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    must_be(settings, do_pan_and_scan=False)
    size, patch = _square(_side(settings, "size", {"height": 224, "width": 224})), _patch_of(folder, 14)
    tokens = folder.of_model("mm_tokens_per_image") or folder.processor.get("image_seq_length") or 256
    merge, rest = divmod(size // patch, max(1, math.isqrt(tokens)))
    if rest or math.isqrt(tokens) ** 2 != tokens:
        raise RecipeError(f"its {tokens} tokens are no square part of {size // patch} x {size // patch} patches")
    return _fixed(size, size, patch, merge) | of_picture(settings, resample=2, mean=HALF)


def _anyres(settings: Mapping[str, Any], folder: ModelFolder, size: int, pinpoints: Any) -> dict[str, Any]:
    told = of_settings(settings, image_grid_pinpoints=pinpoints)["image_grid_pinpoints"]
    canvases = [f"{height}x{width}" for height, width in told]
    return {
        "patch": _patch_of(folder, 14),
        "merge": 1,
        "anyres": {"size": size, "canvases": canvases},
        "tower": "pictures",
    }


def _llava_next(folder: ModelFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    size = _square(_side(settings, "size", {"shortest_edge": 224}))
    crop = _square(_side(settings, "crop_size", {"height": 224, "width": 224}))
    if size != crop:
        raise RecipeError(f"its size is {size} and its crop_size {crop}, and torchmix follows equal ones")
    must_be(folder.processor, vision_feature_select_strategy="default")  # the token of the class is left out
    return _anyres(settings, folder, size, PINPOINTS) | of_picture(settings, resample=3, mean=CLIP)


def _onevision(folder: ModelFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    must_be(settings, do_center_crop=False)
    size = _square(_side(settings, "size", {"height": 384, "width": 384}))
    ratio = folder.processor.get("vision_aspect_ratio") or folder.of_model("vision_aspect_ratio") or "anyres_max_9"
    most = ratio.removeprefix("anyres_max_")
    if not most.isdigit():
        raise RecipeError(f"its vision_aspect_ratio is {ratio!r}, and torchmix follows anyres_max_N")
    sides = [size * n for n in range(1, 7)]
    found = _anyres(settings, folder, size, [[height, width] for height in sides for width in sides])
    found["anyres"]["most_tiles"] = int(most)
    return found | of_picture(settings, resample=3, mean=CLIP)


PROCESSORS: dict[str, ReadProcessor] = {
    "Qwen2VLImageProcessor": _qwen2_vl,
    "Qwen2_5_VLImageProcessor": _qwen2_vl,
    "GotOcr2ImageProcessor": _internvl,
    "CLIPImageProcessor": _clip,
    "LlavaImageProcessor": _clip,
    "LlavaNextImageProcessor": _llava_next,
    "LlavaOnevisionImageProcessor": _onevision,
    "SiglipImageProcessor": _siglip,
    "Gemma3ImageProcessor": _gemma3,
}
"""By the class of transformers."""
