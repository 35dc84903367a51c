"""Images of items: what becomes of one that does not decode any more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.image_sources import make_rows, write_source
from torchmix.errors import CorruptPage, MemoryLimit
from torchmix.indexing.scan import index_recipe
from torchmix.reader.items import ItemReader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.steps.module_items import RankDecoder, values_of_items


def made(
    reader: ItemReader, items: list[int], *, masked: tuple[str, ...] = (), at_rank: bool = False
) -> dict[str, np.ndarray]:
    table = reader.table("pairs", "image")
    row = np.searchsorted(np.asarray(table.first_run_of_row), items, side="right") - 1
    pieces = SimpleNamespace(source=np.zeros(len(items), np.int64), row=row, epoch=np.zeros(len(items), np.int64))
    plan: Any = SimpleNamespace(pieces=pieces, sources=("pairs",))
    module: Any = SimpleNamespace(
        unit="image", items=SimpleNamespace(piece=np.arange(len(items)), item=np.array(items))
    )
    return values_of_items(plan, module, np.arange(len(items)), reader, masked=masked, at_rank=at_rank)


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
    reader = ItemReader(index_recipe(recipe, tmp_path), tmp_path)
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


def _lacks(*_: object, **__: object) -> None:
    raise MemoryError


def test_a_rank_decodes_what_the_worker_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in make_rows(4, 12) if row.image is not None]
    source = write_source(tmp_path, "pairs", "jsonl", [rows], "dynamic")
    told = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 2, "length": 512},
        "sources": {"pairs": source},
        "mixture": {"pairs": 1},
        "modules": {"vision": {"items": "image", "sizes": "patches"}},
    }
    recipe = check_recipe(told)
    catalog = index_recipe(recipe, tmp_path)
    reader = ItemReader(catalog, tmp_path)
    items = [3, 1, 5]
    whole, files = made(reader, items), made(reader, items, at_rank=True)
    assert files["file/content"].tobytes() == b"".join(rows[i].images[0] for i in items)
    row = np.searchsorted(np.asarray(reader.table("pairs", "image").first_run_of_row), items, side="right") - 1

    def arrays(held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        count = len(held["units"])
        more = {"item/source": np.zeros(count, np.int32), "item/row": row[:count]}
        return {f"vision.{name}": array for name, array in (held | more).items()}

    decoder = RankDecoder(part_of(recipe, "train"), tmp_path)
    found = decoder.decoded(arrays(files))
    assert set(found) == set(arrays(whole)) and decoder.items_decoded == 3
    assert np.array_equal(found["vision.unit/pixel_values"], whole["unit/pixel_values"])
    empty = decoder.decoded(arrays(made(reader, [], at_rank=True)))
    assert empty["vision.unit/pixel_values"].shape == made(reader, [])["unit/pixel_values"].shape
    [file] = catalog.sources["pairs"].files
    with monkeypatch.context() as lacking:
        lacking.setattr("PIL.Image.open", _lacks)
        with pytest.raises(
            MemoryLimit, match=rf"image 0 of row {row[0]} in {file.path}: decoding it .* \(no more\): raise"
        ):
            decoder.decoded(arrays(files))
    start = int(files["item/file_bytes"][0])
    files["file/content"] = files["file/content"].copy()
    files["file/content"][start : start + 40] = 0
    with pytest.raises(CorruptPage, match=rf"source 'pairs': image 0 of row {row[1]}: it is no image"):
        decoder.decoded(arrays(files))
    masking = check_recipe(told | {"sources": {"pairs": source | {"bad_rows": "mask"}}})
    grey = RankDecoder(part_of(masking, "train"), tmp_path).decoded(arrays(files))["vision.unit/pixel_values"]
    first = int(whole["units"][0])
    assert (grey[first : first + int(whole["units"][1])] == 128).all() and np.array_equal(
        grey[:first], whole["unit/pixel_values"][:first]
    )
    reader.close()
