"""What the folder of a model says of its processor, as options of a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchmix.errors import RecipeError
from torchmix.recipe.build import nearest

# --- The files of a model, as transformers writes and reads them.
#
# A processor lies in `preprocessor_config.json`, one of videos in `video_preprocessor_config.json`; newer releases put
# both into `processor_config.json`, below `image_processor`, `video_processor` and `feature_extractor`. `config.json`
# has the dimensions of the model. What a file leaves out are the defaults of its class, which each table row has.

MOST_BYTES = 16 << 20
"""A longer file is no description of a processor."""
_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "config.json")
_PARTS = ("image_processor", "video_processor", "feature_extractor")


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """What the files of a model's folder say."""

    path: str
    processors: Mapping[str, Mapping[str, Any]]
    """The settings of each processor, by the name of its class; `Fast` and `Pil` at its end do not count."""
    processor: Mapping[str, Any]
    """`processor_config.json`."""
    model: Mapping[str, Any]
    """`config.json`."""

    def of_model(self, *keys: str) -> Any:
        """A value of `config.json` below some keys; None where there is none."""
        found: Any = self.model
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


ReadProcessor = Callable[[ModelFolder, Mapping[str, Any]], dict[str, Any]]
"""A folder, and the settings of a processor in it -> options of a recipe. A RecipeError, without a place, refuses."""


def options_of_folder(path: Path, known: Mapping[str, ReadProcessor], what: str) -> dict[str, Any]:
    """The options of a kind of items that a model's folder gives.

    Args:
        path: The folder.
        known: How settings of each class are read.
        what: The kind, for errors.

    Raises:
        RecipeError: There is no such folder, no processor of the kind in it, one of another class, or settings that
            torchmix does not follow.
    """
    folder = read_folder(path)
    mine = [name for name in folder.processors if name in known]
    if not mine:
        names = ", ".join(folder.processors) or "none"
        hint = "".join(nearest(name, known) for name in folder.processors)
        raise RecipeError(
            f"{folder.path} has the processors {names}{hint}, and those of {what}s that torchmix follows are "
            f"{', '.join(known)}; write the options of your recipe yourself"
        )
    return known[mine[0]](folder, folder.processors[mine[0]])


def read_folder(path: Path) -> ModelFolder:
    """Read the files of a model's folder; errors as those of `options_of_folder`."""
    if not path.is_dir():
        raise RecipeError(f"{str(path)!r} is no folder; name that of a model, with its {_FILES[0]}")
    read = {name: _json_of(path / name) for name in _FILES}
    processor, processors = read["processor_config.json"], dict[str, Mapping[str, Any]]()
    for settings in (read[_FILES[0]], read[_FILES[1]], *(processor.get(part) for part in _PARTS)):
        if isinstance(settings, Mapping):
            for key in ("video_processor_type", "image_processor_type", "feature_extractor_type"):
                name = settings.get(key)
                if isinstance(name, str):
                    processors.setdefault(name.removesuffix("Fast").removesuffix("Pil"), settings)
                    break
    return ModelFolder(path=str(path), processors=processors, processor=processor, model=read["config.json"])


def _json_of(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    return found


def of_settings(settings: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Settings of a processor by their names, with the defaults of its class.

    Raises:
        RecipeError: A value of another type.
    """
    found = {}
    for key, default in defaults.items():
        value = settings.get(key)
        value = default if value is None else value
        if default is not None and not isinstance(value, _alike(default)):
            raise RecipeError(f"{key} is {value!r}, expected something like {default!r}")
        found[key] = value
    return found


def _alike(default: Any) -> Any:
    if isinstance(default, bool):
        return bool
    if isinstance(default, int | float):
        return (int, float)
    return (list, tuple) if isinstance(default, list | tuple) else (dict, int) if isinstance(default, dict) else str


def must_be(settings: Mapping[str, Any], **wanted: Any) -> None:
    """Refuse settings that torchmix does not follow: each key that is there must have this value, or None."""
    for key, value in wanted.items():
        found = settings.get(key)
        if found is not None and found != value:
            raise RecipeError(f"its {key} is {found!r}, and torchmix follows {value!r} alone")
