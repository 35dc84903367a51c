"""Lists of rows as arrays of a step: their order, types, and the microbatches that they begin in."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from tests.support.plans import Piece, make_plan
from torchmix.constructor.build import arrays_of_rows, pieces_of_replica
from torchmix.constructor.fields import rows_of_microbatches
from torchmix.reader.protocol import OtherRows

DOCUMENTS = {(0, number): [number] * 3 for number in range(4)}
PLAN = make_plan(
    [Piece(sample=number, sample_offset=2, source=0, row=number, start=0, tokens=3) for number in range(4)],
    DOCUMENTS,
    length=8,
    places=[(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)],
)


def others(name: str, piece: list[int], lists: list[list[float]], kind: pa.DataType) -> OtherRows:
    return OtherRows(name=name, piece=np.array(piece), values=pa.array(lists, pa.large_list(kind)))


def test_rows_lie_in_the_order_of_their_first_tokens_by_microbatch() -> None:
    asked = [others("a", [3, 0], [[7, 8], [1]], pa.uint8()), others("a", [1], [[]], pa.uint8())]
    arrays = arrays_of_rows(asked, pieces_of_replica(PLAN, 0), 8)
    assert arrays["a:values"].dtype == np.uint8
    first, second = rows_of_microbatches({name: torch.from_numpy(array) for name, array in arrays.items()}, 2)
    assert [row.tolist() for row in first["a"].rows()] == [[1], []] and first["a"].places.tolist() == [2, 10]
    assert [row.tolist() for row in second["a"].rows()] == [[7, 8]] and second["a"].places.tolist() == [10]


def test_a_slice_of_lists_has_the_numbers_of_its_rows() -> None:
    whole = others("a", [0, 1, 2], [[1, 2], [3], [4, 5]], pa.int16())
    asked = OtherRows(name="a", piece=np.array([0, 1]), values=whole.values.slice(1))
    assert arrays_of_rows([asked], pieces_of_replica(PLAN, 0), 8)["a:values"].tolist() == [3, 4, 5]


def test_types_are_joined_and_unsigned_ones_become_signed() -> None:
    asked = [others("a", [0], [[1.5]], pa.float32()), others("a", [1], [[2]], pa.uint8())]
    asked += [others("b.c", [2], [[65535]], pa.uint16())]
    arrays = arrays_of_rows(asked, pieces_of_replica(PLAN, 0), 8)
    assert arrays["a:values"].dtype == np.float32 and arrays["a:values"].tolist() == [1.5, 2.0]
    assert arrays["b.c:values"].dtype == np.int32 and arrays["b.c:stop"].tolist() == [0, 1]
    assert rows_of_microbatches({name: torch.from_numpy(array) for name, array in arrays.items()}, 2)[1].keys() == {
        "a",
        "b.c",
    }


def test_without_lists_there_are_no_arrays() -> None:
    assert arrays_of_rows([], pieces_of_replica(PLAN, 0), 8) == {}
