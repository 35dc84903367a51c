"""Footers of files that pyarrow wrote, against what pyarrow reads in them; and files that are none."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.files import make_tokens_file, random_tokens, write_file
from torchmix.errors import SourceUnreadable
from torchmix.sources.parquet_footer import Chunk, Footer, Leaf, read_column, read_footer

CODEC_NUMBERS = {"none": 0, "snappy": 1, "gzip": 2, "brotli": 4, "zstd": 6, "lz4": 7}


def footer_of(path: Path) -> Footer:
    file_descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_footer(file_descriptor, "here")
    finally:
        os.close(file_descriptor)


def column_of(path: Path, column: str) -> tuple[Leaf, list[Chunk]]:
    return read_column(footer_of(path), column, "here")


@pytest.mark.parametrize("codec", CODEC_NUMBERS)
@pytest.mark.parametrize("dictionary", [False, True])
def test_chunks_are_as_pyarrow_reads_them(tmp_path: Path, codec: str, dictionary: bool) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(1, 900), codec=codec, dictionary=dictionary)
    leaf, chunks = column_of(path, "input_ids")
    metadata = pq.read_metadata(path)
    assert leaf.index == 1
    assert leaf.is_list
    assert len(chunks) == metadata.num_row_groups == 3
    for g, chunk in enumerate(chunks):
        known = metadata.row_group(g).column(leaf.index)
        assert chunk.num_rows == metadata.row_group(g).num_rows
        assert chunk.num_values == known.num_values
        assert chunk.codec == CODEC_NUMBERS[codec]
        assert chunk.start == (known.dictionary_page_offset if dictionary else known.data_page_offset)
        assert chunk.num_bytes == known.total_compressed_size
        assert chunk.decoded_bytes == known.total_uncompressed_size
        assert known.has_offset_index
        assert chunk.index_offset > 0
        assert chunk.index_bytes > 0


def test_columns_after_nested_ones_are_found(tmp_path: Path) -> None:
    table = pa.table(
        {
            "first": [{"a": 1, "b": [{"c": 2.0, "d": "x"}]}],
            "tokens": [[1, 2]],
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "text": ["x"],
        }
    )
    path = write_file(tmp_path / "a.parquet", table, page_index=False)
    assert pq.read_metadata(path).schema.column(3).path == "tokens.list.element"
    tokens, _ = column_of(path, "tokens")
    text, chunks = column_of(path, "text")
    assert (tokens.index, tokens.is_list) == (3, True)
    assert (text.index, text.is_list) == (6, False)
    assert chunks[0].index_offset == -1
    for column in ("first", "map"):
        with pytest.raises(SourceUnreadable, match="nested deeper"):
            column_of(path, column)


def test_lists_of_lists_are_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.parquet", pa.table({"deep": [[[1]]]}))
    with pytest.raises(SourceUnreadable, match="nested deeper than one list"):
        column_of(path, "deep")


def test_the_digest_tells_files_apart_by_their_footer(tmp_path: Path) -> None:
    documents = random_tokens(2, 300)
    one = footer_of(make_tokens_file(tmp_path / "one.parquet", documents))
    same = footer_of(make_tokens_file(tmp_path / "same.parquet", documents))
    other = footer_of(make_tokens_file(tmp_path / "other.parquet", [*documents[:-1], [5]]))
    assert one == same
    assert one.digest != other.digest
    assert len(one.digest) == 32
    assert one.num_bytes == (tmp_path / "one.parquet").stat().st_size


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes"),
        (b"PAR1", "not a whole Parquet file"),
        (b"PAR1PAR1", "not a whole Parquet file"),
        (b'{"text": "a line of JSON"}\n' * 10, "not a whole Parquet file"),
        (b"PAR1" + b"x" * 50 + (1000).to_bytes(4, "little") + b"PAR1", "1000 bytes, more than"),
        (b"PARE" + b"x" * 50 + (10).to_bytes(4, "little") + b"PARE", "encrypted"),
    ],
)
def test_a_file_that_is_not_parquet_says_so(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(SourceUnreadable, match=f"^here: .*{says}"):
        footer_of(path)


def test_a_chunk_beyond_the_end_of_the_file_is_refused(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(3, 500))
    footer = footer_of(path)
    cut = Footer(num_bytes=1000, metadata=footer.metadata, digest=footer.digest)
    with pytest.raises(SourceUnreadable, match=r"but the file has 1000"):
        read_column(cut, "input_ids", "here")


def test_a_damaged_footer_reads_or_is_refused(tmp_path: Path) -> None:
    footer = footer_of(make_tokens_file(tmp_path / "a.parquet", random_tokens(4, 500), store_schema=False))
    rng = np.random.default_rng(5)
    num_refused = 0
    for place in range(len(footer.metadata)):
        metadata = bytearray(footer.metadata)
        metadata[place] = rng.integers(256)
        try:
            read_column(Footer(num_bytes=footer.num_bytes, metadata=bytes(metadata), digest=""), "input_ids", "here")
        except SourceUnreadable:
            num_refused += 1
    assert 0 < num_refused < len(footer.metadata)
