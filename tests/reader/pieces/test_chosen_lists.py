"""Some of the lists that a map gives, without an index of their numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from torchmix.reader.protocol import chosen_lists

LISTS = [[1, 2], [], [3], [4, 5, 6], None, [7]]


@pytest.mark.parametrize(
    "chosen", [[], [0], [5], [0, 1, 2, 3, 4, 5], [1, 2, 3], [3, 0, 1, 5, 5, 2], [0, 2, 4]], ids=str
)
@pytest.mark.parametrize("begin", [0, 1])
def test_the_lists_are_those_that_arrow_takes(chosen: list[int], begin: int) -> None:
    lists = pa.array([[9], *LISTS][1 - begin :], pa.large_list(pa.uint8())).slice(begin)
    found = chosen_lists(lists, np.array(chosen, np.int64))
    assert found.to_pylist() == [LISTS[row] for row in chosen]


def test_neighbours_are_a_view() -> None:
    values, offsets = pa.array(np.zeros(1 << 20, np.uint8)), pa.array(np.arange(0, (1 << 20) + 1, 1 << 10))
    lists = pa.LargeListArray.from_arrays(offsets, values)
    before = pa.total_allocated_bytes()
    neighbours = chosen_lists(lists, np.arange(100, 900))
    assert len(neighbours) == 800
    assert pa.total_allocated_bytes() - before < 1 << 16
