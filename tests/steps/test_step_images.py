"""Images of items: what becomes of one that does not decode any more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.image_sources import make_rows, write_source
from torchmix.errors import CorruptPage
from torchmix.indexing.scan import index_recipe
from torchmix.reader.images import ImageReader
from torchmix.recipe.load import check_recipe
from torchmix.steps.step_images import images_of_items


def made(reader: ImageReader, items: list[int], *, masked: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    table = reader.table("pairs")
    row = np.searchsorted(np.asarray(table.first_item_of_row), items, side="right") - 1
    pieces = SimpleNamespace(source=np.zeros(len(items), np.int64), row=row)
    plan: Any = SimpleNamespace(pieces=pieces, sources=("pairs",))
    module: Any = SimpleNamespace(items=SimpleNamespace(piece=np.arange(len(items)), item=np.array(items)))
    return images_of_items(plan, module, np.arange(len(items)), reader, masked=masked)


def test_an_image_that_was_damaged_is_named_or_grey(tmp_path: Path) -> None:
    rows = [row for row in make_rows(4, 12) if row.image is not None]
    source = write_source(tmp_path, "pairs", "jsonl", [rows], "dynamic")
    recipe = check_recipe(
        {
            "version": 1,
            "seed": 1,
            "batch": {"samples": 2, "length": 512},
            "sources": {"pairs": source},
            "mixture": {"pairs": 1},
        }
    )
    reader = ImageReader(index_recipe(recipe, tmp_path), tmp_path)
    whole = made(reader, [3, 1])
    grids = [int(grid.prod()) for grid in whole["item/grid_thw"]]
    assert grids == whole["units"].tolist() and sum(grids) == len(whole["unit/pixel_values"])
    content = rows[1].image
    assert content is not None
    (tmp_path / "pairs/files/0/1.bin").write_bytes(content[: len(content) * 3 // 4])
    with pytest.raises(CorruptPage, match=r"source 'pairs': image 0 of row 1: it does not decode"):
        made(reader, [3, 1])
    grey = made(reader, [3, 1], masked=("pairs",))
    assert np.array_equal(grey["item/grid_thw"], whole["item/grid_thw"])
    first = grids[0]
    assert np.array_equal(grey["unit/pixel_values"][:first], whole["unit/pixel_values"][:first])
    assert (grey["unit/pixel_values"][first:] == 128).all()
    other = rows[0].image
    assert other is not None
    (tmp_path / "pairs/files/0/1.bin").write_bytes(other)
    with pytest.raises(CorruptPage, match="the index found"):
        made(reader, [1])
    assert len(made(reader, [])["unit/pixel_values"]) == 0
    reader.close()
