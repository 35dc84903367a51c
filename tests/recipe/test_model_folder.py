"""A model's folder in the place of options: what is read of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import PICTURE_MODELS, SOUND_MODELS, VIDEO_MODELS, write_model
from torchmix.errors import RecipeError
from torchmix.recipe.items import items_of
from torchmix.recipe.load import check_recipe, load_recipe
from torchmix.recipe.structs import Recipe, Source

IMAGES = {"column": "image", "token": 7}


def recipe_with(**source: Any) -> dict[str, Any]:
    """A recipe of one source."""
    return {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 2, "length": 64},
        "sources": {"a": {"path": "a.parquet", "text": "text", "tokenizer": "bytes", **source}},
        "mixture": {"a": 1},
    }


def source_of(folder: Path, files: dict[str, dict[str, Any]], kind: str, **words: Any) -> Source:
    """The source of a recipe that names a model's folder."""
    write_model(folder / "model", files)
    told = {"processor": "model", **words}
    recipe = recipe_with(images=told) if kind == "image" else recipe_with(items={kind: told})
    return check_recipe(recipe, folder).sources["a"]


WANTED: dict[str, dict[str, Any]] = {
    "Qwen2-VL": {"patch": 14, "merge": 2, "frames": 2, "min_pixels": 3136, "max_pixels": 12845056, "before": 151652},
    "Qwen3-VL": {"patch": 16, "merge": 2, "frames": 2, "min_pixels": 65536, "max_pixels": 16777216},
    "InternVL3": {"patch": 14, "merge": 2, "tower": "pictures"},
    "LLaVA-1.5": {"patch": 14, "merge": 1, "tower": "pictures"},
    "LLaVA-1.5, padded": {"fill": (122, 116, 104)},
    "LLaVA-NeXT": {"patch": 14, "merge": 1, "tower": "pictures"},
    "LLaVA-OneVision": {"patch": 14, "merge": 1, "tower": "pictures"},
    "SigLIP": {"patch": 14, "merge": 1, "mean": (0.5, 0.5, 0.5)},
    "Gemma 3": {"patch": 14, "merge": 4, "filter": "bilinear"},
}


@pytest.mark.parametrize("model", PICTURE_MODELS)
def test_options_are_those_of_the_folder(tmp_path: Path, model: str) -> None:
    images = source_of(tmp_path, PICTURE_MODELS[model], "image", **IMAGES).images
    assert images is not None and images.processor is None and images.token == 7
    assert {key: getattr(images, key) for key in WANTED[model]} == WANTED[model]
    assert images.resize == "pillow" and images.deviation is not None


def test_rules_of_sizes_are_those_of_the_folder(tmp_path: Path) -> None:
    def images(model: str) -> Any:
        return source_of(tmp_path / model, PICTURE_MODELS[model], "image", **IMAGES).images

    tiles, fixed = images("InternVL3").tiles, images("LLaVA-1.5").fixed
    assert (tiles.size, tiles.min, tiles.max) == (448, 1, 12)
    assert (fixed.height, fixed.width, fixed.fit, fixed.shortest) == (336, 336, "crop", 336)
    assert images("LLaVA-1.5, padded").fixed.fit == "pad" and images("Gemma 3").fixed.fit == "stretch"
    assert images("LLaVA-NeXT").anyres.canvases == ("336x672", "672x336", "672x672", "1008x336", "336x1008")
    onevision = images("LLaVA-OneVision").anyres
    assert onevision.most_tiles == 9 and len(onevision.canvases) == 36


def test_ids_of_qwen_are_read_and_keys_beside_win(tmp_path: Path) -> None:
    found = source_of(tmp_path, PICTURE_MODELS["Qwen2-VL"], "image", column="image", max_pixels=50176, after=5).images
    assert found is not None
    assert (found.token, found.before, found.after, found.max_pixels) == (151655, 151652, 5, 50176)


def test_sounds_and_videos(tmp_path: Path) -> None:
    sound = items_of(source_of(tmp_path / "w", SOUND_MODELS["Whisper"], "sound", column="a", token=7))["sound"]
    assert (sound.rule, sound.mels, sound.chunk_seconds, sound.longer) == ("whisper", 80, 30, "cut")  # type: ignore[attr-defined]
    heard = items_of(source_of(tmp_path / "q", SOUND_MODELS["Qwen2-Audio"], "sound", column="a"))["sound"]
    assert (heard.rule, heard.mels, heard.token) == ("qwen2_audio", 128, 151646)  # type: ignore[attr-defined]
    video: Any = items_of(source_of(tmp_path / "v", VIDEO_MODELS["Qwen2.5-VL"], "video", column="v"))["video"]
    assert (video.rate, video.temporal_patch, video.max_pixels, video.token) == (2.0, 2, 12845056, 151656)
    assert video.mean is not None


