"""What maps give beside ids, in replies of loaders."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from torchmix.errors import SourceUnreadable, WireError
from torchmix.reader.protocol import OtherRows
from torchmix.service.messages import MOST_BODY_BYTES, arrays_of_others, others_of


def others(piece: list[int], lists: list[list[int]], name: str = "raw") -> OtherRows:
    return OtherRows(name=name, piece=np.array(piece), values=pa.array(lists, pa.large_list(pa.uint8())))


def test_lists_come_back_with_the_pieces_that_they_are_for() -> None:
    arrays = arrays_of_others([others([2], [[5]]), others([0], [[]]), others([1], [[9]], "b")], 4, ids_bytes=10)
    found = {one.name: one for one in others_of(arrays, np.array([7, 6, 5, 4]))}
    assert found["raw"].piece.tolist() == [7, 5] and found["raw"].values.to_pylist() == [[], [5]]
    assert found["b"].piece.tolist() == [6] and found["b"].values.to_pylist() == [[9]]


def test_lists_that_fit_no_message_are_an_error_that_names_them() -> None:
    with pytest.raises(SourceUnreadable, match=r"beside ids \(raw\) makes a reply of .* give less"):
        arrays_of_others([others([0], [[1]])], 1, ids_bytes=MOST_BODY_BYTES)


@pytest.mark.parametrize("lengths", [[1, -1], [2], [3, -2], None])
def test_other_lengths_are_refused(lengths: list[int] | None) -> None:
    arrays = arrays_of_others([others([0], [[1, 2]])], 2, ids_bytes=0)
    if lengths is None:
        del arrays["row/raw.lengths"]
    else:
        arrays["row/raw.lengths"] = np.array(lengths, np.int32)
    with pytest.raises(WireError, match="row/raw"):
        others_of(arrays, np.array([0, 1]))
