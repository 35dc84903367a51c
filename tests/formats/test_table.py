"""Sources of all formats beside each other, from the recipe to the pieces that are read."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from tests.support.catalogs import World, open_catalog
from tests.support.deadlines import LONG_S
from tests.support.files import flip_byte
from tests.support.formats import format_world
from tests.support.indexing import assert_lengths, changes, counts, indexed
from tests.support.json_lines import frame_of
from tests.support.reading import expected, random_pieces, read_with_successors, whole_documents
from tests.support.recipes import make_recipe
from tests.support.toy_format.source import add_toy_format, write_toy
from torchmix.cli.init.from_files import find_groups, look_at
from torchmix.errors import CatalogError, CorruptPage, RecipeError, SourceChanged, SourceUnreadable
from torchmix.formats.arrow import column as arrow_slices
from torchmix.formats.jsonl import lines as jsonl_pages
from torchmix.formats.table import READ_AS, row_of
from torchmix.indexing.scan import index_recipe
from torchmix.reader.reader import Reader
from torchmix.recipe.sources import FORMATS


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Files with many small pages."""
    monkeypatch.setattr(jsonl_pages, "PAGE_BYTES", 700)
    monkeypatch.setattr(arrow_slices, "PAGE_BYTES", 500)
    return format_world(tmp_path, 3)


def read_all(world: World) -> np.ndarray:
    reader = Reader(open_catalog(world.recipe, world.directory), world.directory, cache_bytes=1 << 24)
    try:
        return read_with_successors(reader, whole_documents(world))
    finally:
        reader.close()


def test_every_format_gives_the_documents_of_its_files(world):
    assert indexed(world).scanned_files == 14
    assert_lengths(world)
    catalog = open_catalog(world.recipe, world.directory)
    assert {name: source.format for name, source in catalog.sources.items()} == {
        "feather": "arrow",
        "gzip": "jsonl",
        "lines": "jsonl",
        "numbers": "jsonl",
        "parquet": "parquet",
        "stream": "arrow",
        "zstd": "jsonl",
    }
    assert min(source.pages.num_pages for source in catalog.sources.values()) > 2
    rng = np.random.default_rng(1)
    for cache_bytes in (0, 5_000, 1 << 24):
        reader = Reader(catalog, world.directory, cache_bytes=cache_bytes)
        for asked in (random_pieces(world, rng, 150), whole_documents(world)):
            np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        reader.close()


def test_another_run_finds_nothing_to_do_and_a_moved_folder_keeps_its_rows(world):
    first = indexed(world).catalog.fingerprint
    again = indexed(world)
    assert counts(again) == (0, 0, 14) and again.catalog.fingerprint == first
    for name in ("lines", "stream", "zstd"):
        files = sorted((world.directory / name).iterdir())
        content = {path.name: path.read_bytes() for path in files}
        shutil.rmtree(world.directory / name)
        (world.directory / name).mkdir()
        for path_name, held in content.items():
            (world.directory / name / path_name).write_bytes(held)
    assert counts(indexed(world)) == (0, 0, 14)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["feather", "gzip", "lines", "numbers", "stream", "zstd"])
def test_a_file_that_grew_is_refused_and_an_index_run_takes_it_in(world, name):
    indexed(world)
    path = max((world.directory / name).iterdir())
    path.write_bytes(path.read_bytes() + frame_of(b"\n", path.suffix) + path.read_bytes())
    with pytest.raises(SourceChanged, match=f"source '{name}': {path}: it has .* bytes; it was indexed with"):
        read_all(world)
    if name in ("feather", "stream"):  # what is behind the end of a stream is none of it
        return
    report = indexed(world)
    assert changes(report) == [f"changed {name}/{path.name}"]
    documents = world.documents[name]
    second = documents[len(documents) // 2 :]
    assert report.catalog.sources[name].num_documents == len(documents) + len(second)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["feather", "gzip", "lines", "numbers", "parquet", "stream", "zstd"])
