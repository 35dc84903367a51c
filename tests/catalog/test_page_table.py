from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.support.file_indexes import make_table
from torchmix.catalog.page_table import PageTable, join_tables
from torchmix.errors import CatalogError

SHAPES = [[[3, 1], [2]], [[5]], [], [[1, 1, 1], [4, 2]]]


def assert_equal(left: PageTable, right: PageTable) -> None:
    for (name, a), (_, b) in zip(left.arrays(), right.arrays(), strict=True):
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)


def with_tails(table: PageTable, tails: list[int]) -> PageTable:
    return dataclasses.replace(table, tail_bytes=np.array(tails, np.uint32))


def test_joined_files_count_rows_chunks_and_files_over_all_of_them():
    table = join_tables([make_table(shape) for shape in SHAPES])
    table.check()
    assert table.first_row.tolist() == [0, 3, 4, 6, 11, 12, 13, 14, 18, 20]
    place = table.place(np.arange(9))
    assert place.chunk.tolist() == [0, 0, 1, 2, 3, 3, 3, 4, 4]
    assert place.num_rows.tolist() == [3, 1, 2, 5, 1, 1, 1, 4, 2]
    assert place.num_bytes.tolist() == [103, 101, 102, 105, 101, 101, 101, 104, 102]
    assert place.offset.tolist() == [4, 107, 208, 4, 4, 105, 206, 307, 411]
    assert table.file_of_chunk[place.chunk].tolist() == [0, 0, 0, 1, 3, 3, 3, 3, 3]


def test_each_file_comes_out_of_the_joined_table_as_it_went_in():
    tables = [make_table(shape) for shape in SHAPES]
    tables[3] = with_tails(tables[3], [101, 0, 9, 100, 0])
    joined = join_tables(tables)
    joined.check()
    assert joined.tail_bytes.tolist() == [0, 0, 0, 0, 101, 0, 9, 100, 0]
    for file, table in enumerate(tables):
        assert_equal(joined.of_file(file), table)


def test_a_page_begins_inside_a_row_where_the_one_before_has_a_tail():
    place = with_tails(make_table([[3, 1], [2, 7]]), [5, 0, 9, 0]).place(np.array([0, 1, 2, 3]))
    assert place.begins_inside_row.tolist() == [False, True, False, True]
    assert place.tail_bytes.tolist() == [5, 0, 9, 0]


def test_checksums_stay_with_their_pages_and_chunks_and_a_file_without_has_zeros():
    tables = [make_table(shape) for shape in SHAPES]
    tables[0] = dataclasses.replace(
        tables[0], page_crc=np.array([7, 8, 9], np.uint32), companion_crc=np.array([5, 6], np.uint32)
    )
    joined = join_tables(tables)
    joined.check()
    assert joined.page_crc.tolist() == [7, 8, 9, 0, 0, 0, 0, 0, 0]
    assert joined.companion_crc.tolist() == [5, 6, 0, 0, 0]
    for file, table in enumerate(tables):
        assert_equal(joined.of_file(file), table)


def test_the_page_of_a_row_is_the_one_that_holds_it_also_after_an_empty_page():
    table = make_table([[2, 0, 2], [1]])
    assert table.page_of_rows(np.array([3, 0, 1, 2, 4])).tolist() == [2, 0, 0, 2, 3]


def test_arrays_of_a_joined_table_keep_the_dtypes_of_the_format():
    dtypes = {name: array.dtype.str for name, array in join_tables([make_table(shape) for shape in SHAPES]).arrays()}
    wide = ["chunk_page", "chunk_row", "chunk_offset", "chunk_bytes", "companion_offset", "companion_bytes"]
    narrow = dict.fromkeys(["page_start", "page_row", "tail_bytes", "page_crc", "companion_crc"], "<u4")
    assert dtypes == {"file_of_chunk": "<i4", "kind": "|i1", **narrow, **dict.fromkeys(wide, "<i8")}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("page_row", [0, 3, 0], "lengths"),
        ("tail_bytes", [1], "lengths"),
        ("page_crc", [1, 2], "lengths"),
        ("companion_crc", [1, 2, 3], "lengths"),
        ("chunk_page", [0, 0, 3], "chunk_page"),
        ("chunk_page", [0, 2, 4], "at page 4 of 3"),
        ("chunk_row", [0, 5, 4], "chunk_row"),
        ("chunk_row", [1, 4, 6], "row 1"),
        ("page_row", [0, 5, 0, 0], "-1 rows"),
        ("page_row", [0, 3, 1, 0], "first page of a chunk"),
        ("page_start", [0, 0, 0, 0], "0 bytes"),
        ("chunk_bytes", [204, 0], "0 bytes"),
        ("chunk_offset", [-1, 204], "byte -1"),
        ("file_of_chunk", [1, 0], "file_of_chunk"),
        ("companion_bytes", [9, 0], "companion"),
        ("tail_bytes", [0, 0, 4], "the last page has a tail"),
        ("tail_bytes", [102, 0, 0], "tail of page 0"),
    ],
)
def test_a_broken_table_is_refused(field, value, says):
    table = make_table([[3, 1], [2]])
    table.check()
    with pytest.raises(CatalogError, match=says):
        dataclasses.replace(table, **{field: np.array(value, getattr(table, field).dtype)}).check()
