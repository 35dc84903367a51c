"""Footers of files that pyarrow wrote, against what pyarrow reads in them; and files that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.files import make_tokens_file, random_tokens, write_file
from torchmix.errors import SourceUnreadable
from torchmix.formats.parquet import thrift
from torchmix.formats.parquet.footer import Chunk, Footer, Leaf, read_column, read_footer
from torchmix.storage.random_access import LocalFile

CODEC_NUMBERS = {"none": 0, "snappy": 1, "gzip": 2, "brotli": 4, "zstd": 6, "lz4": 7}


def footer_of(path: Path) -> Footer:
    file = LocalFile(path)
    try:
        return read_footer(file)
    finally:
        file.close()


def column_of(path: Path, leaf: int) -> tuple[Leaf, list[Chunk]]:
    return read_column(footer_of(path), leaf)


@pytest.mark.parametrize("codec", CODEC_NUMBERS)
@pytest.mark.parametrize("dictionary", [False, True])
def test_chunks_are_as_pyarrow_reads_them(tmp_path: Path, codec: str, dictionary: bool) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(1, 900), codec=codec, dictionary=dictionary)
    leaf, chunks = column_of(path, 1)
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


def test_every_leaf_is_found_with_its_path_alone(tmp_path: Path) -> None:
    table = pa.table(
        {
            "first": [{"a": 1, "b": [{"c": 2.0, "d": "x"}]}],
            "tokens": [[1, 2]],
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "deep": [[[1]]],
            "text": ["x"],
        }
    )
    path = write_file(tmp_path / "a.parquet", table, page_index=False)
    metadata = pq.read_metadata(path)
    lists = {"tokens": 1, "map": 1, "deep": 2, "text": 0, "first": 1}
    for index in range(metadata.num_columns):
        leaf, [chunk] = column_of(path, index)
        names, known = [], metadata.row_group(0).column(index)
        for element in leaf.elements:
            fields, _ = thrift.read_struct(element)
            names.append(fields[4].decode())
            assert fields.get(5, 0) == (element is not leaf.elements[-1])
        assert ".".join(names) == known.path_in_schema
        assert leaf.num_lists == (lists[names[0]] if names != ["first", "a"] else 0)
        assert leaf.is_list == (leaf.num_lists > 0)
        assert (chunk.index_offset, chunk.num_bytes) == (-1, known.total_compressed_size)
    with pytest.raises(SourceUnreadable, match="damaged footer"):
        column_of(path, metadata.num_columns)


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
    with pytest.raises(SourceUnreadable, match=f"^.*{says}"):
        footer_of(path)


def test_a_chunk_beyond_the_end_of_the_file_is_refused(tmp_path: Path) -> None:
    path = make_tokens_file(tmp_path / "a.parquet", random_tokens(3, 500))
    footer = footer_of(path)
    cut = Footer(num_bytes=1000, metadata=footer.metadata, digest=footer.digest)
    with pytest.raises(SourceUnreadable, match=r"but the file has 1000"):
        read_column(cut, 1)


def test_a_damaged_footer_reads_or_is_refused(tmp_path: Path) -> None:
    footer = footer_of(make_tokens_file(tmp_path / "a.parquet", random_tokens(4, 500), store_schema=False))
    rng = np.random.default_rng(5)
    num_refused = 0
    for place in range(len(footer.metadata)):
        metadata = bytearray(footer.metadata)
        metadata[place] = rng.integers(256)
        try:
            read_column(Footer(num_bytes=footer.num_bytes, metadata=bytes(metadata), digest=""), 1)
        except SourceUnreadable:
            num_refused += 1
    assert 0 < num_refused < len(footer.metadata)
