"""What a recipe says of the videos of a source, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torchmix.errors import RecipeError
from torchmix.recipe.build import check_ranges
from torchmix.recipe.images import CLIP, check_levels, of_picture, qwen_pixels, qwen_tokens
from torchmix.recipe.model_folder import ModelFolder, ReadProcessor, must_be, of_settings
from torchmix.recipe.structs import ItemWords


class Videos(ItemWords, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The videos of a source."""

    kind: ClassVar[str] = "video"
    marker: str = "<video>"
    rate: float = 2.0
    """Frames a second that are seen."""
    least_frames: int = 4
    """A video that has so many gives at least these."""
    most_frames: int = 768
    """Frames that are seen at most."""
    temporal_patch: int = 2
    """Frames of a patch; as many frames are seen as are a multiple of it."""
    patch: int = 14
    """Pixels of a patch's side."""
    merge: int = 2
    """Patches of the side of a block that becomes one token."""
    min_pixels: int = 100_352
    """Smaller frames are enlarged."""
    max_pixels: int = 602_112
    """Larger frames are shrunk."""
    most_pixels: int = 35_389_440
    """A video whose header says larger frames is refused, before it is decoded."""
    most_seconds: int = 7_200
    """A longer video is refused."""
    mean: tuple[float, float, float] | None = None
    """Red, green and blue, from 0 to 1; subtracted by `open_tower`."""
    deviation: tuple[float, float, float] | None = None
    """What `open_tower` divides by then."""


def check_videos(videos: Videos, where: str) -> None:
    """Check what is of videos alone; raises a RecipeError at the first fault."""
    many = (1, 1 << 16)
    check_ranges(videos, where, rate=(0.001, 1000), least_frames=many, most_frames=many, temporal_patch=(1, 16))
    check_ranges(videos, where, patch=(1, 1024), merge=(1, 16), most_pixels=(1, 1 << 28), most_seconds=(1, 1 << 20))
    for low, high in (("least_frames", "most_frames"), ("temporal_patch", "most_frames"), ("min_pixels", "max_pixels")):
        least, most = getattr(videos, low), getattr(videos, high)
        if not 1 <= least <= most:
            raise RecipeError(f"{low} {least} and {high} {most} must be at least 1, in this order", where)
    check_levels(videos, where)


def _qwen2_vl(folder: ModelFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    must_be(settings, cap_pixels_per_frame=False, num_frames=None)
    sizes = of_settings(settings, patch_size=14, merge_size=2, temporal_patch_size=2, min_frames=4, max_frames=768)
    told = of_picture(settings, resample=3, mean=CLIP)
    found = {
        "rate": float(of_settings(settings, fps=2.0)["fps"]),
        "patch": sizes["patch_size"],
        "merge": sizes["merge_size"],
        "temporal_patch": sizes["temporal_patch_size"],
        "least_frames": sizes["min_frames"],
        "most_frames": sizes["max_frames"],
        "mean": told["mean"],
        "deviation": told["deviation"],
    }
    return found | qwen_pixels(settings, 128 * 28 * 28, 28 * 28 * 768) | qwen_tokens(folder, "video")


PROCESSORS: dict[str, ReadProcessor] = {"Qwen2VLVideoProcessor": _qwen2_vl}
"""By the class of transformers: the settings of a model's own processor -> the options above."""
