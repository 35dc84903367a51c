"""Rows that go through a map: what the index measures, in every format, and what it refuses."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.support.catalogs import open_catalog
from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.json_lines import plain_lines
from tests.support.maps import recipe_of_map, write_functions
from tests.support.split_rows import make_split_file
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogStale, RecipeError, SourceUnreadable
from torchmix.indexing import measure_rows
from torchmix.indexing.scan import index_recipe, index_sources
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.sources import maps_of
from torchmix.recipe.structs import Recipe

TEXTS: list[str | None] = ["one", "two three", None, "", "ünï", *random_texts(3, 300)]


def rows_of(recipe: Recipe, directory: Path, catalog: Catalog) -> list[list[int]]:
    """All rows of source web, as a reader gives them."""
    tokens = catalog.sources["web"].sizes.tokens.astype(np.int64)
    numbers = np.arange(len(tokens))
    ends = np.cumsum(tokens)
    reader = Reader(catalog, directory, cache_bytes=1 << 16, maps=maps_of(recipe.sources), seed=recipe.seed)
    read = reader.read(WantedPieces.end_to_end(source=0, row=numbers, epoch=0, start=0, tokens=tokens))
    reader.close()
    return [read.values[a:b].tolist() for a, b in pairwise([0, *ends.tolist()])]


def write_texts(directory: Path, format: str) -> str:
    if format == "jsonl":
        (directory / "web.jsonl").write_bytes(plain_lines(TEXTS))
        return "web.jsonl"
    if format == "arrow":
        table = pa.table({"text": pa.array(TEXTS)})
        with pa.ipc.new_file(str(directory / "web.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
        return "web.arrow"
    make_text_file(directory / "web.parquet", TEXTS, dictionary=format == "dictionary", page_bytes=500)
    return "web.parquet"


@pytest.mark.parametrize("format", ["parquet", "dictionary", "jsonl", "arrow"])
def test_texts_of_every_format_go_through_a_map_that_gives_texts_or_tokens(tmp_path: Path, format: str) -> None:
    path, name = write_texts(tmp_path, format), write_functions(tmp_path)
    shout = recipe_of_map(f"{name}:shout", path=path)
    found = rows_of(shout, tmp_path, index_recipe(shout, tmp_path))
    assert found == [[] if text is None else [*text.upper().encode(), 256] for text in TEXTS]
    letters = recipe_of_map(f"{name}:letters", path=path, tokenizer=None)
    catalog = index_recipe(letters, tmp_path)
    assert rows_of(letters, tmp_path, catalog) == [[] if text is None else list(map(ord, text)) for text in TEXTS]
    all_letters = [ord(letter) for text in TEXTS if text for letter in text]
    assert catalog.sources["web"].ids == (min(all_letters), max(all_letters))
    assert catalog.sources["web"].vocab_size is None


@pytest.mark.parametrize("is_split", [False, True])
def test_lists_of_tokens_go_through_a_map_also_where_rows_are_split_over_pages(
    tmp_path: Path, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_rows, "RUN_BYTES", 3000)
    documents: list[Any] = [None, [], *random_tokens(4, 200, mean_tokens=60)]
    if is_split:
        make_split_file(tmp_path / "web.parquet", documents, page_values=100)
    else:
        make_tokens_file(tmp_path / "web.parquet", documents)
    recipe = recipe_of_map(f"{write_functions(tmp_path)}:doubled", text=None, tokenizer=None, tokens="input_ids")
    found = rows_of(recipe, tmp_path, index_recipe(recipe, tmp_path))
    assert found == [[2 * int(token) for token in ([] if row is None else row)] for row in documents]


def test_another_version_is_stale_and_is_indexed_again(tmp_path: Path) -> None:
    make_text_file(tmp_path / "web.parquet", ["a", "bc"])
    name = write_functions(tmp_path, "import os\nshout.version = os.environ['VERSION_OF_SHOUT']")
    recipe = recipe_of_map(f"{name}:shout")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERSION_OF_SHOUT", "1")
        first = index_recipe(recipe, tmp_path)
    assert first.sources["web"].transform_id == f"map:{name}:shout@1+bytes-1"
    again = write_functions(tmp_path, "shout.version = 2")
    (tmp_path / f"{again}.py").rename(tmp_path / f"{name}.py")
    del sys.modules[name]
    catalog = open_catalog(recipe, tmp_path)
    with pytest.raises(CatalogStale, match=r"transform .*shout@1\+bytes-1', the map .*:shout here has .*shout@2"):
        Reader(catalog, tmp_path, cache_bytes=0, maps=maps_of(recipe.sources))
    second = index_sources(recipe, tmp_path)
    assert second.scanned_files == 1 and second.catalog.fingerprint != first.fingerprint
    assert index_sources(recipe, tmp_path).scanned_files == 0


def test_a_catalog_alone_imports_nothing(tmp_path: Path) -> None:
    make_text_file(tmp_path / "web.parquet", ["a"])
    recipe = recipe_of_map(f"{write_functions(tmp_path)}:shout")
    catalog = index_recipe(recipe, tmp_path)
    with pytest.raises(CatalogStale, match=r"went through the map .* and no recipe names it here"):
        Reader(catalog, tmp_path, cache_bytes=0)
    plain = recipe_of_map("os:system")
    with pytest.raises(CatalogStale, match=r"built with map .*:shout', the recipe says 'os:system'"):
        open_catalog(plain, tmp_path)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("unsaid", r"gives other tokens with another epoch and seed; .*`unsaid\.random = True`"),
        ("stretched", "row 0: the map .* gives 3 tokens, and 4 with another epoch and seed"),
        ("failing", r"web\.parquet: row 3: the map .*:failing raises ZeroDivisionError"),
        ("letters", r"web\.parquet: row 3: a bad word \(says "),
    ],
)
def test_what_cannot_be_planned_by_is_refused_with_its_row(tmp_path: Path, function: str, says: str) -> None:
    make_text_file(tmp_path / "web.parquet", ["a", "b", "c", "bad", "d", "bad"])
    recipe = recipe_of_map(f"{write_functions(tmp_path)}:{function}", tokenizer=None)
    with pytest.raises(SourceUnreadable, match=says):
        index_recipe(recipe, tmp_path)


@pytest.mark.parametrize("function", ["failing", "letters"])
def test_rows_that_a_map_refuses_are_masked_where_the_source_says_so(tmp_path: Path, function: str) -> None:
    make_text_file(tmp_path / "web.parquet", ["a", "b", "c", "bad", "d", "bad"])
    recipe = recipe_of_map(f"{write_functions(tmp_path)}:{function}", tokenizer=None, bad_rows="mask", max_bad="50%")
    catalog = index_recipe(recipe, tmp_path)
    source = catalog.sources["web"]
    assert [bad.row for bad in source.files[0].bad_rows] == [3, 5] and source.sizes.tokens[3] == 0
    found = rows_of(recipe, tmp_path, catalog)
    assert [len(row) for row in found] == [1, 1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"map": "mine.clean"}, "names no function; write module:function"),
        ({"map": "../x:f"}, "names no function"),
        ({"map": "a:b", "path": "x.bin", "format": "megatron", "text": None, "tokenizer": None}, "remove the key"),
    ],
)
def test_faults_of_the_recipe_are_found_without_importing(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        recipe_of_map(**keys)


def test_a_recipe_without_a_map_needs_a_tokenizer_as_before() -> None:
    recipe = recipe_of_map("a:b", tokenizer=None)
    source = {**{key: getattr(recipe.sources["web"], key) for key in ("path", "text")}}
    with pytest.raises(RecipeError, match="a text column needs a tokenizer"):
        check_recipe(
            Recipe(
                version=1,
                seed=1,
                batch=recipe.batch,
                sources={"web": type(recipe.sources["web"])(**source)},
                mixture=recipe.mixture,
            )
        )
