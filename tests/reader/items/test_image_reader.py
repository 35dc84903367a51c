"""Sources with images: the tokens of their texts and the bytes of their images, against documents put together here."""

from __future__ import annotations

import io
import json
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from tests.support.image_sources import (
    CONTAINERS,
    OF_SEVERAL,
    RULES,
    TOKEN,
    ImageRow,
    make_image_rows,
    make_rows,
    write_source,
)
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogStale, RecipeError, SourceUnreadable, TorchmixError
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.images.rules import rule_of
from torchmix.reader.items import ItemReader
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Recipe


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
    wanted = WantedPieces.end_to_end(source=number, row=np.arange(len(tokens)), epoch=0, start=0, tokens=tokens)
    reader = Reader(catalog, folder, cache_bytes=1 << 20)
    values = reader.read(wanted).values
    reader.close()
    return [values[place : place + n].tolist() for place, n in zip(wanted.places, tokens, strict=True)]


def wanted(row: ImageRow, tokens: list[int]) -> list[int]:
    """The ids of a row, by hand; `tokens` of each of its images."""
    if row.text is None:
        return []
    parts = row.marked.split("<image>")
    ids = [*parts[0].encode()]
    for count, part in zip(tokens, parts[1:], strict=True):
        ids += [TOKEN] * count + [*part.encode()]
    return [*ids, 256]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("container", "rule"),
    [*((container, rule) for container in CONTAINERS for rule in RULES), *((each, "dynamic") for each in OF_SEVERAL)],
)
def test_texts_and_images_of_every_container(tmp_path: Path, container: str, rule: str) -> None:
    make = make_image_rows if container in OF_SEVERAL else make_rows
    files = [make(number, 40) for number in range(2)]
    recipe = recipe_of(pairs=write_source(tmp_path, "pairs", container, files, rule))
    catalog = index_recipe(recipe, tmp_path)
    rows = [row for file in files for row in file]
    table = catalog.sources["pairs"].sizes.items["image"]
    assert np.diff(table.first_run_of_row).tolist() == [len(row.images) for row in rows]
    all_images = [image for row in rows for image in row.images]
    images = recipe.sources["pairs"].images
    assert images is not None
    size_rule = rule_of(images, "images")
    for number, image in enumerate(all_images):
        with Image.open(io.BytesIO(image)) as opened:
            width, height = ImageOps.exif_transpose(opened).size
        assert (table.sizes["width"][number], table.sizes["height"][number]) == (width, height)
        sizes = size_rule.sizes(np.array([width]), np.array([height]))
        assert (table.tokens[number], table.sizes["patches"][number]) == (sizes.tokens[0], sizes.patches[0])
        assert table.sizes["bytes"][number] == len(image)
    first = np.asarray(table.first_run_of_row).tolist()
    tokens = [table.tokens[start:stop].tolist() for start, stop in pairwise(first)]
    held = documents(catalog, tmp_path, "pairs")
    assert held == [wanted(row, counts) for row, counts in zip(rows, tokens, strict=True)]
    for row_number, ids in enumerate(held):
        places = [
            range(int(table.offset[i]), int(table.offset[i]) + int(table.tokens[i]))
            for i in range(first[row_number], first[row_number + 1])
        ]
        assert [place for of_image in places for place in of_image] == np.flatnonzero(np.array(ids) == TOKEN).tolist()
    reader = ItemReader(catalog, tmp_path)
    order = np.random.default_rng(1).permutation(len(all_images))
    assert [bytes(value) for value in reader.read("pairs", "image", order)] == [all_images[i] for i in order.tolist()]
    reader.close()


@pytest.mark.parametrize(("text", "markers"), [("<image>", 1), ("<image><image><image> x", 3)])
@pytest.mark.parametrize("container", OF_SEVERAL[:4])
def test_another_number_of_markers_is_named(tmp_path: Path, container: str, text: str, markers: int) -> None:
    images = tuple(row.images[0] for row in make_rows(5, 9) if row.images)[:2]
    rows = [ImageRow(text="<image> and <image>", images=images), ImageRow(text=text, images=images)]
    source = write_source(tmp_path, "pairs", container, [rows], "dynamic")
    with pytest.raises(SourceUnreadable, match=f"row 1 has {markers} markers '<image>' and 2 images"):
        index_recipe(recipe_of(pairs=source), tmp_path)


