"""What a recipe says of the videos of a source, and its checks."""

from __future__ import annotations

from typing import ClassVar

from torchmix.errors import RecipeError
from torchmix.recipe.build import check_ranges
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


def check_videos(videos: Videos, where: str) -> None:
    """Check what is of videos alone; raises a RecipeError at the first fault."""
    many = (1, 1 << 16)
    check_ranges(videos, where, rate=(0.001, 1000), least_frames=many, most_frames=many, temporal_patch=(1, 16))
    check_ranges(videos, where, patch=(1, 1024), merge=(1, 16), most_pixels=(1, 1 << 28), most_seconds=(1, 1 << 20))
    for low, high in (("least_frames", "most_frames"), ("temporal_patch", "most_frames"), ("min_pixels", "max_pixels")):
        least, most = getattr(videos, low), getattr(videos, high)
        if not 1 <= least <= most:
            raise RecipeError(f"{low} {least} and {high} {most} must be at least 1, in this order", where)