def test_a_byte_that_was_altered_is_an_error_with_its_file_or_does_not_matter(world, name):
    catalog = indexed(world).catalog
    path = min((world.directory / name).iterdir())
    size, good = path.stat().st_size, expected(world, whole_documents(world))
    errors = 0
    for offset in range(5, size, size // 11):
        flip_byte(path, offset)
        try:
            np.testing.assert_array_equal(read_all(world), good)
        except (SourceChanged, CorruptPage) as error:
            assert f"source '{name}'" in str(error) and str(path) in str(error)
            errors += 1
        flip_byte(path, offset)
    # of a column in Arrow other columns do not matter
    assert errors >= (2 if name in ("feather", "stream") else 9)
    assert catalog.fingerprint == indexed(world).catalog.fingerprint


def test_a_source_of_mixed_names_is_refused_before_anything_is_opened(world):
    lines = replace(world.recipe.sources["lines"], path=("lines/*.jsonl", "parquet/*.parquet"))
    recipe = replace(world.recipe, sources={**world.recipe.sources, "lines": lines})
    mixed = World(directory=world.directory, recipe=recipe, documents=world.documents)
    with pytest.raises(SourceUnreadable, match=r"JSON lines by its name, and this source counts as Parquet.*`format`"):
        indexed(mixed)


def test_a_bad_line_stops_the_index_run_with_its_place(world):
    path = min((world.directory / "lines").iterdir())
    num_lines = path.read_bytes().count(b"\n")
    with path.open("ab") as file:
        file.write(b'\n{"v":\n')
    with pytest.raises(CatalogError, match=rf"source 'lines': {path}: line {num_lines + 2}, at byte "):
        indexed(world)


@pytest.mark.parametrize("says_format", [False, True])
def test_a_format_is_one_folder_and_one_row_of_the_table(tmp_path, monkeypatch, says_format):
    add_toy_format(monkeypatch)
    documents = [[seed] * (seed % 7) for seed in range(64)]
    suffix = ".numbers" if says_format else ".toy"
    write_toy(tmp_path / f"toy/0{suffix}", documents[:40])
    write_toy(tmp_path / f"toy/1{suffix}", documents[40:])
    keys = {"path": f"toy/*{suffix}", "tokens": None} | ({"format": "toy"} if says_format else {})
    recipe = make_recipe({"toy": "100%"}, sources={"toy": keys})
    world = World(directory=tmp_path, recipe=recipe, documents={"toy": [np.array(one) for one in documents]})
    report = indexed(world)
    assert counts(report) == (2, 0, 0) and report.catalog.sources["toy"].format == "toy"
    assert report.catalog.sources["toy"].pages.num_pages == 4 + 3
    assert_lengths(world)
    asked = whole_documents(world)
    np.testing.assert_array_equal(read_all(world), expected(world, asked))
    groups, left_out = find_groups([str(tmp_path / "toy")]) if not says_format else ([], [])
    assert [(group.name, group.format) for group in groups] == (
        [] if says_format else [("toy", "toy")]
    ) and not left_out
    assert [column.kind for column in look_at(str(tmp_path / f"toy/0{suffix}"), "toy")] == ["tokens"]
    with pytest.raises(RecipeError, match=r"'toyy' is not one of parquet, .*, toy \(did you mean 'toy'\?\)"):
        make_recipe({"toy": "100%"}, sources={"toy": {"path": "a", "tokens": None, "format": "toyy"}})


@pytest.mark.slow
def test_csv_is_refused_with_the_line_that_makes_parquet_of_it(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text("text,lang\nhello,de\nworld,en\n")
    recipe = make_recipe(
        {"web": "100%"}, sources={"web": {"path": "*.csv", "tokens": None, "text": "text", "tokenizer": "bytes"}}
    )
    with pytest.raises(SourceUnreadable, match=r"texts\.csv: CSV is not read") as of_index:
        index_recipe(recipe, tmp_path)
    with pytest.raises(SourceUnreadable, match="CSV is not read") as of_init:
        look_at(str(path), "parquet")
    with pytest.raises(SourceUnreadable, match="holds no data files") as of_folder:
        find_groups([str(tmp_path)])
    for caught, made in ((of_index, "texts"), (of_init, "texts"), (of_folder, "all")):
        line = str(caught.value).partition("Parquet of it: ")[2]
        _, *words = shlex.split(line)
        subprocess.run([sys.executable, *words], cwd=tmp_path, check=True, timeout=LONG_S)
        assert pq.read_table(tmp_path / f"{made}.parquet")["text"].to_pylist() == ["hello", "world"]
        (tmp_path / f"{made}.parquet").unlink()


def test_both_halves_of_the_table_have_the_same_rows():
    assert READ_AS.keys() == FORMATS.keys()
    assert [row_of(name).make_source.__module__ for name in FORMATS] == [
        f"torchmix.formats.{name}.source" for name in FORMATS
    ]
