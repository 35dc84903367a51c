"""What a map must give, and what is said where it gives something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from torchmix.errors import SourceUnreadable
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.maps import MapEncoder, RowMap
from torchmix.transform.tokenizer import EncodedRows, RowsToEncode

TEXTS = pa.array(["ab", "c", ""], pa.large_string())
IDS = pa.array([[1, 2], [3], []], pa.list_(pa.int32()))


def encode(given: Any, *, rows: pa.Array = TEXTS, tokenizer: Any = BYTES) -> EncodedRows:
    """What becomes of rows where the map gives this, or calls it."""
    function: Callable[..., Any] = given if callable(given) else lambda columns, **_: given
    row_map = RowMap(words="mine:f", function=function, version="1", is_random=False)
    encoder = MapEncoder(map=row_map, column="t", takes="text", tokenizer=tokenizer)
    numbers = np.arange(len(rows))
    asked = RowsToEncode(rows=rows, row=numbers, epoch=2, seed=numbers.astype(np.uint64), first_row=70)
    return encoder.encode(asked)


def test_texts_are_tokenized_and_ids_are_used() -> None:
    made = encode(lambda columns, **_: {"text": columns["t"]})
    assert made.values.tolist() == [97, 98, 256, 99, 256, 256] and made.offsets.tolist() == [0, 3, 5, 6]
    for ids in (
        IDS,
        IDS.cast(pa.large_list(pa.int64())),
        pa.chunked_array([IDS[:1], IDS[1:]]),
        IDS.cast(pa.list_(pa.uint8())),
    ):
        made = encode({"tokens": ids})
        assert made.values.tolist() == [1, 2, 3] and made.offsets.tolist() == [0, 2, 3, 3]
    made = encode({"tokens": pa.array([None, [5], None], pa.list_(pa.int64()))})
    assert made.values.tolist() == [5] and made.offsets.tolist() == [0, 0, 1, 1]
    assert encode({"text": pa.array([None, "", "a"])}).offsets.tolist() == [0, 0, 1, 3]


def test_other_outputs_are_ragged_arrays_of_the_rows() -> None:
    pixels = pa.array([[1, 255], None, [7]], pa.list_(pa.uint8()))
    fixed = pa.array([[0.5, 1.5]] * 3, pa.list_(pa.float32(), 2))
    made = encode({"tokens": IDS, "pixels": pixels, "box": fixed, "error": pa.nulls(3, pa.string())})
    assert made.others["pixels"].to_pylist() == [[1, 255], [], [7]]
    assert made.others["pixels"].type == pa.large_list(pa.uint8())
    assert made.others["box"].to_pylist() == [[0.5, 1.5]] * 3
    assert set(made.others) == {"pixels", "box"}


def test_the_function_has_the_numbers_of_its_rows() -> None:
    seen: dict[str, Any] = {}

    def record(columns: Any, **given: Any) -> dict[str, Any]:
        seen.update(given, columns=columns)
        return {"tokens": IDS}

    encode(record)
    assert seen["row"].tolist() == [0, 1, 2] and seen["epoch"] == 2 and seen["seed"].dtype == np.uint64
    assert seen["columns"]["t"].equals(TEXTS)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1], "gives a list, not a mapping"),
        ({"other": IDS}, r"gives \['other'\]: exactly one output must be `text` or `tokens`"),
        ({"text": TEXTS, "tokens": IDS}, "exactly one output"),
        ({"tokens": [[1], [2], [3]]}, "gives 'tokens' as a list, not as a pyarrow.Array"),
        ({"tokens": IDS[:2]}, "gives 2 rows of 'tokens' for 3"),
        ({"tokens": IDS, "raw": IDS[:2]}, "gives 2 rows of 'raw' for 3"),
        ({"tokens": TEXTS}, "gives 'tokens' of large_string, not lists of numbers"),
        ({"tokens": pa.array([[0.5], [], []])}, "gives `tokens` of list<.*double.*>, not lists of integers"),
        ({"tokens": pa.array([[1], [2, -1], []])}, "gives row 71 the token -1; ids go from 0 to 2147483647"),
        ({"tokens": pa.array([[1], [2**31], []])}, "gives row 71 the token 2147483648"),
        ({"tokens": pa.array([[1], [None], []], pa.list_(pa.int32()))}, "a null inside a list of 'tokens'"),
        ({"text": pa.array([1, 2, 3])}, "gives `text` of int64, not of string"),
        ({"tokens": IDS, "raw": TEXTS}, "gives 'raw' of large_string, not lists of numbers"),
        ({"tokens": IDS, "error": pa.array([None, "no licence", "x"])}, r"^row 71: no licence \(says mine:f\)"),
        (lambda columns, **_: 1 / 0, r"^3 rows: the map mine:f raises ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_map_gives_amiss_is_named(given: Any, says: str) -> None:
    with pytest.raises(SourceUnreadable, match=says):
        encode(given)


def test_texts_without_a_tokenizer_are_an_error_that_says_what_to_add() -> None:
    with pytest.raises(SourceUnreadable, match="gives `text`, and the source has no tokenizer"):
        encode({"text": TEXTS}, tokenizer=None)
