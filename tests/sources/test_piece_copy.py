from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from torchmix.sources.piece_copy import PieceCopy, Scratch
from torchmix.sources.source_pages import DecodedPage


def page(values: Sequence[int], dtype: str) -> DecodedPage:
    """A page of one document."""
    array = np.array(values, dtype)
    return DecodedPage(values=array, cells=array.data, offsets=np.array([0, len(array)]).data)


def copy_of(pages: Sequence[DecodedPage], scratch: Scratch | None = None) -> PieceCopy:
    """One piece of each page, all but its first and last token, with a gap of one place between pieces."""
    sizes = np.array([len(one.values) - 2 for one in pages], np.int64)
    places = np.cumsum(sizes + 1) - sizes
    return PieceCopy(
        first_piece=list(range(len(pages) + 1)),
        rows=np.zeros(len(pages), np.int64),
        starts=np.ones(len(pages), np.int64),
        sizes=sizes,
        places=places,
        goes_on=np.ones(len(pages), np.bool_),
        num_places=int(places[-1] + sizes[-1]) if len(pages) else 0,
        scratch=scratch or Scratch(),
    )


def pieces_in(out: NDArray[Any], pages: Sequence[DecodedPage]) -> list[list[int]]:
    ends = np.cumsum([len(one.values) - 1 for one in pages])
    return [out[end - len(one.values) + 2 : end].tolist() for end, one in zip(ends, pages, strict=True)]


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
def test_pieces_of_pages_of_any_types_keep_their_ids(dtypes, result, at_hand):
    rng = np.random.default_rng(1)
    pages = []
    for dtype in dtypes:
        info = np.iinfo(dtype)
        pages.append(page([info.min, info.max, info.min, *rng.integers(0, 100, 5), info.max], dtype))
    copy = copy_of(pages)
    first = {k: pages[k] for k in range(min(at_hand, len(pages)))}
    num_bytes = copy.copy_all(first)
    num_bytes += sum(copy.copy(k, pages[k]) for k in range(len(first), len(pages)))
    assert pieces_in(copy.out, pages) == [one.values[1:-1].tolist() for one in pages]
    assert copy.successors == [int(one.values[-1]) for one in pages]
    assert copy.out.dtype == result
    assert num_bytes == sum(one.values[1:-1].nbytes for one in pages)


def test_no_piece_gives_no_token():
    copy = copy_of([])
    assert copy.copy_all({}) == 0
    assert (len(copy.out), copy.successors) == (0, [])


def test_memory_is_used_again_and_grows():
    scratch = Scratch()
    first = copy_of([page(range(10), "uint16")], scratch)
    first.copy_all({0: page(range(10), "uint16")})
    second = copy_of([page(range(9), "uint16")], scratch)
    second.copy_all({0: page(range(9), "uint16")})
    assert np.shares_memory(first.out, second.out)
    third = copy_of([page(range(100), "uint16")], scratch)
    third.copy_all({0: page(range(100), "uint16")})
    assert third.out.tolist()[1:] == list(range(1, 99))