def test_the_second_image_of_a_row_may_be_the_bad_one(tmp_path: Path) -> None:
    good = tuple(row.images[0] for row in make_rows(5, 9) if row.images)[:2]
    rows = [ImageRow(text=f"text {i}", images=good) for i in range(4)]
    rows[2] = ImageRow(text="bad", images=(good[0], b"no image at all"))
    source = write_source(tmp_path, "pairs", "lists", [rows], "dynamic")
    with pytest.raises(SourceUnreadable, match="row 2: its image 1: it is no image"):
        index_recipe(recipe_of(pairs=source), tmp_path)
    catalog = index_recipe(recipe_of(pairs=source | {"bad_rows": "mask", "max_bad": "30%"}), tmp_path)
    assert (catalog.sources["pairs"].sizes.tokens > 0).tolist() == [True, True, False, True]
    assert "its image 1: it is no image" in catalog.sources["pairs"].files[0].bad_rows[0].reason
    reader = ItemReader(catalog, tmp_path)
    assert [bytes(value) for value in reader.read("pairs", "image", np.array([7, 4]))] == [good[1], good[0]]
    reader.close()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"text_list": ["a"], "image_info": [{"image_name": "x", "matched_text_index": 1}]},
            "has the place 1, and there",
        ),
        ({"text_list": ["a"], "image_info": [{"image_name": "x"}]}, "no key 'matched_text_index'"),
        ({"text_list": ["a"], "image_info": [{"image_name": "x", "matched_text_index": None}]}, "no list of numbers"),
        ({"text_list": "a", "image_info": []}, "text_list is no list of texts"),
        ({"texts": ["a"], "image_info": []}, "no key 'text_list'"),
    ],
)
def test_places_at_fault_are_named(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    row = ImageRow(text="a<image>b", images=next(row.images for row in make_rows(5, 9) if row.images))
    source = write_source(tmp_path, "pairs", "mmc4", [[row, row]], "dynamic")
    file = tmp_path / "pairs" / "0.jsonl"
    first, _ = file.read_text().splitlines()
    (tmp_path / "pairs" / "files" / "x").write_bytes(row.images[0])
    file.write_text(f"{first}\n{json.dumps(line)}\n")
    with pytest.raises(SourceUnreadable, match=rf"line 2.*{message}"):
        index_recipe(recipe_of(pairs=source), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"interleaved": None, "text": "text"}, "of the lists of texts"), ({"path": "x.parquet"}, "JSON lines and WebDa")],
)
def test_places_that_are_not_read_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    source = write_source(tmp_path, "pairs", "mmc4", [make_rows(5, 2)], "dynamic") | changes
    with pytest.raises(RecipeError, match=message):
        recipe_of(pairs={key: value for key, value in source.items() if value is not None})


