"""The most bytes of lists beside ids, of a row and over its tokens."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from torchmix.catalog.manifest import ListBytes, most_lists
from torchmix.formats.column import ROW_BYTES, see_lists


def lists(dtype: pa.DataType, *lengths: int | None) -> pa.Array:
    rows = [None if length is None else [1] * length for length in lengths]
    return pa.array(rows, pa.large_list(dtype))


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(pa.uint8(), 1), (pa.uint16(), 4), (pa.uint32(), 8), (pa.uint64(), 8), (pa.int16(), 2), (pa.float32(), 4)],
    ids=str,
)
def test_a_number_counts_as_a_step_holds_it(dtype: pa.DataType, size: int) -> None:
    seen = see_lists({"raw": lists(dtype, 5, 100, None)}, np.array([5, 1000, 3]))
    assert seen == ListBytes(of_row=100 * size + ROW_BYTES, of_token=max(-(-(5 * size + ROW_BYTES) // 5), 6))


def test_all_lists_of_a_row_count_together_and_rows_without_tokens_are_in_no_step() -> None:
    both = {"raw": lists(pa.uint8(), 40, 7, 900), "weights": lists(pa.float64(), 3, 1, 0)}
    assert see_lists(both, np.array([10, 1, 0])) == ListBytes(of_row=40 + 24 + 2 * ROW_BYTES, of_token=47)
    assert see_lists(both, np.array([0, 0, 0])) is None
    assert see_lists({}, np.array([1, 2])) is None


def test_of_several_parts_the_most_of_each() -> None:
    assert most_lists([ListBytes(7, 2), None, ListBytes(3, 5)]) == ListBytes(7, 5)
    assert most_lists([None]) is None
