"""Which columns are taken, and rows as documents."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tests.support.pages import as_lists
from torchmix.errors import SourceUnreadable
from torchmix.formats.column import Kind, count_tokens, count_values, find_leaf, to_documents
from torchmix.formats.source import Documents

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TURNS = pa.list_(pa.struct({"role": pa.string(), "ids": pa.list_(pa.int32())}))


@pytest.mark.parametrize("integer", INTEGERS, ids=str)
def test_lists_of_any_integer_are_tokens(integer: pa.DataType) -> None:
    for type in (pa.list_(integer), pa.large_list(integer), pa.list_(integer, 4), pa.list_(pa.list_(integer))):
        assert find_leaf(pa.schema({"ids": type}), "ids", "tokens") == 0
    highest = 2 ** (integer.bit_width - 1) - 1
    array = pa.array([[1, highest], None, [], [3]], pa.list_(integer))
    documents = to_documents([array], "tokens", 0)
    assert documents.values.dtype == integer.to_pandas_dtype()
    assert documents.offsets.dtype == np.int64
    assert as_lists(documents) == [[1, highest], [], [], [3]]


TEXTS = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
    pa.dictionary(pa.int32(), pa.string()),
]


@pytest.mark.parametrize("type", TEXTS, ids=str)
def test_strings_and_binaries_of_any_layout_are_text(type: pa.DataType) -> None:
    assert find_leaf(pa.schema({"text": type}), "text", "text") == 0


@pytest.mark.parametrize("type", [pa.binary(), pa.large_binary()], ids=str)
def test_bytes_of_binaries_are_taken_as_they_are(type: pa.DataType) -> None:
    array = pa.array([b"\xff\x00", None, b""], type)
    assert as_lists(to_documents([array], "text", 0)) == [[255, 0], [], []]
    assert count_tokens(array, "text", 0).tolist() == [3, 0, 1]


@pytest.mark.parametrize(
    ("type", "kind", "says"),
    [
        (pa.string(), "tokens", "string, not a list of integers; use `text` with a tokenizer"),
        (pa.list_(pa.int32()), "text", "list of int32, not a string; use `tokens` for it"),
        (pa.list_(pa.float32()), "tokens", "list of float, not a list of integers$"),
        (pa.list_(pa.list_(pa.float32())), "tokens", "list of list of float, not a list of integers$"),
        (pa.list_(pa.bool_()), "tokens", "list of bool, not a list of integers$"),
        (pa.list_(pa.timestamp("us")), "tokens", r"not a list of integers$"),
        (pa.int64(), "tokens", "int64, not a list of integers$"),
        (pa.binary(4), "text", r"fixed_size_binary\[4\], not a string$"),
        (pa.list_(pa.string()), "text", "list of string, not a string$"),
    ],
)
def test_other_types_are_refused_with_a_way_out(type: pa.DataType, kind: Kind, says: str) -> None:
    with pytest.raises(SourceUnreadable, match=f"^column 'x' is .*{says}"):
        find_leaf(pa.schema({"x": type}), "x", kind)


def test_a_missing_column_names_the_nearest_and_all() -> None:
    schema = pa.schema({"id": pa.int64(), "input_ids": pa.list_(pa.int32()), "text": pa.string()})
    with pytest.raises(
        SourceUnreadable, match=r"no column 'input_id'; did you mean 'input_ids'.* it has: id, input_ids, text$"
    ):
        find_leaf(schema, "input_id", "tokens")
    with pytest.raises(SourceUnreadable, match=r"no column 'zzz'; it has: id, input_ids, text$"):
        find_leaf(schema, "zzz", "tokens")


def test_a_column_is_named_by_its_path_through_structs_and_counted_as_parquet_does() -> None:
    schema = pa.schema(
        {
            "id": pa.int64(),
            "meta": pa.struct({"lang": pa.string(), "in": pa.struct({"text": pa.large_string(), "n": pa.int8()})}),
            "map": pa.map_(pa.string(), pa.list_(pa.int32())),
            "turns": TURNS,
            "a.b": pa.string(),
        }
    )
    paths = ["id", "meta.lang", "meta.in.text", "meta.in.n", "map.key", "map.value", "turns.role", "turns.ids", "a.b"]
    kinds: dict[str, Kind] = {"meta.lang": "text", "meta.in.text": "text", "a.b": "text"}
    kinds |= {"map.value": "tokens", "turns.ids": "tokens"}
    for path, kind in kinds.items():
        assert find_leaf(schema, path, kind) == paths.index(path)
    with pytest.raises(SourceUnreadable, match=r"no column 'meta'; it is a struct, name a field of it: meta.lang"):
        find_leaf(schema, "meta", "text")
    with pytest.raises(
        SourceUnreadable, match=r"it is a struct of turns\.role, turns\.ids; write its rows as text of JSON"
    ):
        find_leaf(schema, "turns", "json")
    with pytest.raises(SourceUnreadable, match=r"'turns\.role' is list of string, not a string"):
        find_leaf(schema, "turns.role", "text")


def test_two_columns_of_one_name_are_refused() -> None:
    for schema in (
        pa.schema([("x", pa.string()), ("x", pa.string())]),
        pa.schema({"x.y": pa.string(), "x": pa.struct({"y": pa.string()})}),
    ):
        with pytest.raises(SourceUnreadable, match="2 columns are named 'x"):
            find_leaf(schema, ".".join(schema.names[0].split(".")), "text")


def test_tokens_of_nested_lists_and_structs_come_in_order() -> None:
    rows = [[[1, 2], [], None, [3]], None, [], [None], [[4]]]
    documents = to_documents([pa.array(rows, pa.list_(pa.list_(pa.int32())))], "tokens", 0)
    assert as_lists(documents) == [[1, 2, 3], [], [], [], [4]]
    ids = pa.list_(pa.struct({"ids": pa.list_(pa.int32())}))
    turns = [[{"ids": [1]}, None, {"ids": None}, {"ids": [2, 3]}], None, [{"ids": []}]]
    inside = pa.array([None if turn is None else {"turns": turn} for turn in turns], pa.struct({"turns": ids}))
    for array in (pa.array(turns, ids), inside, inside[1:]):
        cut = len(turns) - len(array)
        assert as_lists(to_documents([array], "tokens", 0)) == [[1, 2, 3], [], []][cut:]
        assert count_values(array).tolist() == [5, 1, 1][cut:]


def test_a_null_struct_in_a_list_is_a_null_token() -> None:
    array = pa.array([[{"id": 5}], [{"id": 1}, None]], pa.list_(pa.struct({"id": pa.int32()})))
    with pytest.raises(SourceUnreadable, match=r"^row 8 holds a null"):
        to_documents([array], "tokens", 7)


def test_texts_of_structs_are_null_where_the_struct_is() -> None:
    array = pa.array([{"t": "ab"}, None, {"t": None}, {"t": ""}], pa.struct({"t": pa.string()}))
    assert as_lists(to_documents([array], "text", 0)) == [[97, 98], [], [], []]
    assert count_values(array).tolist() == [1, 1, 1, 1]


def test_parquet_counts_an_empty_or_null_list_as_one_value_at_every_depth() -> None:
    flat = pa.array([[1, 2], [], None, [5]], pa.list_(pa.int8()))
    assert count_values(flat).tolist() == [2, 1, 1, 1]
    deep = pa.array([[[1, 2], [], None, [3]], None, [], [None], [[], []]], pa.list_(pa.list_(pa.int8())))
    assert count_values(deep).tolist() == [5, 1, 1, 1, 2]
    assert count_values(deep[1:4]).tolist() == [1, 1, 1]


def test_a_token_beyond_63_bits_is_named_by_its_row() -> None:
    array = pa.array([[1], [2**63 - 1], [7, 2**63]], pa.list_(pa.uint64()))
    assert as_lists(to_documents([array[:2]], "tokens", 0)) == [[1], [2**63 - 1]]
    with pytest.raises(SourceUnreadable, match=f"^row 12 holds the token {2**63}"):
        to_documents([array], "tokens", 10)


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_slices_and_parts_are_joined_in_order(kind: Kind) -> None:
    rows = [[1, 2], None, [], [3, 4, 5], [6]] if kind == "tokens" else ["ab", None, "", "cde", "f"]
    array = pa.array(rows, pa.list_(pa.int32()) if kind == "tokens" else pa.string())
    expected = as_lists(to_documents([array], kind, 0))
    assert [len(tokens) for tokens in expected] == [2, 0, 0, 3, 1]
    counts = [2, 0, 0, 3, 1] if kind == "tokens" else [3, 0, 1, 4, 2]  # a text that is not null has an end
    assert count_tokens(array, kind, 0).tolist() == counts
    for cut in range(len(rows) + 1):
        parts = [array[:cut], array[cut:]]
        assert as_lists(to_documents(parts, kind, 0)) == expected
        assert as_lists(to_documents(parts[1:], kind, 0)) == expected[cut:]
        assert count_tokens(parts[1], kind, 0).tolist() == counts[cut:]
    assert as_lists(to_documents([], kind, 0)) == []


@pytest.mark.parametrize(
    ("rows", "bad_row"),
    [([[None]], 0), ([[1, 2], [], None, [3, None]], 3), ([[1], [None, 2], [None]], 1)],
)
def test_a_null_inside_a_list_is_named_by_its_row(rows: list[list[int | None] | None], bad_row: int) -> None:
    array = pa.array([[7], *rows], pa.list_(pa.int32()))[1:]
    with pytest.raises(SourceUnreadable, match=f"^row {100 + bad_row} holds a null"):
        to_documents([array], "tokens", 100)
    with pytest.raises(SourceUnreadable, match=f"^row {100 + bad_row} holds a null"):
        to_documents([pa.array([[1]], pa.list_(pa.int32())), array], "tokens", 99)
    with pytest.raises(SourceUnreadable, match=f"^row {100 + bad_row} holds a null"):
        count_tokens(array, "tokens", 100)


def test_a_list_of_texts_that_goes_over_pages_is_refused() -> None:
    one, two = (pa.array([["", *rest], ["x"]], pa.list_(pa.string())) for rest in ([], ["more"]))
    assert count_tokens(one, "json", 7, num_opening=1).tolist() == [1, 6]  # the opening value, and '["x"]' with its end
    with pytest.raises(SourceUnreadable, match="row 7 goes over several pages") as caught:
        count_tokens(two, "json", 7, num_opening=1)
    assert caught.value.row == 7


def test_lists_of_texts_become_json() -> None:
    structs = pa.struct([("text", pa.string())])
    array = pa.array([[{"text": "a"}, None, {"text": 'b"'}], [], None], pa.list_(structs))
    assert as_texts(to_documents([array], "json", 0)) == ['["a", null, "b\\""]', "[]", ""]
    nested = pa.array([[["a", None], []]], pa.list_(pa.list_(pa.string())))
    assert as_texts(to_documents([nested], "json", 0)) == ['[["a", null], []]']


def as_texts(documents: Documents) -> list[str]:
    return [bytes(np.array(one, np.uint8)).decode() for one in as_lists(documents)]
