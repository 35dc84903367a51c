"""Trial: the built-in size rules, and what a model's folder makes of images, against transformers' image processors
that need no torch.

    python -m tests.trials.image_processors --seed 1 --count 100000

Sizes are thin, tiny, usual and huge. Grids and tokens must be equal for each of them: of Qwen2-VL's processor with the
bounds of two checkpoints, of InternVL's tiles, and of LLaVA-NeXT's and LLaVA-OneVision's canvases. Of each model of
`tests/support/model_folders.py` the numbers that its encoder takes must be equal, too, of an image for every thousand
sizes. Where transformers is not installed, the trial says so and compares nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.support.model_folders import PICTURE_MODELS, write_model
from tests.support.trial import trial_parser, whole
from torchmix.modalities.images.kind import ImageModality
from torchmix.modalities.images.rules import AnyresRule, DynamicRule, TilesRule
from torchmix.modalities.table import open_modality
from torchmix.recipe.build import build
from torchmix.recipe.items import with_processors
from torchmix.recipe.structs import Images
from torchmix.stateful.tower import Tower

PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
HOME = {
    "Qwen2VLImageProcessor": "qwen2_vl",
    "GotOcr2ImageProcessor": "got_ocr2",
    "CLIPImageProcessor": "clip",
    "LlavaImageProcessor": "llava",
    "LlavaNextImageProcessor": "llava_next",
    "LlavaOnevisionImageProcessor": "llava_onevision",
    "SiglipImageProcessor": "siglip",
    "Gemma3ImageProcessor": "gemma3",
}
"""By class, the folder of transformers."""
NOT_INSTALLED = "transformers is not installed"


def many_sizes(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Widths and heights."""
    rng = np.random.default_rng(seed)
    wide = np.exp(rng.uniform(0, np.log(20_000), (count // 2, 2))).astype(np.int64)
    usual = rng.integers(1, 3_000, (count // 4, 2))
    tiny = rng.integers(1, 60, (count - count // 2 - count // 4, 2))
    sizes = np.concatenate([wide, usual, tiny])
    return sizes[:, 0], sizes[:, 1]


def qwen(patch: int, least: int, most: int, width: np.ndarray, height: np.ndarray) -> int:
    """Sizes that differ."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rule = DynamicRule(patch=patch, merge=2, min_pixels=least, max_pixels=most)
    sizes = rule.sizes(width, height)

    def theirs(w: int, h: int) -> tuple[int, int]:
        try:
            to_height, to_width = smart_resize(h, w, factor=2 * patch, min_pixels=least, max_pixels=most)
        except ValueError:  # a ratio above 200
            return 0, 0
        return to_height // patch, to_width // patch

    found = zip(sizes.grid_height.tolist(), sizes.grid_width.tolist(), strict=True)
    return _differing(found, theirs, width, height)


def internvl(width: np.ndarray, height: np.ndarray) -> int:
    """Sizes that differ."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    rule = TilesRule(patch=14, merge=2, size=448, min=1, max=12)
    sizes = rule.sizes(width, height)

    def theirs(w: int, h: int) -> tuple[int, int]:
        columns, rows = get_optimal_tiled_canvas((h, w), (448, 448), 1, 12)
        tiles = columns * rows + (columns * rows > 1)
        return tiles, 256 * tiles

    return _differing(zip(sizes.segments.tolist(), sizes.tokens.tolist(), strict=True), theirs, width, height)


def llava_next(width: np.ndarray, height: np.ndarray) -> int:
    """Sizes that differ."""
    from transformers.image_processing_utils import select_best_resolution
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    sizes = AnyresRule(patch=14, size=336, canvases=PINPOINTS).sizes(width, height)
    unpadded = LlavaNextProcessor._get_unpadded_features

    def theirs(w: int, h: int) -> tuple[int, int]:
        to_height, to_width = select_best_resolution((h, w), [list(one) for one in PINPOINTS])
        scale_height, scale_width = to_height // 336, to_width // 336
        features, newlines = unpadded(None, h, w, 24, 24, scale_height, scale_width)
        return 1 + scale_height * scale_width, features + newlines + 576

    return _differing(zip(sizes.segments.tolist(), sizes.tokens.tolist(), strict=True), theirs, width, height)


def onevision(width: np.ndarray, height: np.ndarray) -> int:
    """Sizes that differ."""
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    sides = [384 * n for n in range(1, 7)]
    canvases = tuple((high, wide) for high in sides for wide in sides)
    sizes = AnyresRule(patch=14, size=384, canvases=canvases, most_tiles=9).sizes(width, height)
    self = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=[list(one) for one in canvases]),
        num_image_tokens=729,
        vision_aspect_ratio="anyres_max_9",
    )
    self._get_unpadded_features = lambda *given: LlavaOnevisionProcessor._get_unpadded_features(self, *given)

    def theirs(w: int, h: int) -> tuple[int]:
        return (LlavaOnevisionProcessor._get_number_of_features(self, h, w, 384, 384),)

    return _differing(((tokens,) for tokens in sizes.tokens.tolist()), theirs, width, height)


def tower_values(name: str, seed: int, count: int) -> dict[str, Any]:
    """The numbers that a model's encoder takes, of some images: how many differ from those of its own processor."""
    files = PICTURE_MODELS[name]
    with tempfile.TemporaryDirectory() as held:
        write_model(Path(held) / "model", files)
        told = with_processors({"images": {"column": "image", "token": 7, "processor": "model"}}, Path(held), "source")
    modality = open_modality("source", build(Images, told["images"]))
    assert isinstance(modality, ImageModality)
    settings = files.get("preprocessor_config.json") or files["processor_config.json"]["image_processor"]
    kind = settings["image_processor_type"].removesuffix("Fast")
    home = importlib.import_module(f"transformers.models.{HOME[kind]}.image_processing_pil_{HOME[kind]}")
    kept = {key: value for key, value in settings.items() if not key.endswith(("_type", "_class"))}
    theirs, tower = getattr(home, f"{kind}Pil")(**kept), Tower(modality.tower_form(), "pixel_values")
    rng = np.random.default_rng(seed)
    values = different = 0
    while values == 0 or count > 0:
        width, height = (int(side) for side in np.exp(rng.uniform(3, 7, 2)))
        if max(width, height) > 190 * min(width, height):
            continue
        from PIL import Image

        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        units = torch.from_numpy(modality.rule.segments(image))
        found = tower(SimpleNamespace(arrays={"pixel_values": units})).numpy()  # type: ignore[arg-type]
        wanted = np.asarray(theirs(image, return_tensors="np")["pixel_values"]).reshape(-1, *found.shape[1:])
        seen = [side // modality.rule.patch * modality.rule.patch for side in modality.rule.picture or ()]
        if seen:  # behind whole patches the encoder sees nothing
            found, wanted = (one[:, :, : seen[0], : seen[1]] for one in (found, wanted))
        assert len(found) == len(wanted)
        values, different = values + found.size, different + int((found != wanted).sum())
        count -= 1
    return {"values": values, "different": different}


def _differing(found: Any, theirs: Callable[[int, int], tuple[int, int]], width: np.ndarray, height: np.ndarray) -> int:
    sizes = zip(width.tolist(), height.tolist(), strict=True)
    return sum(one != theirs(*size) for one, size in zip(found, sizes, strict=True))


def run(seed: int, count: int) -> dict[str, Any]:
    """Sizes that differ, for each rule; or that there is nothing to compare with."""
    if importlib.util.find_spec("transformers") is None:
        return {"said": NOT_INSTALLED}
    import transformers

    width, height = many_sizes(seed, count)
    return {
        "transformers": transformers.__version__,
        "Qwen2-VL": qwen(14, 3_136, 1_003_520, width, height),
        "Qwen3-VL": qwen(16, 65_536, 16_777_216, width, height),
        "InternVL": internvl(width, height),
        "LLaVA-NeXT": llava_next(width, height),
        "LLaVA-OneVision": onevision(width, height),
        "values": {name: tower_values(name, seed, count // 1000) for name in PICTURE_MODELS},
    }


def main() -> None:
    """Run from the command line."""
    whole(trial_parser(__doc__, count=100_000, out="image_processors.json").parse_args(), run)


if __name__ == "__main__":
    main()
