"""Files as other writers make them, and columns of any nesting: all that pyarrow reads whole, read by page."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.nested_columns import random_type, random_value
from tests.support.split_rows import CODEC_NUMBERS, make_split_file
from tests.support.whole_files import assert_reads_as_a_whole, columns_of_file
from torchmix.formats.parquet.source import ParquetSource

FILES = sorted((Path(__file__).parents[1] / "files").glob("*.parquet"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_of_other_writers_read_as_pyarrow_reads_them(path: Path) -> None:
    few = {"fastparquet": 3, "pyarrow-12": 2, "pyarrow-17": 2}
    assert assert_reads_as_a_whole(path) >= few.get(path.stem, 9)


@pytest.mark.parametrize(("name", "are_split"), [("pyarrow-12", True), ("pyarrow-17", True), ("spark-legacy", False)])
def test_rows_of_old_pyarrow_are_split_over_pages(name: str, are_split: bool) -> None:
    [path] = [path for path in FILES if path.stem == name]
    for column in ("ids", "deep"):
        scan = ParquetSource(name="s", column=column, kind="tokens").scan(path)
        assert (scan.split_pages > 0) == are_split
        assert scan.tail_bytes is not None and scan.tail_bytes.any() == are_split


@pytest.mark.parametrize("seed", range(30))
def test_columns_of_any_nesting_read_as_pyarrow_reads_them(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    type, nullable = random_type(rng), rng.random() < 0.7
    rows = [random_value(rng, type, nullable) for _ in range(rng.choice((1, 60, 300)))]
    table = pa.table([pa.array(rows, type)], pa.schema([pa.field("c", type, nullable=nullable)]))
    path = tmp_path / "a.parquet"
    pq.write_table(
        table,
        path,
        row_group_size=rng.choice((37, 1000)),
        data_page_size=rng.choice((60, 400)),
        write_batch_size=rng.choice((1, 16)),
        data_page_version=rng.choice(("1.0", "2.0")),
        write_page_index=rng.random() < 0.5,
        use_dictionary=rng.random() < 0.5,
        compression=rng.choice(("none", "snappy", "zstd", "lz4")),
        store_schema=rng.random() < 0.5,
        use_compliant_nested_type=rng.random() < 0.5,
    )
    assert assert_reads_as_a_whole(path) in (1, 2)  # a text beside the tokens, if it is in no list


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_split_rows_of_any_nesting_codec_and_encoding_read_as_pyarrow_reads_them(tmp_path: Path, seed: int) -> None:
    rng = random.Random(1000 + seed)
    type = random_type(rng, plain=True)
    path = make_split_file(
        tmp_path / "a.parquet",
        [random_value(rng, type) for _ in range(rng.choice((1, 30, 150)))],
        page_values=rng.choice((1, 2, 5, 17, 100)),
        page_version=rng.choice((1, 2)),
        type=type,
        codec=rng.choice(list(CODEC_NUMBERS)),
        dictionary=rng.random() < 0.5,
        column="c",
    )
    assert assert_reads_as_a_whole(path) == 1
    assert len(columns_of_file(path)) == 1
