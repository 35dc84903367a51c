"""Files without rows: counted, whatever types a writer that saw no value gave their columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.image_sources import make_rows, write_source
from tests.support.loaders import run_job
from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.properties import PropertyRows
from torchmix.cli.main import main
from torchmix.errors import SourceUnreadable
from torchmix.formats.arrow.source import ArrowSource
from torchmix.formats.parquet.source import ParquetSource
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe

Write = Callable[[pa.Table, Path], object]
TYPES = {
    "null": pa.null(),
    "lists of null": pa.list_(pa.null()),
    "structs of null": pa.struct([("bytes", pa.null())]),
    "another": pa.float64(),
    "none": None,
}
"""What the columns of an empty file may be; None: they are missing."""
COLUMNS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "text": ({"text": "v", "tokenizer": "bytes"}, {"v": ["a text of some words", None] * 40}),
    "ids": ({"tokens": "v"}, {"v": [[1, 2, 3, 4]] * 80}),
    "masked ids": ({"tokens": "v", "loss_mask": "m"}, {"v": [[1, 2, 3, 4]] * 80, "m": [[1, 1, 0, 1]] * 80}),
    "messages": (
        {"messages": "v", "tokenizer": "bytes"},
        {"v": [[{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]] * 80},
    ),
}


def write_file(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def write_stream(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


def job_of(folder: Path, said: dict[str, Any]) -> Path:
    """A recipe of one source."""
    recipe = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 4, "length": 64},
        "sources": {"s": said},
        "mixture": {"s": "100%"},
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))  # YAML, too
    return path


@pytest.mark.parametrize(
    ("write", "suffix"),
    [(pq.write_table, "parquet"), (write_file, "arrow"), (write_stream, "arrow")],
    ids=["parquet", "arrow", "stream"],
)
@pytest.mark.parametrize("columns", COLUMNS)
def test_they_are_counted_whatever_their_types_are(tmp_path: Path, columns: str, write: Write, suffix: str) -> None:
    said, held = COLUMNS[columns]
    held = {**held, "p": ["de", "en"] * 40}
    for number, type_ in enumerate(TYPES.values()):
        empty = pa.table({name: pa.array([], type_ or pa.int8()) for name in (held if type_ else ["x"])})
        for place in ("a", "z"):  # before and behind the rows
            write(empty, tmp_path / f"{place}{number}.{suffix}")
    write(pa.table(held), tmp_path / f"m.{suffix}")
    job = job_of(tmp_path, {"path": f"*.{suffix}", "properties": {"lang": "p"}, **said})
    catalog = index_recipe(load_recipe(job), tmp_path)
    source = catalog.sources["s"]
    assert [file.num_rows for file in source.files] == [0] * 5 + [80] + [0] * 5
    properties = read_manifest(catalog.directory).properties["s"]
    rows = PropertyRows(catalog.directory, source, properties, {}).whole(["lang"])
    assert rows["lang"].to_pylist() == held["p"]
    given = run_job(job, Topology(), one_pass=True)[0].microbatches
    num_tokens = sum(int((one.source_index >= 0).sum()) for one in given if one.source_index is not None)
    assert num_tokens == source.num_tokens > 0


def test_they_are_counted_in_a_source_of_images(tmp_path: Path) -> None:
    said = write_source(tmp_path, "s", "struct", [make_rows(1, 6)], "dynamic")
    for number, type_ in enumerate(TYPES.values()):
        names = ["text", "picture"] if type_ else ["x"]
        empty = pa.table({name: pa.array([], type_ or pa.int8()) for name in names})
        for place in ("!", "z"):
            pq.write_table(empty, tmp_path / "s" / f"{place}{number}.parquet")
    source = index_recipe(load_recipe(job_of(tmp_path, said)), tmp_path).sources["s"]
    assert [file.num_rows for file in source.files] == [0] * 5 + [6] + [0] * 5
    assert len(source.sizes.items["image"].offset) > 0


@pytest.mark.parametrize("kind", ["text", "tokens", "json"])
def test_rows_of_a_column_without_a_type_are_refused_by_name(tmp_path: Path, kind: Any) -> None:
    table = pa.table({"v": pa.nulls(3), "w": ["a", "b", "c"]})
    pq.write_table(table, tmp_path / "a.parquet")
    write_file(table, tmp_path / "a.arrow")
    for source, name in ((ParquetSource, "a.parquet"), (ArrowSource, "a.arrow")):
        one = source(name="s", column="v", kind=kind)
        for look in (one.check, one.scan):
            with pytest.raises(SourceUnreadable, match=rf"{name}: column 'v' has no value in the whole file.*leave"):
                look(tmp_path / name)
        with pytest.raises(SourceUnreadable, match="no column 'u'"):
            source(name="s", column="u", kind=kind).scan(tmp_path / name)


def test_init_looks_at_a_file_with_rows(tmp_path: Path) -> None:
    """The first file has text in another column than the one that has rows."""
    pq.write_table(pa.table({"text": pa.nulls(0), "url": pa.array([], pa.string())}), tmp_path / "part-0.parquet")
    pq.write_table(pa.table({"text": ["a text"] * 9}), tmp_path / "part-1.parquet")
    recipe = tmp_path / "recipe.yaml"
    assert main(["init", str(tmp_path), "--out", str(recipe), "--tokenizer", "bytes"]) == 0
    assert [one.text for one in load_recipe(recipe).sources.values()] == ["text"]
