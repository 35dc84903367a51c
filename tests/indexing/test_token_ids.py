"""Token ids are looked at while files are indexed: what no model has is an error, the rest is in the catalog."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.support.arrow_files import write_arrow
from tests.support.catalogs import make_world, open_catalog
from tests.support.files import make_tokens_file
from tests.support.indexed_datasets import write_dataset
from tests.support.indexing import counts, indexed
from tests.support.json_lines import frame_of, plain_lines
from tests.support.recipes import make_recipe
from tests.support.split_rows import make_split_file
from torchmix.catalog.manifest import MOST_ID, IdRange
from torchmix.catalog.store import Catalog
from torchmix.errors import SourceUnreadable
from torchmix.formats.parquet import scan
from torchmix.indexing import scan_files
from torchmix.indexing.scan import index_recipe
from torchmix.pages import open_pages

LONG = pa.list_(pa.int64())


def index(directory: Path, path: str, **keys: Any) -> Catalog:
    recipe = make_recipe({"web": "100%"}, sources={"web": {"path": path, **keys}})
    return index_recipe(recipe, directory)


def write(path: Path, documents: list[Any], how: str) -> None:
    """A file of any format with few rows in every page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "parquet":
        make_tokens_file(path, documents, type=LONG, page_bytes=64, row_group_rows=20)
    elif how == "dictionary":
        make_tokens_file(path, documents, type=LONG, page_bytes=64, dictionary=True)
    elif how == "split":
        make_split_file(path, documents, page_values=7, type=LONG)
    elif how in ("arrow", "compressed"):
        table = pa.table({"input_ids": pa.array(documents, LONG)})
        write_arrow(path, table, codec="zstd" if how == "compressed" else None, batch_rows=9)
    else:
        path.write_bytes(frame_of(plain_lines(documents, "input_ids"), how))


FORMATS = {
    "parquet": "a.parquet",
    "dictionary": "a.parquet",
    "split": "a.parquet",
    "arrow": "a.arrow",
    "compressed": "a.arrow",
    ".jsonl": "a.jsonl",
    ".gz": "a.jsonl.gz",
}


def documents(seed: int, smallest: int, largest: int) -> list[Any]:
    """Rows of 0 to 30 ids, among them an empty one and a null; both ends come once."""
    rng = np.random.default_rng(seed)
    rows: list[Any] = [rng.integers(smallest, largest, rng.integers(0, 30)).tolist() for _ in range(100)]
    rows[17], rows[40], rows[63], rows[88] = [], None, [smallest, largest - 1], [largest, largest - 1]
    return rows


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Several runs of pages in each chunk; those of split rows begin with an id that is not the file's."""
    monkeypatch.setattr(scan, "SCAN_RUN_BYTES", 200)


@pytest.mark.parametrize("how", FORMATS)
def test_the_catalog_has_the_smallest_and_the_largest_id_of_each_file(tmp_path, how):
    write(tmp_path / FORMATS[how], documents(1, 300, 50_000), how)
    write(tmp_path / FORMATS[how].replace("a.", "b."), documents(2, 7, 400), how)
    source = index(tmp_path, FORMATS[how].replace("a.", "[ab].")).sources["web"]
    assert [file.ids for file in source.files] == [IdRange(300, 50_000), IdRange(7, 400)]
    assert source.ids == IdRange(7, 50_000) and source.vocab_size is None


@pytest.mark.slow
@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("token", [-1, 2**31, 2**40, -(2**63)])
def test_an_id_that_no_model_has_is_an_error_with_source_file_row_and_id(tmp_path, how, token):
    rows = documents(1, 300, 50_000)
    rows[71] = [5, token, 6]
    rows[90] = [token - 1 if token > 0 else token + 1]
    write(tmp_path / FORMATS[how], rows, how)
    with pytest.raises(SourceUnreadable) as error:
        index(tmp_path, FORMATS[how])
    assert str(error.value).startswith(
        f"source 'web': {tmp_path / FORMATS[how]}: row 71 holds the token {token}; ids go from 0 to {MOST_ID}."
    )
    assert not (tmp_path / "catalog" / "manifest.json").exists()
    rows[71], rows[90] = [0], [MOST_ID]
    write(tmp_path / FORMATS[how], rows, how)
    assert index(tmp_path, FORMATS[how]).sources["web"].ids == IdRange(0, MOST_ID)


def test_one_changed_file_is_looked_at_alone(tmp_path):
    world = make_world(tmp_path, {"web": [[[1, 2], [3]], [[40, 50]], [[7]]]})
    assert indexed(world).catalog.sources["web"].ids == IdRange(1, 50)
    make_tokens_file(tmp_path / "web" / "1.parquet", [[9], [8, 9]])
    report = indexed(world)
    assert counts(report) == (1, 0, 2)
    assert [file.ids for file in report.catalog.sources["web"].files] == [(1, 3), (8, 9), (7, 7)]
    assert open_catalog(world.recipe, tmp_path).sources["web"].ids == IdRange(1, 9)


def test_files_of_an_unfinished_run_keep_what_was_seen(tmp_path, monkeypatch):
    """The first run fails at the second file, after the first was done: one thread takes them in turn."""
    monkeypatch.setattr(scan_files, "_num_threads", lambda files: 1)
    world = make_world(tmp_path, {"web": [[[1, 2], [3]], [[40, 50]]]}, sources={"web": {"path": "web/*.parquet"}})
    intact = (tmp_path / "web" / "1.parquet").read_bytes()
    (tmp_path / "web" / "1.parquet").unlink()
    index_recipe(world.recipe, tmp_path)
    (tmp_path / "catalog" / "manifest.json").unlink()
    make_tokens_file(tmp_path / "web" / "1.parquet", [[-1]])
    with pytest.raises(SourceUnreadable, match="row 0 holds the token -1"):
        indexed(world)
    (tmp_path / "web" / "1.parquet").write_bytes(intact)
    report = indexed(world)
    assert counts(report) == (1, 1, 0)
    assert [file.ids for file in report.catalog.sources["web"].files] == [(1, 3), (40, 50)]


def test_of_texts_the_tokenizer_knows_its_ids(tmp_path):
    world = make_world(tmp_path, {"web": [["one", "two"]]})
    source = indexed(world).catalog.sources["web"]
    assert (source.ids, source.vocab_size) == (None, 257)


def test_of_a_bin_the_index_knows_nothing(tmp_path):
    write_dataset(tmp_path / "a", [[1, 60_000], [3]])
    source = index(tmp_path, "a.idx", tokens=None).sources["web"]
    assert (source.ids, source.vocab_size) == (None, None)


def test_pages_for_other_loaders_hold_any_rows(tmp_path):
    """Labels of -100 are no ids of a model, and none of a recipe's business."""
    make_tokens_file(tmp_path / "a.parquet", [[-100, 5], [2**40]], column="labels", type=LONG)
    with open_pages(tmp_path / "a.parquet", catalog=tmp_path / "index", tokens="labels") as pages:
        assert pages.read_rows([1, 0]).to_pylist() == [[2**40], [-100, 5]]


def test_the_manifest_shows_them_as_lists(tmp_path):
    make_world(tmp_path, {"web": [[[4, 2]]]})
    indexed(make_world(tmp_path, {"web": [[[4, 2]]]}))
    manifest = json.loads((tmp_path / "catalog" / "manifest.json").read_text())
    assert manifest["sources"]["web"]["files"][0]["ids"] == [2, 4]
