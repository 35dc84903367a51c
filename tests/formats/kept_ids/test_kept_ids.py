"""Ids that an index run keeps: read in the place of the rows, for one content and transform, and deletable."""

from __future__ import annotations

import json
import logging
import resource
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.files import flip_byte, make_text_file, random_texts
from tests.support.json_lines import write_lines
from tests.support.maps import recipe_of_map, write_functions
from tests.support.vocabularies import END, make_tokenizer
from torchmix.catalog.store import Catalog
from torchmix.errors import CorruptPage, RecipeError, SourceUnreadable
from torchmix.formats.kept_ids import KEPT_FOLDER, IdsWriter, read_kept
from torchmix.indexing.scan import index_recipe, index_sources
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.sources import maps_of
from torchmix.recipe.structs import Batch, Recipe, Source

TEXTS: list[str | None] = ["one", None, "", *random_texts(3, 400)]


def recipe_of(**keys: Any) -> Recipe:
    source = Source(**{"path": "*.parquet", "text": "text", "tokenizer": "t.json", "end_id": END, **keys})
    return check_recipe(
        Recipe(version=1, seed=1, batch=Batch(samples=1, length=8), sources={"web": source}, mixture={"web": "100%"})
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "t.json")
    make_text_file(tmp_path / "a.parquet", TEXTS[:250], page_bytes=700)
    make_text_file(tmp_path / "b.parquet", TEXTS[250:], page_bytes=700)
    return tmp_path


def rows_of(catalog: Catalog, folder: Path, recipe: Recipe | None = None) -> tuple[list[list[int]], dict[str, Any]]:
    """All rows in a shuffled order, read in several calls; and the reader's figures."""
    tokens = catalog.sources["web"].sizes.tokens.astype(np.int64)
    maps = None if recipe is None else maps_of(recipe.sources)
    reader = Reader(catalog, folder, cache_bytes=1 << 16, maps=maps)
    found: list[list[int]] = [[] for _ in tokens]
    try:
        for rows in np.array_split(np.random.default_rng(1).permutation(len(tokens)), 7):
            counts = tokens[rows]
            ends = np.cumsum(counts)
            read = reader.read(WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=counts))
            for row, (start, stop) in zip(rows.tolist(), pairwise([0, *ends.tolist()]), strict=True):
                found[row] = read.values[start:stop].tolist()
        stats = reader.stats()
        whole = [np.asarray(reader.page(0, page).values) for page in range(catalog.sources["web"].pages.num_pages)]
        assert np.concatenate(whole).tolist() == [token for row in found for token in row]
    finally:
        reader.close()
    return found, stats


def kept_files(folder: Path) -> list[Path]:
    return sorted((folder / "catalog" / KEPT_FOLDER).glob("*"))


@pytest.mark.parametrize("how", ["key", "flag"])
def test_kept_ids_are_read_as_they_are_and_the_order_stays(folder: Path, how: str) -> None:
    plain = index_recipe(recipe_of(), folder)
    expected, stats = rows_of(plain, folder)
    assert stats["rows_encoded"] > 0
    recipe = recipe_of(keep="tokens") if how == "key" else recipe_of()
    report = index_sources(recipe, folder, keep_tokens=how == "flag")
    assert report.scanned_files == 2 and report.catalog.fingerprint == plain.fingerprint
    assert index_sources(recipe, folder, keep_tokens=how == "flag").scanned_files == 0
    assert len(kept_files(folder)) == 2
    found, stats = rows_of(report.catalog, folder)
    assert found == expected
    assert stats["rows_encoded"] == stats["pages_decoded"] == 0
    assert stats["bytes_served"] == 2 * sum(map(len, expected)), "ids below 65,536 take two bytes"
    kept_files(folder)[0].unlink()
    found, stats = rows_of(report.catalog, folder)
    assert found == expected and stats["rows_encoded"] > 0
    assert index_sources(recipe_of(keep="tokens"), folder).scanned_files == 1


def test_ids_of_a_file_that_changed_or_went_are_removed(folder: Path) -> None:
    recipe = recipe_of(keep="tokens")
    index_recipe(recipe, folder)
    before = kept_files(folder)
    make_text_file(folder / "a.parquet", ["other"])
    (folder / "b.parquet").unlink()
    make_text_file(folder / "c.parquet", ["third", "text"])
    found, stats = rows_of(index_recipe(recipe, folder), folder)
    assert stats["rows_encoded"] == 0 and len(found) == 3
    assert len(kept_files(folder)) == 2 and not set(before) & set(kept_files(folder))
    make_tokenizer(folder / "t.json", seed=9, vocabulary=300)
    index_recipe(recipe_of(), folder)
    assert not (folder / "catalog" / KEPT_FOLDER).exists()


