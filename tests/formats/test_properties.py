"""Other columns of files of every format: a row for each document, in the order of the scan."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.indexed_datasets import write_dataset
from torchmix.errors import SourceUnreadable
from torchmix.formats.arrow.source import ArrowSource
from torchmix.formats.jsonl.source import JsonLinesSource
from torchmix.formats.megatron.source import IndexedSource
from torchmix.formats.parquet.source import ParquetSource

ROWS = 500
TEXTS = [None if i % 7 == 3 else "x" * (i % 40) for i in range(ROWS)]
PROPERTIES = {
    "lang": [None if i % 11 == 5 else ("de" if i % 3 else "en") for i in range(ROWS)],
    "quality": [i / ROWS for i in range(ROWS)],
    "tags": [[str(i % 4)] * (i % 3) for i in range(ROWS)],
}
TABLE = pa.table({"text": TEXTS, **PROPERTIES})


def parquet(folder: Path) -> tuple[ParquetSource, Path]:
    path = folder / "a.parquet"
    pq.write_table(TABLE, path, row_group_size=130, data_page_size=200)
    return ParquetSource(name="web", column="text", kind="text"), path


def feather(folder: Path) -> tuple[ArrowSource, Path]:
    path = folder / "a.arrow"
    with pa.ipc.new_file(str(path), TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=90)
    return ArrowSource(name="web", column="text", kind="text"), path


def stream(folder: Path) -> tuple[ArrowSource, Path]:
    path = folder / "b.arrow"
    with pa.ipc.new_stream(str(path), TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=90)
    return ArrowSource(name="web", column="text", kind="text"), path


def lines(folder: Path) -> tuple[JsonLinesSource, Path]:
    path = folder / "a.jsonl"
    rows = (json.dumps({name: TABLE[name][i].as_py() for name in TABLE.column_names}) for i in range(ROWS))
    path.write_text("\ufeff" + "\n\n".join(rows), encoding="utf-8")
    return JsonLinesSource(name="web", column="text", kind="text"), path


def compressed(folder: Path) -> tuple[JsonLinesSource, Path]:
    source, plain = lines(folder)
    path = folder / "a.jsonl.gz"
    with pa.CompressedOutputStream(str(path), "gzip") as file:
        file.write(plain.read_bytes())
    return source, path


@pytest.mark.parametrize("make", [parquet, feather, stream, lines, compressed])
def test_properties_have_the_rows_of_the_scan(make, tmp_path: Path) -> None:
    source, path = make(tmp_path)
    found = source.properties(path, ["tags", "quality", "lang"])
    assert found.column_names == ["tags", "quality", "lang"] and len(found) == source.scan(path).num_rows
    assert {name: found[name].to_pylist() for name in PROPERTIES} == PROPERTIES


@pytest.mark.parametrize("make", [parquet, feather, lines])
def test_a_column_that_is_not_there_is_named(make, tmp_path: Path) -> None:
    source, path = make(tmp_path)
    with pytest.raises(SourceUnreadable, match=r"source 'web': .*'langs'"):
        source.properties(path, ["langs"])
    with pytest.raises(SourceUnreadable, match="web"):
        source.properties(tmp_path / "none", ["lang"])


def test_lines_may_lack_a_key_and_mix_types(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    values = [1, 2.5, None, 4]
    rows = [{"text": "a", "n": value, "mixed": mixed} for value, mixed in zip(values, [1, "b", [3], None], strict=True)]
    path.write_text("\n".join([json.dumps(row) for row in rows] + ['{"text": "b"}', "{broken"]))
    found = JsonLinesSource(name="web", column="text", kind="text").properties(path, ["n", "mixed"])
    assert found["n"].to_pylist() == [1.0, 2.5, None, 4.0, None, None]
    assert found["mixed"].to_pylist() == ["1", "b", "[3]", None, None, None]


def test_a_dataset_of_megatrons_has_none(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "a", [[1, 2]])
    with pytest.raises(SourceUnreadable, match="no columns, so no property 'lang'; join"):
        IndexedSource(name="web").properties(path, ["lang"])
