"""Pages of lists without their levels: where that way is open, it gives what pyarrow gives; else nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.pages import page_runs
from tests.support.split_rows import make_split_file
from torchmix.formats.parquet.footer import read_page_header
from torchmix.formats.parquet.source import ParquetSource
from torchmix.formats.parquet.values import ExpectedRows, UnusualLevels, decode_values
from torchmix.formats.source import PageRun

TOKENS = ParquetSource(name="web", column="input_ids", kind="tokens")


def values_of(path: Path, *, most_pages: int = 1) -> list[list[int]]:
    """Tokens of each run, which must all be read in this way: alone, together, and as bytes that were compared."""
    runs = [run for run in page_runs(path, TOKENS.scan(path), most_pages=most_pages) if run.tokens.any()]
    found = [tokens_of(run) for run in runs]
    as_indexed = [replace(run, is_as_indexed=True) for run in runs]
    assert as_lists(decode_values(runs)) == as_lists(decode_values(as_indexed)) == found
    return found


def tokens_of(run: PageRun) -> list[int]:
    values = alone(run)
    assert values is not None
    return values.tolist()


def as_lists(found: list[Any]) -> list[Any]:
    return [None if values is None else values.tolist() for values in found]


def alone(run: PageRun) -> Any:
    [values] = decode_values([run])
    return values


def whole(path: Path) -> list[int]:
    rows = pq.read_table(path).column("input_ids").to_pylist()
    return [token for row in rows for token in row or []]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip", "lz4", "brotli"])
@pytest.mark.parametrize("page_version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("most_pages", [1, 4])
def test_values_are_those_of_the_file(
    tmp_path: Path, codec: str, page_version: str, dictionary: bool, most_pages: int
) -> None:
    documents = random_tokens(1, 400)
    path = make_tokens_file(
        tmp_path / "a.parquet", documents, codec=codec, page_version=page_version, dictionary=dictionary, checksums=True
    )
    parts = values_of(path, most_pages=most_pages)
    assert len(parts) > 2
    assert [token for part in parts for token in part] == whole(path)


@pytest.mark.parametrize("encoding", ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"])
@pytest.mark.parametrize("type", [pa.uint8(), pa.int16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()])
def test_values_of_any_type_and_encoding(tmp_path: Path, encoding: str, type: pa.DataType) -> None:
    documents = [np.random.default_rng(i).integers(0, 200, 3 + 40 * i).tolist() for i in range(60)]
    table = pa.table({"input_ids": pa.array(documents, pa.list_(type))})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, use_dictionary=False, column_encoding=encoding, data_page_size=2000)
    for run in page_runs(path, TOKENS.scan(path), most_pages=2):
        values = alone(run)
        assert values is not None
        assert values.dtype == type.to_pandas_dtype()
    assert [token for part in values_of(path) for token in part] == whole(path)


@pytest.mark.parametrize("fields", [(True, True), (True, False), (False, True), (False, False)])
def test_rows_that_may_be_null_or_empty(tmp_path: Path, fields: tuple[bool, bool]) -> None:
    list_may_be_null, token_may_be_null = fields
    rng = np.random.default_rng(2)
    lengths = [0, 0, 30, 0, 8, 7, 1, 0, *rng.integers(0, 60, 300).tolist(), 500, 0, 0]
    documents: list[Any] = [rng.integers(0, 99, length).tolist() for length in lengths]
    if list_may_be_null:
        documents = [None if i % 11 == 0 and not row else row for i, row in enumerate(documents)]
    item = pa.field("element", pa.int32(), nullable=token_may_be_null)
    schema = pa.schema([pa.field("input_ids", pa.list_(item), nullable=list_may_be_null)])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pydict({"input_ids": documents}, schema), path, data_page_size=500, write_batch_size=7)
    for most_pages in (1, 3, 1000):
        assert [token for part in values_of(path, most_pages=most_pages) for token in part] == whole(path)


@pytest.mark.parametrize("page_version", [1, 2])
@pytest.mark.parametrize("page_values", [7, 333, 5000])
def test_rows_split_over_pages(tmp_path: Path, page_values: int, page_version: int) -> None:
    path = make_split_file(
        tmp_path / "a.parquet", random_tokens(5, 120), page_values=page_values, page_version=page_version, codec="zstd"
    )
    for most_pages in (1, 3):
        assert [token for part in values_of(path, most_pages=most_pages) for token in part] == whole(path)


def test_the_dictionary_is_unpacked_once(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(1, 400), dictionary=True, codec="zstd")
    first, second, *_ = page_runs(path, TOKENS.scan(path))
    memo: dict[str, bytes] = {}
    expected = alone(replace(first, memo=memo))
    [unpacked] = memo.values()
    assert len(unpacked) > 0
    np.testing.assert_array_equal(expected, alone(replace(first, memo=memo, companion=b"no more needed")))
    np.testing.assert_array_equal(alone(second), alone(replace(second, memo=memo)))


def test_rows_of_other_lengths_are_not_given(tmp_path: Path) -> None:
    documents = [[5] * length for length in (40, 3, 20, 100, 17, 16, 15, 8, 0, 64)]
    path = make_tokens_file(tmp_path / "a.parquet", documents)
    [run] = page_runs(path, TOKENS.scan(path))
    assert alone(run) is not None
    assert run.tokens is not None
    for i in range(len(documents) - 1):
        for change in (1, -1):
            tokens = run.tokens.copy()
            tokens[i] += change
            tokens[i + 1] -= change
            if tokens.min() >= 0:
                assert alone(replace(run, tokens=tokens)) is None
    assert alone(replace(run, tokens=run.tokens[:-1], num_rows=run.num_rows - 1)) is None
    assert alone(replace(run, tokens=None)) is None


def test_rows_of_other_lengths_than_were_indexed_are_not_given_where_bytes_were_compared(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", [[5] * length for length in (40, 3, 0, 100, 17, 0, 64)])
    [run] = page_runs(path, TOKENS.scan(path))
    run = replace(run, is_as_indexed=True)
    assert run.tokens is not None and tokens_of(run) == [5] * 224
    assert alone(replace(run, tokens=run.tokens + 1)) is None
    assert alone(replace(run, tokens=run.tokens[:-1], num_rows=run.num_rows - 1)) is None
    assert alone(replace(run, tokens=run.tokens.clip(1))) is None


def test_a_damaged_run_does_not_spoil_those_that_are_decoded_with_it(tmp_path: Path) -> None:
    runs = []
    for name, type in (("a", pa.int32()), ("b", pa.uint16()), ("c", pa.int64())):
        table = pa.table({"input_ids": pa.array([list(range(i, i + 90)) for i in range(300)], pa.list_(type))})
        pq.write_table(table, tmp_path / name, data_page_size=4000, use_dictionary=name == "a", compression="none")
        runs += list(page_runs(tmp_path / name, TOKENS.scan(tmp_path / name)))[-4:]
    sound = as_lists(decode_values(runs))
    assert None not in sound
    header = read_page_header(runs[2].pages, 0)
    # Indices behind the end of the dictionary, and no header.
    short = runs[2].pages[: header.stop - 60] + b"\xff" * 60
    for i, damaged in ((2, replace(runs[2], pages=short, is_as_indexed=True)), (9, replace(runs[9], pages=b"\x15"))):
        found = as_lists(decode_values([*runs[:i], damaged, *runs[i + 1 :]]))
        assert found[i] is None
        assert found[:i] + found[i + 1 :] == sound[:i] + sound[i + 1 :]


def test_what_is_damaged_nested_or_text_is_left_to_pyarrow(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(1, 200), checksums=True, dictionary=True)
    run = next(page_runs(path, TOKENS.scan(path)))

    def flipped(content: Any, place: int) -> bytes:
        return bytes([*content[:place], content[place] ^ 0xFF, *content[place + 1 :]])

    assert alone(replace(run, pages=flipped(run.pages, len(run.pages) - 1))) is None
    assert alone(replace(run, companion=flipped(run.companion, len(run.companion) - 1))) is None
    assert alone(replace(run, pages=run.pages[:-1])) is None
    assert alone(replace(run, kind=3)) is None
    nested = pa.table({"input_ids": pa.array([[[1, 2], [3]], [[4]]], pa.list_(pa.list_(pa.int32())))})
    pq.write_table(nested, tmp_path / "b.parquet")
    [run] = page_runs(tmp_path / "b.parquet", TOKENS.scan(tmp_path / "b.parquet"))
    assert alone(run) is None
    texts = make_text_file(tmp_path / "c.parquet", random_texts(5, 30))
    text = ParquetSource(name="peps", column="text", kind="text")
    assert alone(next(page_runs(texts, text.scan(texts)))) is None


def test_a_damaged_byte_anywhere_gives_the_rows_that_pyarrow_gives_or_nothing(tmp_path: Path) -> None:
    """Without checksums: no other error, and never another number of tokens than the catalog's."""
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(3, 60), codec="none", page_bytes=4000)
    run = next(page_runs(path, TOKENS.scan(path)))
    assert run.tokens is not None
    for place in range(0, len(run.pages), 3):
        pages = bytearray(run.pages)
        pages[place] ^= 1 << place % 8
        values = alone(replace(run, pages=bytes(pages)))
        assert values is None or len(values) == run.tokens.sum()