def test_a_damaged_page_is_named_and_a_damaged_end_is_passed_over(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="torchmix")
    catalog = index_recipe(recipe_of(keep="tokens"), folder)
    expected, _ = rows_of(catalog, folder)
    for path in kept_files(folder):
        content = path.read_bytes()
        flip_byte(path, 3)
        with pytest.raises(CorruptPage, match=r"\.ids: the ids of page \d+, at bytes .* delete the file"):
            rows_of(catalog, folder)
        for cut in (content[:-20], b"", content[:-1] + bytes([content[-1] ^ 1])):
            path.write_bytes(cut)
            caplog.clear()
            found, stats = rows_of(catalog, folder)
            assert found == expected and stats["rows_encoded"] > 0
            assert any("are damaged" in record.message for record in caplog.records)
        path.write_bytes(content)
    assert rows_of(catalog, folder)[1]["rows_encoded"] == 0


def test_large_ids_take_four_bytes_also_where_small_ones_came_before(tmp_path: Path) -> None:
    identity = (5, "hash", "text", "transform")
    path = tmp_path / KEPT_FOLDER / "web.0123456789abcdef.ids"
    parts = [np.arange(60_000), np.array([], np.int64), np.array([65_535, 65_536, 2**31 - 1])]
    with IdsWriter(path, identity) as ids:
        for part in parts:
            ids.add(part, np.array([len(part)]))
        ids.finish()
    kept = read_kept(path, identity)
    assert kept is not None and kept.ids_of_page.tolist() == [60_000, 0, 3]
    assert np.fromfile(path, kept.dtype, 60_003).tolist() == np.concatenate(parts).tolist()
    assert np.dtype(kept.dtype) == np.int32
    assert read_kept(path, (5, "hash", "text", "other")) is None
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_run_that_fails_leaves_no_ids(folder: Path) -> None:
    name = write_functions(folder)
    make_text_file(folder / "a.parquet", ["fine", "bad"])
    recipe = recipe_of_map(f"{name}:failing", path="a.parquet", tokenizer=None, keep="tokens")
    with pytest.raises(SourceUnreadable, match="ZeroDivisionError"):
        index_recipe(recipe, folder)
    assert kept_files(folder) == []


@pytest.mark.parametrize(("most_bytes", "values"), [(0, 10), (3000, 10), (9000, 10), (3000, 70_000), (9000, 70_000)])
def test_a_full_disk_costs_the_ids_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, most_bytes: int, values: int
) -> None:
    """The kernel lets no file grow further, at the first block, in the middle, at the end, or in 4 bytes an id."""
    path = tmp_path / KEPT_FOLDER / "web.0.ids"
    blocks = [np.full(2500, value, np.int32) for value in (1, values)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        with IdsWriter(path, (1, "f", "text", "t")) as writer:
            for block in blocks:
                writer.add(block, np.array([len(block)]))
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(path.parent.iterdir())
    [said] = [record.message for record in caplog.records]
    assert "ids cannot be kept" in said and "File too large" in said and str(path) in said


def test_ids_of_a_map_are_kept_unless_it_is_random_or_gives_more_than_ids(folder: Path) -> None:
    name = write_functions(folder)
    shout = recipe_of_map(f"{name}:shout", path="a.parquet", keep="tokens")
    found, stats = rows_of(index_recipe(shout, folder), folder, shout)
    assert found[0] == [*b"ONE", 256] and stats["rows_encoded"] == 0
    random = recipe_of_map(f"{name}:drawn", path="a.parquet", tokenizer=None, keep="tokens")
    with pytest.raises(RecipeError, match="is random, so a row has other ids in each epoch") as error:
        index_recipe(random, folder)
    assert error.value.where == "sources.web.keep"
    letters = recipe_of_map(f"{name}:letters", path="a.parquet", tokenizer=None, keep="tokens")
    with pytest.raises(SourceUnreadable, match="the map gives raw beside ids, and keep: tokens keeps ids alone"):
        index_recipe(letters, folder)
    index_sources(recipe_of_map(f"{name}:drawn", path="a.parquet", tokenizer=None), folder, keep_tokens=True)
    assert kept_files(folder) == []


def test_there_is_nothing_to_keep_of_lists_of_tokens() -> None:
    with pytest.raises(RecipeError, match="lists of tokens are ids already"):
        recipe_of(text=None, tokenizer=None, end_id=None, tokens="ids", keep="tokens")


@pytest.mark.parametrize("name", ["web.jsonl", "web.jsonl.zst"])
def test_bad_rows_have_no_ids_and_move_none(tmp_path: Path, name: str) -> None:
    make_tokenizer(tmp_path / "t.json")
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    for place, garbage in ((0, b"no JSON"), (7, b'{"text": "cut'), (200, b'{"text": 5}'), (len(TEXTS), b"{}")):
        lines.insert(place, garbage)
    write_lines(tmp_path / name, b"\n".join(lines), mean_bytes=700, at_lines=True)
    keys = {"path": name, "bad_rows": "mask", "max_bad": "5%"}
    expected, _ = rows_of(index_recipe(recipe_of(**keys), tmp_path), tmp_path)
    catalog = index_recipe(recipe_of(**keys, keep="tokens"), tmp_path)
    assert catalog.sources["web"].num_bad_rows == 4
    found, stats = rows_of(catalog, tmp_path)
    assert found == expected and stats["rows_encoded"] == 0
    assert [row for row in (0, 7, 200) if found[row]] == []
