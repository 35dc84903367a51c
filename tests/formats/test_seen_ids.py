from __future__ import annotations

import numpy as np
import pytest

from torchmix.catalog.manifest import MOST_ID, IdRange
from torchmix.formats.source import OutsideId, SeenIds, join_seen, see_ids


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_the_smallest_and_the_largest_of_any_width(dtype):
    values = np.array([7, 3, 100, 5], dtype)
    assert see_ids(values, np.array([0, 2, 4]), 0) == SeenIds(IdRange(3, 100), None)
    assert see_ids(values[:0], np.array([0, 0]), 0) is None


@pytest.mark.parametrize(
    ("values", "dtype", "row", "token"),
    [
        ([1, 2, -1, -5], "int64", 12, -1),
        ([1, MOST_ID, 2, MOST_ID + 1], "int64", 14, MOST_ID + 1),
        ([1, 2**40, -3, 4], "int64", 10, 2**40),
        ([-128, 2, 3, 4], "int8", 10, -128),
        ([1, 2, 3, 2**32 - 1], "uint32", 14, 2**32 - 1),
        ([1, 2, 2**64 - 1, 3], "uint64", 12, 2**64 - 1),
    ],
)
def test_the_first_id_that_no_model_has_is_told_with_its_row(values, dtype, row, token):
    """Rows 11 and 13 are empty: an id is of the row that holds it, not of one that begins at the same place."""
    seen = see_ids(np.array(values, dtype), np.array([0, 2, 2, 3, 3, 4]), 10)
    assert seen is not None and seen.outside == OutsideId(row, token)
    assert seen.range == IdRange(min(values), max(values))


def test_parts_of_a_file_are_joined_in_the_order_of_rows():
    parts = [
        None,
        SeenIds(IdRange(5, 9), None),
        SeenIds(IdRange(-2, 3), OutsideId(4, -2)),
        SeenIds(IdRange(-7, 100), OutsideId(9, -7)),
    ]
    assert join_seen(parts) == SeenIds(IdRange(-7, 100), OutsideId(4, -2))
    assert join_seen([None, None]) is None
