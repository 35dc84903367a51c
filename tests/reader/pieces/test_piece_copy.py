from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from torchmix.reader.piece_copy import PieceCopy, Scratch


def copy_of(arrays: Sequence[NDArray[Any]], scratch: Scratch | None = None) -> PieceCopy:
    """One piece of each array, all but its first and last token, with a gap of one place between pieces."""
    sizes = np.array([len(array) - 2 for array in arrays], np.int64)
    places = np.cumsum(sizes + 1) - sizes
    return PieceCopy(
        sizes=sizes,
        places=places,
        goes_on=np.ones(len(arrays), np.bool_),
        num_places=int(places[-1] + sizes[-1]) if len(arrays) else 0,
        scratch=scratch or Scratch(),
    )


def pieces_in(out: NDArray[Any], arrays: Sequence[NDArray[Any]]) -> list[list[int]]:
    ends = np.cumsum([len(array) - 1 for array in arrays])
    return [out[end - len(array) + 2 : end].tolist() for end, array in zip(ends, arrays, strict=True)]


@pytest.mark.parametrize("at_hand", [0, 1, 3, 6])
@pytest.mark.parametrize(
    ("dtypes", "result"),
    [
        (["uint16"], "uint16"),
        (["int32", "int32"], "int32"),
        (["uint8", "uint16"], "uint16"),
        (["uint16", "int16"], "int32"),
        (["int32", "uint16", "int32"], "int32"),
        (["uint16", "int64", "uint16"], "int64"),
        (["int8", "uint8", "int64", "int32", "uint16", "int16"], "int64"),
    ],
)
def test_pieces_of_arrays_of_any_types_keep_their_ids(dtypes, result, at_hand):
    rng = np.random.default_rng(1)
    arrays = []
    for dtype in dtypes:
        info = np.iinfo(dtype)
        arrays.append(np.array([info.min, info.max, info.min, *rng.integers(0, 100, 5), info.max], dtype))
    copy = copy_of(arrays)
    runs = [(array, k, [1]) for k, array in enumerate(arrays)]
    copy.copy_all(runs[:at_hand])
    for run in runs[at_hand:]:
        copy.copy(*run)
    assert pieces_in(copy.out, arrays) == [array[1:-1].tolist() for array in arrays]
    assert copy.successors == [int(array[-1]) for array in arrays]
    assert copy.out.dtype == result
    assert copy.num_bytes == sum(array[1:-1].nbytes for array in arrays)


def test_consecutive_pieces_of_one_array_begin_anywhere_in_it():
    values = np.arange(100, dtype=np.uint16)
    sizes = np.array([3, 0, 5, 2])
    copy = PieceCopy(
        sizes=sizes,
        places=np.array([7, 7, 0, 5]),
        goes_on=np.array([True, True, False, True]),
        num_places=10,
        scratch=Scratch(),
    )
    copy.copy(values, 0, [50, 10])
    copy.copy(values, 2, [95, 20])
    assert copy.out.tolist() == [95, 96, 97, 98, 99, 20, 21, 50, 51, 52]
    assert copy.successors == [53, 10, 0, 22]


def test_no_piece_gives_no_token():
    copy = copy_of([])
    copy.copy_all([])
    assert (len(copy.out), copy.successors, copy.num_bytes) == (0, [], 0)


def test_memory_is_used_again_and_grows():
    scratch = Scratch()
    found = []
    for length in (10, 9, 100):
        array = np.arange(length, dtype=np.uint16)
        copy = copy_of([array], scratch)
        copy.copy(array, 0, [1])
        assert copy.out.tolist()[1:] == list(range(1, length - 1))
        found.append(copy.out)
    assert np.shares_memory(found[0], found[1])