@pytest.mark.parametrize("seed", range(5))
def test_expected_rows_only_save_time(tmp_path: Path, seed: int) -> None:
    """What is expected, right or wrong, does not change what is found."""
    rng = np.random.default_rng(seed)
    counts = rng.choice([1, 5, 15, 16, 17, 71, 72, 1000, 9000], 200)
    documents = [[1] * count for count in counts.tolist()]
    path = make_tokens_file(tmp_path / "a.parquet", documents, codec="none", page_bytes=1 << 30, row_group_rows=200)
    [run] = page_runs(path, TOKENS.scan(path))
    levels, num_levels = _repetition_levels(run), int(counts.sum())
    wrong = counts.copy()
    wrong[rng.integers(0, 200, 3)] += 1
    for expected in (None, ExpectedRows(counts), ExpectedRows(wrong), ExpectedRows(counts[:100])):
        found = UnusualLevels(most=1, usual=1, expected=expected)
        assert found.read(levels, 0, num_levels) == len(levels)
        np.testing.assert_array_equal(found.places(), np.cumsum(counts) - counts)
    with pytest.raises(ValueError, match=f"{num_levels} levels continue behind their {len(levels) - 1} bytes"):
        UnusualLevels(most=1, usual=1).read(levels[:-1], 0, num_levels)


def _repetition_levels(run: PageRun) -> bytes:
    header = read_page_header(run.pages, 0)
    size = int.from_bytes(run.pages[header.body : header.body + 4], "little")
    return bytes(run.pages[header.body + 4 : header.body + 4 + size])