def test_a_recipe_keeps_what_was_read(tmp_path: Path) -> None:
    write_model(tmp_path / "model", PICTURE_MODELS["Gemma 3"])
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe_with(images={**IMAGES, "processor": "model"})))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    (tmp_path / "model/config.json").unlink()
    assert check_recipe(recipe) == recipe and isinstance(recipe, Recipe)


def altered(model: str, file: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """The files of a model with other settings in one."""
    files = {name: dict(content) for name, content in PICTURE_MODELS[model].items()}
    files[file].update(settings)
    return files


PREPROCESSOR = "preprocessor_config.json"


@pytest.mark.parametrize(
    "files, message",
    [
        (altered("Qwen2-VL", PREPROCESSOR, image_processor_type="Idefics3ImageProcessor"), "Idefics3ImageProcessor"),
        (altered("Qwen2-VL", PREPROCESSOR, do_resize=False), "do_resize"),
        (altered("Qwen2-VL", PREPROCESSOR, rescale_factor=1.0), "rescale_factor"),
        (altered("Qwen2-VL", PREPROCESSOR, resample=1), "resample is 1"),
        (altered("Qwen2-VL", PREPROCESSOR, patch_size="14"), "patch_size"),
        (altered("LLaVA-1.5", "processor_config.json", vision_feature_select_strategy="full"), "strategy"),
        (altered("LLaVA-OneVision", "processor_config.json", vision_aspect_ratio="square"), "vision_aspect_ratio"),
        (altered("LLaVA-NeXT", PREPROCESSOR, size={"shortest_edge": 224}), "crop_size 336"),
        (altered("Gemma 3", "config.json", mm_tokens_per_image=200), "200 tokens"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(
    tmp_path: Path, files: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        source_of(tmp_path, files, "image", **IMAGES)
    assert caught.value.where == "sources.a.images.processor"


def test_a_gemma_that_pans_is_refused(tmp_path: Path) -> None:
    files = {name: dict(content) for name, content in PICTURE_MODELS["Gemma 3"].items()}
    settings = files["processor_config.json"]["image_processor"]
    files["processor_config.json"]["image_processor"] = {**settings, "do_pan_and_scan": True}
    with pytest.raises(RecipeError, match="do_pan_and_scan"):
        source_of(tmp_path, files, "image", **IMAGES)


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no folder"):
        check_recipe(recipe_with(images={**IMAGES, "processor": "none"}), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match="has the processors none"):
        check_recipe(recipe_with(images={**IMAGES, "processor": "empty"}), tmp_path)
    (tmp_path / "empty" / PREPROCESSOR).write_text("[1]")
    with pytest.raises(RecipeError, match="it is no object"):
        check_recipe(recipe_with(images={**IMAGES, "processor": "empty"}), tmp_path)
    with pytest.raises(RecipeError, match="Qwen3VLVideoProcessor"):
        write_model(tmp_path / "three", {PREPROCESSOR: {"video_processor_type": "Qwen3VLVideoProcessor"}})
        check_recipe(recipe_with(items={"video": {"column": "v", "token": 1, "processor": "three"}}), tmp_path)


@pytest.mark.parametrize(
    "words, message",
    [
        ({"fixed": {"height": 13, "width": 28}}, "fixed.height"),
        ({"fixed": {"height": 56, "width": 28, "fit": "pad"}}, "pad makes squares"),
        ({"fixed": {"height": 28, "width": 28, "shortest": 28}}, "is of crop"),
        ({"tower": "pictures"}, "pictures are of"),
        ({"mean": [0.5, 0.5, 0.5]}, "without the other"),
        ({"mean": [0.5, 0.5, 0.5], "deviation": [0.5, 0, 0.5]}, "above 0"),
        ({"fill": [0, 0, 256]}, "no color"),
        ({"most_pixels": 1 << 31}, "most_pixels"),
        ({"fixed": {"height": 28, "width": 28}, "tiles": {"size": 28}}, "one rule of sizes"),
    ],
)
def test_options_that_do_not_hold(words: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_recipe(recipe_with(images={**IMAGES, **words}))
