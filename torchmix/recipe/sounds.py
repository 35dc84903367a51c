"""What a recipe says of the sounds of a source, and its checks."""

from __future__ import annotations

from typing import ClassVar, Literal

from torchmix.errors import RecipeError
from torchmix.recipe.build import check_ranges
from torchmix.recipe.structs import ItemWords


class Sounds(ItemWords, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sounds of a source."""

    kind: ClassVar[str] = "sound"
    marker: str = "<audio>"
    rule: Literal["whisper", "qwen2_audio"] = "whisper"
    """How many tokens a chunk becomes: as many as Whisper's encoder gives, the silence that fills the chunk included;
    or half of those that hear something, as Qwen2-Audio takes them."""
    mels: int = 80
    """Features of a column: 80, or 128 with Whisper large-v3 and Qwen2-Audio."""
    chunk_seconds: int = 30
    """Seconds that the encoder takes at a time; a sound's last chunk is filled with silence."""
    longer: Literal["chunks", "cut"] = "chunks"
    """A sound that is longer than a chunk becomes several of them, or is cut behind the first."""
    channel: int | None = None
    """The channel that is heard, from 0; None: the mean of all."""
    most_seconds: int = 1_800
    """A sound whose header says more is refused, before it is decoded."""


def check_sounds(sounds: Sounds, where: str) -> None:
    """Check what is of sounds alone; raises a RecipeError at the first fault."""
    check_ranges(sounds, where, mels=(1, 256), chunk_seconds=(1, 600), channel=(0, 63), most_seconds=(1, 86_400))
    if sounds.chunk_seconds > sounds.most_seconds:
        raise RecipeError(
            f"{sounds.chunk_seconds} is more than most_seconds {sounds.most_seconds}", f"{where}.chunk_seconds"
        )
