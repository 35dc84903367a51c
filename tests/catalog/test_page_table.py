from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.support.parts import make_table
from torchmix.catalog.page_table import PageTable, join_tables
from torchmix.errors import CatalogError

SHAPES = [[[3, 1], [2]], [[5]], [], [[1, 1, 1], [4, 2]]]


def assert_equal(left: PageTable, right: PageTable) -> None:
    for (name, a), (_, b) in zip(left.arrays(), right.arrays(), strict=True):
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_joined_files_count_rows_chunks_and_files_over_all_of_them():
    table = join_tables([make_table(shape) for shape in SHAPES])
    table.check()
    assert table.first_row.tolist() == [0, 3, 4, 6, 11, 12, 13, 14, 18, 20]
    assert table.chunk_of_page.tolist() == [0, 0, 1, 2, 3, 3, 3, 4, 4]
    assert table.file_of_chunk.tolist() == [0, 0, 1, 3, 3]
    assert table.file_of_chunk[table.chunk_of_page].tolist() == [0, 0, 0, 1, 3, 3, 3, 3, 3]


def test_each_file_comes_out_of_the_joined_table_as_it_went_in():
    tables = [make_table(shape) for shape in SHAPES]
    joined = join_tables(tables)
    for file, table in enumerate(tables):
        assert_equal(joined.of_file(file), table)


def test_the_page_of_a_row_is_the_one_that_holds_it_also_after_an_empty_page():
    table = dataclasses.replace(make_table([[2, 1, 1]]), first_row=np.array([0, 2, 2, 4]))
    assert table.page_of_rows(np.array([3, 0, 1, 2])).tolist() == [2, 0, 0, 2]


def test_arrays_of_a_joined_table_keep_the_dtypes_of_the_format():
    dtypes = {name: array.dtype.str for name, array in join_tables([make_table(shape) for shape in SHAPES]).arrays()}
    wide = dict.fromkeys(["offset", "num_bytes", "first_row", "dict_offset", "dict_bytes"], "<i8")
    assert dtypes == {"chunk_of_page": "<i4", "file_of_chunk": "<i4", "codec": "|i1", **wide}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("offset", np.array([4, 5]), "lengths"),
        ("chunk_of_page", np.array([0, 1, 0], np.int32), "chunk_of_page"),
        ("chunk_of_page", np.array([0, 0, 2], np.int32), "chunk 2, there are 2"),
        ("first_row", np.array([1, 3, 4, 6]), "row 1, not 0"),
        ("first_row", np.array([0, 3, 2, 6]), "first_row"),
        ("num_bytes", np.array([1, 0, 1]), "0 bytes"),
        ("dict_bytes", np.array([9, 0]), "dictionary"),
    ],
)
def test_a_broken_table_is_refused(field, value, says):
    table = make_table([[3, 1], [2]])
    table.check()
    with pytest.raises(CatalogError, match=says):
        dataclasses.replace(table, **{field: value}).check()
