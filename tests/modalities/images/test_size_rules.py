"""Size rules against the published algorithms, written here for one image at a time in plain floats and fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import RecipeError
from torchmix.lazy_names import imported
from torchmix.modalities.images.rules import (
    RULES,
    AnyresRule,
    DynamicRule,
    FixedRule,
    OwnRule,
    TilesRule,
    rule_of,
)
from torchmix.modalities.pictures import patches_in_rows
from torchmix.recipe.images import SIZE_RULES
from torchmix.recipe.structs import Anyres, Fixed, Images, Tiles

PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def many_sizes(count: int) -> tuple[Int64Array, Int64Array]:
    """Widths and heights: thin, tiny, usual and huge ones."""
    rng = np.random.default_rng(18)
    wide = np.exp(rng.uniform(0, np.log(20_000), (count // 2, 2))).astype(np.int64)
    usual = rng.integers(1, 3_000, (count // 4, 2))
    tiny = rng.integers(1, 60, (count - count // 2 - count // 4, 2))
    sizes = np.concatenate([wide, usual, tiny])
    return sizes[:, 0], sizes[:, 1]


def smart_resize(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Qwen2-VL's rule; (0, 0) where it refuses."""
    if max(height, width) / min(height, width) > 200:
        return 0, 0
    to_height, to_width = round(height / factor) * factor, round(width / factor) * factor
    if to_height * to_width > most:
        by = math.sqrt(height * width / most)
        return max(factor, math.floor(height / by / factor) * factor), max(
            factor, math.floor(width / by / factor) * factor
        )
    if to_height * to_width < least:
        by = math.sqrt(least / (height * width))
        return math.ceil(height * by / factor) * factor, math.ceil(width * by / factor) * factor
    return to_height, to_width


@pytest.mark.parametrize("patch, least, most", [(14, 3_136, 1_003_520), (16, 65_536, 16_777_216)])
def test_dynamic_resizes_as_qwen2_vl(patch: int, least: int, most: int) -> None:
    rule = DynamicRule(patch=patch, merge=2, min_pixels=least, max_pixels=most)
    width, height = many_sizes(4_000)
    found = np.stack(rule.resized(width, height)[::-1], axis=1).tolist()
    wanted = [
        list(smart_resize(h, w, 2 * patch, least, most)) for w, h in zip(width.tolist(), height.tolist(), strict=True)
    ]
    assert found == wanted


def test_dynamic_at_its_edges() -> None:
    rule = DynamicRule(patch=14, merge=2, min_pixels=3_136, max_pixels=1_003_520)
    # transformers 5.23.0 gives these; qwen-vl-utils clamps first, and gives (1988, 28) for the first one.
    cases = {(2000, 13): (700, 28), (42, 70): (56, 56), (200, 1): (812, 28), (5000, 5000): (980, 980), (1, 1): (56, 56)}
    for size, wanted in cases.items():
        width, height = rule.resized(*(np.array([side]) for side in size))
        assert (int(width[0]), int(height[0])) == wanted, size
    assert rule.sizes(np.array([201]), np.array([1])).patches.tolist() == [0]
    assert "200 times" in rule.fault(201, 1) and not rule.fault(200, 1)


def test_max_pixels_of_dynamic_is_no_hard_bound() -> None:
    rule = DynamicRule(patch=14, merge=2, min_pixels=3_136, max_pixels=50_176)
    width, height = rule.resized(np.array([5000]), np.array([28]))
    assert (int(height[0]), int(width[0])) == (28, 2968)


def nearest_tiles(width: int, height: int, size: int, least: int, most: int) -> tuple[int, int]:
    """InternVL's rule, (columns, rows), with the same doubles."""
    choices = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if least <= i * j <= most]
    choices.sort(key=lambda pair: pair[0] * pair[1])
    best, found = math.inf, (1, 1)
    for i, j in choices:
        distance = abs(width / height - i / j)
        if distance < best or (distance == best and width * height > 0.5 * size * size * i * j):
            best, found = distance, (i, j)
    return found


@pytest.mark.parametrize("least, most", [(1, 12), (2, 6), (1, 1)])
def test_tiles_are_those_of_internvl(least: int, most: int) -> None:
    rule = TilesRule(patch=14, merge=2, size=448, min=least, max=most)
    width, height = many_sizes(2_000)
    found = np.stack(rule.grids(width, height), axis=1).tolist()
    wanted = [list(nearest_tiles(w, h, 448, least, most)) for w, h in zip(width.tolist(), height.tolist(), strict=True)]
    assert found == wanted


def test_tiles_at_their_edges() -> None:
    rule = TilesRule(patch=14, merge=2, size=448, min=1, max=12)
    for side, wanted in ((633, (1, 256)), (634, (5, 1280)), (1000, (10, 2560))):
        sizes = rule.sizes(np.array([side]), np.array([side]))
        assert (int(sizes.segments[0]), int(sizes.tokens[0])) == wanted