def write_structs(folder: Path, images: list[Any], kind: str) -> dict[str, Any]:
    """A Parquet or Arrow file of structs `{bytes, path}`, or of lists of them, and what a recipe says of it."""
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    of_row = pa.list_(struct) if any(isinstance(each, list) for each in images) else struct
    table = pa.table({"text": [f"text {i}" for i in range(len(images))], "image": pa.array(images, of_row)})
    path = folder / f"0.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, data_page_size=64, row_group_size=2)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    source = {"path": path.name, "format": kind, "text": "text", "tokenizer": "bytes"}
    return source | {"images": {"column": "image", "token": TOKEN, **RULES["dynamic"]}}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_an_image_that_is_a_path_alone_is_named_or_read_by_its_path(tmp_path: Path, kind: str) -> None:
    one, two, three = [row.images[0] for row in make_rows(5, 12) if row.images][:3]
    held: list[Any] = [{"bytes": one, "path": "a.jpg"}, None, {"bytes": None, "path": "b.jpg"}]
    source = write_structs(tmp_path, [*held, {"bytes": two, "path": None}], kind)
    with pytest.raises(SourceUnreadable, match=r"row 2: its image has no bytes, only the path 'b.jpg'.*images.folder"):
        index_recipe(recipe_of(pairs=source), tmp_path)
    catalog = index_recipe(recipe_of(pairs=source | {"bad_rows": "mask", "max_bad": "30%"}), tmp_path)
    assert (catalog.sources["pairs"].sizes.tokens > 0).tolist() == [True, True, False, True]
    with closing(ItemReader(catalog, tmp_path)) as reader:
        assert [bytes(value) for value in reader.read("pairs", "image", np.array([2, 0]))] == [two, one]
    (tmp_path / "jpg").mkdir()
    for name, content in (("a", three), ("b", two)):
        (tmp_path / "jpg" / f"{name}.jpg").write_bytes(content)
    by_path = source | {"images": source["images"] | {"folder": "jpg"}}
    with pytest.raises(SourceUnreadable, match=r"row 3: its image has no path, only bytes"):
        index_recipe(recipe_of(pairs=by_path), tmp_path)
    write_structs(tmp_path, held, kind)
    catalog = index_recipe(recipe_of(pairs=by_path), tmp_path)
    with closing(ItemReader(catalog, tmp_path)) as reader:
        assert [bytes(value) for value in reader.read("pairs", "image", np.array([1, 0]))] == [two, three]


def test_an_image_of_several_that_is_a_path_alone_is_named(tmp_path: Path) -> None:
    one, two = [row.images[0] for row in make_rows(5, 12) if row.images][:2]
    of_row = [{"bytes": one, "path": None}, {"bytes": None, "path": "x.jpg"}, {"bytes": two, "path": "y"}]
    source = write_structs(tmp_path, [[], of_row, [None], of_row[:1]], "parquet")
    for column in ("image", "image.bytes"):
        named = source | {"images": source["images"] | {"column": column}}
        with pytest.raises(SourceUnreadable, match=r"row 1: its image 1 has no bytes, only the path 'x.jpg'"):
            index_recipe(recipe_of(pairs=named), tmp_path)
    catalog = index_recipe(recipe_of(pairs=source | {"bad_rows": "mask", "max_bad": "30%"}), tmp_path)
    assert (catalog.sources["pairs"].sizes.tokens > 0).tolist() == [True, False, True, True]
    with closing(ItemReader(catalog, tmp_path)) as reader:
        assert [bytes(value) for value in reader.read("pairs", "image", np.array([0, 2, 3]))] == [one, two, one]


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
    reader = ItemReader(catalog, tmp_path)
    assert [bytes(value) for value in reader.read("pairs", "image", np.arange(len(images)))] == images
    reader.close()


def test_a_bad_image_is_named_or_its_row_masked(tmp_path: Path) -> None:
    rows = [ImageRow(text=f"text {i}", images=row.images) for i, row in enumerate(make_rows(3, 8))]
    rows[4] = ImageRow(text="bad", images=(b"no image at all",))
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
    images = next(row.images for row in make_rows(5, 9) if row.images)
    rows = [ImageRow(text="<image> <image>", images=images)]
    source = write_source(tmp_path, "pairs", "parquet", [rows], "dynamic")
    with pytest.raises(SourceUnreadable, match=r"row 0 has 2 markers '<image>' and 1 images"):
        index_recipe(recipe_of(pairs=source), tmp_path)


def test_another_rule_needs_another_index(tmp_path: Path) -> None:
    source = write_source(tmp_path, "pairs", "parquet", [make_rows(7, 12)], "dynamic")
    before = index_recipe(recipe_of(pairs=source), tmp_path).sources["pairs"]
    source["images"] |= {"max_pixels": 512}
    recipe = recipe_of(pairs=source)
    from torchmix.catalog.store import open_catalog

    with pytest.raises(CatalogStale, match="was built with items"):
        open_catalog(tmp_path / recipe.catalog, settings_of(recipe.sources, recipe.shuffle))
    after = index_recipe(recipe, tmp_path).sources["pairs"]
    assert after.num_tokens < before.num_tokens and after.fingerprint != before.fingerprint
