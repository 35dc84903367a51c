"""Trial: the built-in size rules against transformers' image processors that need no torch.

    python -m tests.trials.image_processors --seed 1 --count 100000

Sizes are thin, tiny, usual and huge. Grids and tokens must be equal for each of them: of Qwen2-VL's processor with the
bounds of two checkpoints, of InternVL's tiles, and of LLaVA-NeXT's canvases. Where transformers is not installed, the
trial says so and compares nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.trial import trial_parser, whole
from torchmix.modalities.images.rules import AnyresRule, DynamicRule, TilesRule

PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
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
    }


def main() -> None:
    """Run from the command line."""
    whole(trial_parser(__doc__, count=100_000, out="image_processors.json").parse_args(), run)


if __name__ == "__main__":
    main()
