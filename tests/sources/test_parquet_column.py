"""Which columns are taken, and rows as documents."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.support.pages import as_lists
from torchmix.errors import SourceUnreadable
from torchmix.sources.parquet_column import Kind, check_column, count_tokens, to_documents

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]


@pytest.mark.parametrize("integer", INTEGERS, ids=str)
def test_lists_of_any_integer_are_tokens(integer: pa.DataType) -> None:
    for type in (pa.list_(integer), pa.large_list(integer), pa.list_(integer, 4)):
        check_column(pa.schema({"ids": type}), "ids", "tokens", "here")
    highest = 2 ** (integer.bit_width - 1) - 1
    array = pa.array([[1, highest], None, [], [3]], pa.list_(integer))
    documents = to_documents([array], "tokens", "here", 0)
    assert documents.values.dtype == integer.to_pandas_dtype()
    assert documents.offsets.dtype == np.int64
    assert as_lists(documents) == [[1, highest], [], [], [3]]


@pytest.mark.parametrize(
    "type", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view()], ids=str
)
def test_strings_of_any_layout_are_text(type: pa.DataType) -> None:
    check_column(pa.schema({"text": type}), "text", "text", "here")


@pytest.mark.parametrize(
    ("type", "kind", "says"),
    [
        (pa.string(), "tokens", "string, not a list of integers; use `text` with a tokenizer"),
        (pa.list_(pa.int32()), "text", "not a string; use `tokens` for it"),
        (pa.list_(pa.float32()), "tokens", "not a list of integers$"),
        (pa.list_(pa.list_(pa.int32())), "tokens", "not a list of integers$"),
        (pa.int64(), "tokens", "int64, not a list of integers$"),
        (pa.binary(), "text", "binary, not a string$"),
        (pa.list_(pa.string()), "text", "not a string$"),
    ],
)
def test_other_types_are_refused_with_a_way_out(type: pa.DataType, kind: Kind, says: str) -> None:
    with pytest.raises(SourceUnreadable, match=f"^here: column 'x' is .*{says}"):
        check_column(pa.schema({"x": type}), "x", kind, "here")


def test_a_missing_column_names_the_nearest_and_all() -> None:
    schema = pa.schema({"id": pa.int64(), "input_ids": pa.list_(pa.int32()), "text": pa.string()})
    with pytest.raises(
        SourceUnreadable, match=r"no column 'input_id'; did you mean 'input_ids'.* it has: id, input_ids, text$"
    ):
        check_column(schema, "input_id", "tokens", "here")
    with pytest.raises(SourceUnreadable, match=r"no column 'zzz'; it has: id, input_ids, text$"):
        check_column(schema, "zzz", "tokens", "here")


def test_a_nested_field_says_that_it_is_nested() -> None:
    schema = pa.schema({"a": pa.struct({"b": pa.string()})})
    with pytest.raises(SourceUnreadable, match=r"no column 'a\.b'; 'a' is a column of type struct.* flatten it"):
        check_column(schema, "a.b", "text", "here")


def test_two_columns_of_one_name_are_refused() -> None:
    schema = pa.schema([("x", pa.string()), ("x", pa.string())])
    with pytest.raises(SourceUnreadable, match="2 columns are named 'x'"):
        check_column(schema, "x", "text", "here")


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_slices_and_parts_are_joined_in_order(kind: Kind) -> None:
    rows = [[1, 2], None, [], [3, 4, 5], [6]] if kind == "tokens" else ["ab", None, "", "cde", "f"]
    array = pa.array(rows, pa.list_(pa.int32()) if kind == "tokens" else pa.string())
    expected = as_lists(to_documents([array], kind, "here", 0))
    assert [len(tokens) for tokens in expected] == ([2, 0, 0, 3, 1] if kind == "tokens" else [3, 0, 1, 4, 2])
    assert count_tokens(array, kind, "here", 0).tolist() == [len(tokens) for tokens in expected]
    for cut in range(len(rows) + 1):
        parts = [array[:cut], array[cut:]]
        assert as_lists(to_documents(parts, kind, "here", 0)) == expected
        assert as_lists(to_documents(parts[1:], kind, "here", 0)) == expected[cut:]
        assert count_tokens(parts[1], kind, "here", 0).tolist() == [len(tokens) for tokens in expected[cut:]]
    assert as_lists(to_documents([], kind, "here", 0)) == []


@pytest.mark.parametrize(
    ("rows", "bad_row"),
    [([[None]], 0), ([[1, 2], [], None, [3, None]], 3), ([[1], [None, 2], [None]], 1)],
)
def test_a_null_inside_a_list_is_named_by_its_row(rows: list[list[int | None] | None], bad_row: int) -> None:
    array = pa.array([[7], *rows], pa.list_(pa.int32()))[1:]
    with pytest.raises(SourceUnreadable, match=f"^here: row {100 + bad_row} holds a null"):
        to_documents([array], "tokens", "here", 100)
    with pytest.raises(SourceUnreadable, match=f"^here: row {100 + bad_row} holds a null"):
        to_documents([pa.array([[1]], pa.list_(pa.int32())), array], "tokens", "here", 99)
    with pytest.raises(SourceUnreadable, match=f"^here: row {100 + bad_row} holds a null"):
        count_tokens(array, "tokens", "here", 100)
