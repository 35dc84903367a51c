"""Pages by the index and by their headers: the two must agree, and tile the chunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from tests.support.files import flip_byte, make_text_file, make_tokens_file, random_texts, random_tokens, write_file
from torchmix.errors import CorruptPage
from torchmix.formats.parquet.footer import Chunk, Leaf, find_pages, read_column, read_footer, read_page_header
from torchmix.storage.random_access import LocalFile


@contextmanager
def opened(path: Path, column: str) -> Iterator[tuple[int, Leaf, list[Chunk]]]:
    file = LocalFile(path)
    try:
        leaf = pq.read_schema(path).names.index(column)  # no column before it is nested
        yield file, *read_column(read_footer(file), leaf)
    finally:
        file.close()


@pytest.mark.parametrize("page_version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_index_and_headers_tell_the_same_pages(tmp_path: Path, page_version: str, dictionary: bool, kind: str) -> None:
    path = tmp_path / "a.parquet"
    if kind == "tokens":
        make_tokens_file(path, random_tokens(1, 900), page_version=page_version, dictionary=dictionary)
    else:
        make_text_file(path, random_texts(1, 900), page_version=page_version, dictionary=dictionary, page_bytes=200)
    column = "input_ids" if kind == "tokens" else "text"
    metadata = pq.read_metadata(path)
    with opened(path, column) as (file, leaf, chunks):
        for g, chunk in enumerate(chunks):
            by_index = find_pages(file, chunk, leaf)
            by_headers = find_pages(file, chunk, leaf, use_index=False)
            np.testing.assert_array_equal(by_index.offset, by_headers.offset)
            np.testing.assert_array_equal(by_index.num_bytes, by_headers.num_bytes)
            assert len(by_index.offset) >= 3
            assert by_index.rows is not None
            assert by_headers.values is not None
            assert by_index.rows.sum() == chunk.num_rows
            assert by_headers.values.sum() == chunk.num_values
            if kind == "tokens" and page_version == "1.0":
                assert by_headers.rows is None
            else:
                np.testing.assert_array_equal(by_headers.rows, by_index.rows)
            known = metadata.row_group(g).column(leaf.index)
            assert (by_index.dict_offset >= 0) == dictionary
            assert by_index.dict_offset == (known.dictionary_page_offset or -1)
            assert by_index.dict_bytes == by_headers.dict_bytes
            # dictionary and data pages fill the chunk without a gap
            assert by_index.offset[0] == known.data_page_offset == chunk.start + by_index.dict_bytes
            np.testing.assert_array_equal(by_index.offset[:-1] + by_index.num_bytes[:-1], by_index.offset[1:])
            assert by_index.offset[-1] + by_index.num_bytes[-1] == chunk.start + chunk.num_bytes


def test_headers_longer_than_the_first_read_are_read_whole(tmp_path: Path) -> None:
    texts = [f"{i}" + "x" * 3000 for i in range(40)]  # statistics hold the least and the greatest
    path = make_text_file(tmp_path / "a.parquet", texts, page_index=False, codec="none")
    with opened(path, "text") as (file, leaf, [chunk]):
        pages = find_pages(file, chunk, leaf)
        header = read_page_header(path.read_bytes(), int(pages.offset[0]))
        assert header.body - pages.offset[0] > 6000
        assert pages.rows is not None
        assert pages.rows.sum() == len(texts)


def test_an_empty_row_group_has_no_pages(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["a", "b"]})
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.write_table(table[:0])
        writer.write_table(table)
    with opened(path, "text") as (file, leaf, chunks):
        rows = [find_pages(file, chunk, leaf).rows for chunk in chunks]
        assert [part.tolist() for part in rows if part is not None] == [[2], [], [2]]


def test_a_damaged_index_gives_way_to_the_headers(tmp_path: Path) -> None:
    path = make_text_file(tmp_path / "a.parquet", random_texts(2, 300), page_bytes=200)
    with opened(path, "text") as (file, leaf, [chunk]):
        sound = find_pages(file, chunk, leaf)
        assert sound.values is None
        for place in range(chunk.index_offset, chunk.index_offset + chunk.index_bytes, 7):
            flip_byte(path, place)
            pages = find_pages(file, chunk, leaf)
            if pages.values is not None:  # else the index is wrong but possible: found when its pages are decoded
                np.testing.assert_array_equal(pages.offset, sound.offset)
                np.testing.assert_array_equal(pages.rows, sound.rows)
            flip_byte(path, place)
        flip_byte(path, chunk.index_offset)
        assert find_pages(file, chunk, leaf).values is not None


def test_a_damaged_header_is_named_with_its_place(tmp_path: Path) -> None:
    path = make_text_file(tmp_path / "a.parquet", random_texts(3, 300), page_bytes=200, page_index=False)
    with opened(path, "text") as (file, leaf, [chunk]):
        third = int(find_pages(file, chunk, leaf).offset[2])
        flip_byte(path, third)
        with pytest.raises(CorruptPage, match=f"^no page header at byte {third},"):
            find_pages(file, chunk, leaf)


def test_a_page_that_leaves_its_chunk_is_refused(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * 100] * 8})
    path = write_file(tmp_path / "a.parquet", table, codec="none", page_index=False)
    with opened(path, "text") as (file, leaf, [chunk]):
        short = replace(chunk, num_bytes=chunk.num_bytes - 1)
        with pytest.raises(CorruptPage, match="exceeds its column chunk"):
            find_pages(file, short, leaf)
        cut = replace(chunk, num_bytes=4)
        with pytest.raises(CorruptPage, match="no page header"):
            find_pages(file, cut, leaf)
