"""Sources with images: the tokens of their texts and the bytes of their images, against documents put together here."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.image_sources import CONTAINERS, RULES, TOKEN, ImageRow, make_rows, write_source
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogStale, SourceUnreadable, TorchmixError
from torchmix.indexing.scan import index_recipe
from torchmix.reader.images import ImageReader
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Recipe
from torchmix.transform.images.open_rule import rule_of


def recipe_of(**sources: dict[str, Any]) -> Recipe:
    return check_recipe(
        {
            "version": 1,
            "seed": 1,
            "batch": {"samples": 2, "length": 512},
            "sources": sources,
            "mixture": dict.fromkeys(sources, 1),
        }
    )


def documents(catalog: Catalog, folder: Path, name: str) -> list[list[int]]:
    """The ids of every row of a source, by the reader."""
    number, tokens = list(catalog.sources).index(name), catalog.sources[name].sizes.tokens.astype(np.int64)
    rows, places = np.arange(len(tokens)), np.cumsum(tokens) - tokens
    reader = Reader(catalog, folder, cache_bytes=1 << 20)
    read = reader.read(
        np.full(len(rows), number, np.int32),
        rows,
        np.zeros_like(rows),
        tokens,
        places=places,
        num_places=int(tokens.sum()),
    )
    reader.close()
    return [read.values[place : place + n].tolist() for place, n in zip(places.tolist(), tokens.tolist(), strict=True)]


def wanted(row: ImageRow, tokens: int) -> list[int]:
    """The ids of a row, by hand."""
    if row.text is None:
        return []
    parts = row.text.split("<image>") if "<image>" in row.text or row.image is None else ["", row.text]
    ids = [*parts[0].encode()]
    for part in parts[1:]:
        ids += [TOKEN] * tokens + [*part.encode()]
    return [*ids, 256]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("container", CONTAINERS)
def test_texts_and_images_of_every_container(tmp_path: Path, container: str, rule: str) -> None:
    files = [make_rows(number, 40) for number in range(2)]
    recipe = recipe_of(pairs=write_source(tmp_path, "pairs", container, files, rule))
    catalog = index_recipe(recipe, tmp_path)
    rows = [row for file in files for row in file]
    table = catalog.sources["pairs"].sizes.items["image"]
    assert np.diff(table.first_item_of_row).tolist() == [int(row.image is not None) for row in rows]
    with_image = [row for row in rows if row.image is not None]
    images = recipe.sources["pairs"].images
    assert images is not None
    size_rule = rule_of(images, "images")
    for number, row in enumerate(with_image):
        assert row.image is not None
        with Image.open(io.BytesIO(row.image)) as opened:
            width, height = ImageOps.exif_transpose(opened).size
        assert (table.sizes["width"][number], table.sizes["height"][number]) == (width, height)
        sizes = size_rule.sizes(np.array([width]), np.array([height]))
        assert (table.tokens[number], table.sizes["patches"][number]) == (sizes.tokens[0], sizes.patches[0])
        assert table.sizes["bytes"][number] == len(row.image)
    tokens_of_row = np.zeros(len(rows), np.int64)
    tokens_of_row[np.repeat(np.arange(len(rows)), np.diff(table.first_item_of_row))] = table.tokens
    held = documents(catalog, tmp_path, "pairs")
    assert held == [wanted(row, int(n)) for row, n in zip(rows, tokens_of_row, strict=True)]
    with_places = np.flatnonzero(np.diff(table.first_item_of_row))
    for number, row_number in enumerate(with_places.tolist()):
        offset, count = int(table.offset[number]), int(table.tokens[number])
        assert set(held[row_number][offset : offset + count]) == {TOKEN}
        assert held[row_number].count(TOKEN) == count
    reader = ImageReader(catalog, tmp_path)
    order = np.random.default_rng(1).permutation(len(with_image))
    assert [bytes(value) for value in reader.read("pairs", order)] == [with_image[i].image for i in order.tolist()]
    reader.close()


def test_images_and_texts_may_count_files_in_other_orders(tmp_path: Path) -> None:
    files = {"b": make_rows(1, 10), "a": make_rows(2, 12)}
    source: dict[str, Any] = {}
    for name, rows in files.items():
        source = write_source(tmp_path, name, "parquet", [rows], "dynamic")
        (tmp_path / "pairs").mkdir(exist_ok=True)
        (tmp_path / name / "0.parquet").rename(tmp_path / "pairs" / f"{name}.parquet")
        recipe = recipe_of(pairs=source | {"path": "pairs/*.parquet"})
        catalog = index_recipe(recipe, tmp_path)  # the second time a new file comes behind the one that sorts later
    images = [row.image for rows in files.values() for row in rows if row.image is not None]
    reader = ImageReader(catalog, tmp_path)
    assert [bytes(value) for value in reader.read("pairs", np.arange(len(images)))] == images
    reader.close()


def test_a_bad_image_is_named_or_its_row_masked(tmp_path: Path) -> None:
    rows = [ImageRow(text=f"text {i}", image=row.image) for i, row in enumerate(make_rows(3, 8))]
    rows[4] = ImageRow(text="bad", image=b"no image at all")
    source = write_source(tmp_path, "pairs", "parquet", [rows], "dynamic")
    with pytest.raises(SourceUnreadable, match=r"row 4: its image: it is no image that Pillow reads"):
        index_recipe(recipe_of(pairs=source), tmp_path)
    recipe = recipe_of(pairs=source | {"bad_rows": "mask", "max_bad": "20%"})
    catalog = index_recipe(recipe, tmp_path)
    assert catalog.sources["pairs"].sizes.tokens[4] == 0
    assert "its image" in catalog.sources["pairs"].files[0].bad_rows[0].reason
    assert documents(catalog, tmp_path, "pairs")[4] == []
    strict = source | {"bad_rows": "mask"}
    with pytest.raises(TorchmixError, match="its image"):
        index_recipe(recipe_of(pairs=strict), tmp_path)


def test_a_missing_file_of_an_image_is_named(tmp_path: Path) -> None:
    rows = [row for row in make_rows(4, 12) if row.image is not None]
    source = write_source(tmp_path, "pairs", "jsonl", [rows], "dynamic")
    (tmp_path / "pairs" / "files" / "0" / "3.bin").unlink()
    with pytest.raises(SourceUnreadable, match=r"row 3: its image '0/3.bin'.*cannot be opened"):
        index_recipe(recipe_of(pairs=source), tmp_path)


def test_more_markers_than_images_are_named(tmp_path: Path) -> None:
    rows = [ImageRow(text="<image> <image>", image=make_rows(5, 3)[0].image or make_rows(6, 9)[1].image)]
    source = write_source(tmp_path, "pairs", "parquet", [rows], "dynamic")
    with pytest.raises(SourceUnreadable, match=r"row 0 has 2 markers '<image>' and 1 images"):
        index_recipe(recipe_of(pairs=source), tmp_path)


def test_another_rule_needs_another_index(tmp_path: Path) -> None:
    source = write_source(tmp_path, "pairs", "parquet", [make_rows(7, 12)], "dynamic")
    before = index_recipe(recipe_of(pairs=source), tmp_path).sources["pairs"]
    source["images"] |= {"max_pixels": 512}
    recipe = recipe_of(pairs=source)
    from torchmix.catalog.store import open_catalog

    with pytest.raises(CatalogStale, match="was built with images"):
        open_catalog(tmp_path / recipe.catalog, settings_of(recipe.sources, recipe.shuffle))
    after = index_recipe(recipe, tmp_path).sources["pairs"]
    assert after.num_tokens < before.num_tokens and after.fingerprint != before.fingerprint