def anyres_tokens(width: int, height: int) -> int:
    """LLaVA-NeXT's count, with exact fractions for the canvas and floats where it has floats."""
    best: tuple[int, int] | None = None
    canvas = (0, 0)
    for canvas_height, canvas_width in PINPOINTS:
        scale = min(canvas_width / width, canvas_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        rank = (kept, kept - canvas_height * canvas_width)
        if best is None or rank > best:
            best, canvas = rank, (canvas_height, canvas_width)
    rows, columns = canvas[0] // 14, canvas[1] // 14
    if Fraction(width, height) > Fraction(columns, rows):
        kept_rows = int(round(height * (columns / width), 7))
        rows -= (rows - kept_rows) // 2 * 2
    else:
        kept_columns = int(round(width * (rows / height), 7))
        columns -= (columns - kept_columns) // 2 * 2
    return rows * columns + rows + 576


def test_anyres_counts_as_llava_next() -> None:
    rule = AnyresRule(patch=14, size=336, canvases=PINPOINTS)
    width, height = many_sizes(4_000)
    wanted = [anyres_tokens(w, h) for w, h in zip(width.tolist(), height.tolist(), strict=True)]
    assert rule.sizes(width, height).tokens.tolist() == wanted
    # transformers 5.23.0 gives these.
    known = {(336, 336): 1176, (640, 480): 2340, (1000, 200): 1598}
    for (w, h), tokens in known.items():
        assert rule.sizes(np.array([w]), np.array([h])).tokens.tolist() == [tokens]


def test_patches_come_by_block_and_list_channels_first() -> None:
    height, width, patch, merge = 12, 24, 3, 2
    pixels = np.arange(height * width * 3).reshape(height, width, 3).astype(np.uint8)
    wanted: list[NDArray[np.uint8]] = []
    for block_row in range(0, height, patch * merge):
        for block_column in range(0, width, patch * merge):
            for row in range(block_row, block_row + patch * merge, patch):
                for column in range(block_column, block_column + patch * merge, patch):
                    wanted.append(pixels[row : row + patch, column : column + patch].transpose(2, 0, 1).reshape(-1))
    assert np.array_equal(patches_in_rows(pixels, patch, merge), np.stack(wanted))


def square_grid(width: int, height: int) -> tuple[tuple[int, int], int]:
    """A rule of a user's."""
    side = 2 * max(1, round(math.sqrt(width * height) / 28))
    return (side, side), side * side // 4


def test_a_users_function_is_a_rule() -> None:
    where = "sources.a.images.size"
    function = imported("tests.modalities.images.test_size_rules:square_grid", where)
    rule = OwnRule(name="square", function=function, patch=14, merge=2)
    sizes = rule.sizes(np.array([28, 280]), np.array([28, 280]))
    assert sizes.patches.tolist() == [4, 400] and sizes.tokens.tolist() == [1, 100]
    with pytest.raises(RecipeError, match="cannot be imported"):
        imported("tests.modalities.images.test_size_rules:squares", where)
    with pytest.raises(RecipeError, match="multiple of merge"):
        OwnRule(name="odd", function=lambda w, h: ((3, 2), 1), patch=14, merge=2).sizes(np.array([1]), np.array([1]))


def test_each_key_of_the_recipe_has_its_rule() -> None:
    assert {None, *SIZE_RULES} == set(RULES)
    tiles, anyres = Tiles(size=448, min=1, max=12), Anyres(size=336)
    keys = ({}, {"tiles": tiles}, {"anyres": anyres}, {"fixed": Fixed(height=28, width=28)}, {"size": "math:hypot"})
    made = [rule_of(Images(column="image", token=5, **key), "images") for key in keys]
    assert [type(rule) for rule in made] == [DynamicRule, TilesRule, AnyresRule, FixedRule, OwnRule]


def test_a_function_may_crop_and_pad() -> None:
    def placed(width: int, height: int) -> tuple[tuple[int, int], int, tuple[tuple[int, int], tuple[int, int]]]:
        return (2, 3), 6, ((width, height), (-10, 20))

    from PIL import Image

    pixels = np.random.default_rng(3).integers(0, 256, (30, 60, 3), dtype=np.uint8)
    rule = OwnRule(name="placed", function=placed, patch=14, merge=1, fill=(9, 8, 7))
    canvas = np.full((28, 42, 3), (9, 8, 7), np.uint8)
    canvas[20:28, 0:42] = pixels[0:8, 10:52]
    assert np.array_equal(rule.segments(Image.fromarray(pixels)), patches_in_rows(canvas, 14))
    for wrong in (lambda w, h: ((2, 3), 6, 5), lambda w, h: ((2, 3), 6, ((0, 5), (0, 0)))):
        with pytest.raises(RecipeError, match=r"\(width, height\), \(left, top\)|sides are 1 to"):
            OwnRule(name="odd", function=wrong, patch=14, merge=1).sizes(np.array([60]), np.array([30]))
