"""What the encoder of a model takes, made of the units of a rank's items."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import torchmix
from tests.recipe.test_model_folder import recipe_with
from tests.support.model_folders import PICTURE_MODELS, SOUND_MODELS, VIDEO_MODELS, write_model
from torchmix.errors import OptionError
from torchmix.modalities.pictures import levels, patches_in_rows

RNG = np.random.default_rng(5)


def tower_of(folder: Path, kind: str, files: dict[str, Any] | None, **words: Any) -> Any:
    """The tower of a recipe whose model's folder has these files."""
    if files is not None:
        write_model(folder / "model", files)
        words["processor"] = "model"
    told = {"column": "c", "token": 7, **words}
    recipe = recipe_with(images=told) if kind == "image" else recipe_with(items={kind: told})
    recipe["modules"] = {"tower": {"items": kind, "sizes": "positions" if kind == "sound" else "patches"}}
    return torchmix.open_tower(recipe, "tower", directory=folder)


def taken(tower: Any, name: str, units: np.ndarray) -> np.ndarray:
    """What the tower makes of units."""
    found = tower(SimpleNamespace(arrays={name: torch.from_numpy(units)}))
    assert found.dtype == torch.float32
    return found.numpy()


def test_rows_of_qwen_have_both_frames(tmp_path: Path) -> None:
    tower = tower_of(tmp_path, "image", PICTURE_MODELS["Qwen2-VL"])
    units = RNG.integers(0, 256, (5, 588), dtype=np.uint8)
    settings = PICTURE_MODELS["Qwen2-VL"]["preprocessor_config.json"]
    table = levels("pillow", settings["image_mean"], settings["image_std"])
    wanted = np.empty((5, 3, 2, 196), np.float32)
    for channel in range(3):
        wanted[:, channel] = table[channel][units.reshape(5, 3, 196)[:, channel]][:, None]
    assert np.array_equal(taken(tower, "pixel_values", units), wanted.reshape(5, 1176))
    assert taken(tower, "pixel_values", np.zeros((0, 588), np.uint8)).shape == (0, 1176)


def test_pictures_are_put_together_of_patches(tmp_path: Path) -> None:
    for model, side, seen, merge in (("Gemma 3", 896, 896, 4), ("SigLIP", 384, 378, 1), ("InternVL3", 448, 448, 2)):
        tower = tower_of(tmp_path / model, "image", PICTURE_MODELS[model])
        pictures = RNG.integers(0, 256, (2, side, side, 3), dtype=np.uint8)
        units = np.concatenate([patches_in_rows(one, 14, merge) for one in pictures])
        found = taken(tower, "pixel_values", units)
        assert found.shape == (2, 3, side, side)
        files = PICTURE_MODELS[model]
        settings = files.get("preprocessor_config.json") or files["processor_config.json"]["image_processor"]
        table = levels("pillow", settings["image_mean"], settings["image_std"])
        for channel in range(3):
            wanted = table[channel][pictures[:, :seen, :seen, channel]]
            assert np.array_equal(found[:, channel, :seen, :seen], wanted)
        assert not found[:, :, seen:].any() and not found[:, :, :, seen:].any()


def test_sounds_are_chunks_of_filters_by_columns(tmp_path: Path) -> None:
    tower = tower_of(tmp_path, "sound", SOUND_MODELS["Qwen2-Audio"])
    chunks = RNG.normal(size=(2, 3000, 128)).astype(np.float32)
    found = taken(tower, "input_features", chunks.reshape(3000, 256))
    assert np.array_equal(found, chunks.transpose(0, 2, 1))


def test_rows_of_videos_are_normalised_by_channel(tmp_path: Path) -> None:
    tower = tower_of(tmp_path, "video", VIDEO_MODELS["Qwen2.5-VL"])
    units = RNG.integers(0, 256, (3, 1176), dtype=np.uint8)
    settings = VIDEO_MODELS["Qwen2.5-VL"]["video_preprocessor_config.json"]
    table = levels("tensor", settings["image_mean"], settings["image_std"])
    wanted = np.stack([table[c][units.reshape(3, 3, 392)[:, c]] for c in range(3)], axis=1).reshape(3, 1176)
    assert np.array_equal(taken(tower, "pixel_values_videos", units), wanted)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no mean and no deviation"):
        tower_of(tmp_path, "image", None)
    with pytest.raises(OptionError, match="no module of items; the recipe has none"):
        torchmix.open_tower(recipe_with(), "tower")
    half = {"mean": [0.5] * 3, "deviation": [0.5] * 3}
    recipe = recipe_with(images={"column": "c", "token": 7, **half})
    recipe["sources"]["b"] = {**recipe["sources"]["a"], "images": {"column": "c", "token": 7, **half, "frames": 2}}
    recipe["mixture"] = {"a": 1, "b": 1}
    recipe["modules"] = {"tower": {"items": "image", "sizes": "patches"}}
    with pytest.raises(OptionError, match="sources 'a' and 'b' differ"):
        torchmix.open_tower(recipe, "tower")
    recipe["modules"]["tower"]["sources"] = ["b"]
    assert torchmix.open_tower(recipe, "tower")
