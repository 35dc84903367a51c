"""What a recipe says of the sounds of a source, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torchmix.errors import RecipeError
from torchmix.recipe.build import check_ranges
from torchmix.recipe.model_folder import ModelFolder, ReadProcessor, must_be, of_settings
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


def _whisper(folder: ModelFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Whisper's features, which Qwen2-Audio takes, too; its processor cuts a sound behind the first chunk."""
    must_be(settings, sampling_rate=16_000, hop_length=160, n_fft=400, dither=0.0, padding_value=0.0)
    told = of_settings(settings, feature_size=80, chunk_length=30)
    named = (settings.get("processor_class"), folder.processor.get("processor_class"))
    is_qwen = "Qwen2AudioProcessor" in named or folder.of_model("model_type") == "qwen2_audio"
    rule = "qwen2_audio" if is_qwen else "whisper"
    token = folder.of_model("audio_token_index")
    token = folder.of_model("audio_token_id") if token is None else token
    found = {"mels": told["feature_size"], "chunk_seconds": told["chunk_length"], "longer": "cut", "rule": rule}
    return found | ({"token": token} if isinstance(token, int) else {})


PROCESSORS: dict[str, ReadProcessor] = {"WhisperFeatureExtractor": _whisper}
"""By the class of transformers: the settings of a model's own processor -> the options above."""
