"""Where images are decoded: what the recipe says, else where fewer bytes travel."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.support.image_sources import RULES, TOKEN
from torchmix.catalog.store import Catalog
from torchmix.errors import RecipeError
from torchmix.indexing.scan import index_recipe
from torchmix.reader.items import bytes_that_travel, decode_place
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Recipe


def recipe_of(**module: Any) -> Recipe:
    images = {"column": "image", "token": TOKEN, **RULES["dynamic"]}
    return check_recipe(
        {
            "version": 1,
            "seed": 1,
            "batch": {"samples": 2, "length": 256},
            "sources": {"a": {"path": "0.parquet", "text": "text", "tokenizer": "bytes", "images": images}},
            "mixture": {"a": 1},
            "modules": {"vision": {"items": "image", "sizes": "patches", **module}},
        }
    )


def catalog_of(folder: Path, kind: str, *, side: int) -> tuple[Catalog, int]:
    """Four images of noise, and the bytes of their files."""
    rng, files = np.random.default_rng(1), []
    for _ in range(4):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side, 3)).astype(np.uint8)).save(file, kind, quality=5)
        files.append(file.getvalue())
    pq.write_table(pa.table({"text": ["x"] * 4, "image": files}), folder / "0.parquet")
    return index_recipe(recipe_of(), folder), sum(map(len, files))


@pytest.mark.parametrize(
    ("kind", "side", "axis", "has_loaders", "wanted"),
    [
        ("JPEG", 32, "WORLD", False, "rank"),
        ("JPEG", 32, "WORLD", True, "rank"),
        ("JPEG", 32, "DP", True, "worker"),
        ("PNG", 200, "WORLD", True, "loader"),
        ("PNG", 200, "WORLD", False, "worker"),
    ],
)
def test_fewer_bytes_travel(kind: str, side: int, axis: str, has_loaders: bool, wanted: str, tmp_path: Path) -> None:
    catalog, files = catalog_of(tmp_path, kind, side=side)
    module = recipe_of(axis=axis).modules["vision"]
    assert bytes_that_travel(module, catalog) == (files, 4 * 32 * 32 * 3)
    assert decode_place(module, catalog, has_loaders=has_loaders) == wanted
    for asked in ("worker", "loader"):
        asking = recipe_of(axis=axis, decode_at=asked).modules["vision"]
        assert decode_place(asking, catalog, has_loaders=has_loaders) == (asked if has_loaders else "worker")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ({"decode_at": "rank", "axis": "DP"}, "with axis DP several ranks encode an image"),
        ({"decode_at": "rank", "items": "document", "sizes": "tokens"}, "is of images, and this module computes doc"),
        ({"decode_at": "leader"}, "decode_at"),
    ],
)
def test_places_that_cannot_be_are_refused(module: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(**module)
