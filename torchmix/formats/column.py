"""What a Parquet column may hold, and its rows as documents.

In: the Arrow schema of a file and a column's name; Arrow arrays of that column. Out: which leaf of the file it is, or a
clear error; `Documents`, or their lengths alone. Three kinds: `tokens`, integers of any width in lists, used as they
are; `text`, a string or binary that the tokenizer turns into ids; and `values`, strings or binaries, one or a list of
them a row, whose bytes are a document end to end. Must hold: a row's tokens are all integers of all its
lists, in order, however lists and structs are nested; a null row or list holds none; a null in an integer's place, or
in that of a struct around it, is an error that names its row. Cost: tokens are not copied, only their offsets widened;
text as its tokenizer.

A column is named by its path through structs, `meta.text`; lists have no part in it, so that `turns.ids` may be the
field `ids` of a struct, of a list of structs, or of both.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchmix.array_types import Int64Array
from torchmix.errors import SourceUnreadable
from torchmix.formats.seen_ids import SeenIds, see_ids
from torchmix.formats.source import Documents
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.images.raw_bytes import RawBytes
from torchmix.transform.maps.map_encoder import MapEncoder
from torchmix.transform.row_encoder import RowEncoder, TextEncoder
from torchmix.transform.tokenizer import Tokenizer

Kind = Literal["tokens", "text", "values"]

TOKENS_TRANSFORM_ID = "tokens-1"

_SHOWN_NAMES = 20
_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
_MOST_TOKEN = 2**63 - 1


class _Leaf(NamedTuple):
    """A leaf of an Arrow schema; they come in the order of the file's."""

    path: str
    num_lists: int
    type: pa.DataType
    is_without_values: bool = False
    """A list around it has the fixed size 0."""


def find_leaf(schema: pa.Schema, column: str, kind: Kind) -> int:
    """Number of a column's leaf among those of a file.

    Raises:
        SourceUnreadable: The file has no such column, or it holds something else than `kind` says.
    """
    leaves = [leaf for field in schema for leaf in _leaves(field.type, field.name, 0)]
    found = [number for number, leaf in enumerate(leaves) if leaf.path == column]
    if len(found) > 1:
        raise SourceUnreadable(f"{len(found)} columns are named {column!r}; there must be one")
    if not found:
        raise SourceUnreadable(f"no column {column!r}; {_hint(column, [leaf.path for leaf in leaves])}")
    leaf = leaves[found[0]]
    is_tokens, is_text = _is_tokens(leaf), _is_text(leaf)
    held = f"column {column!r} is {'list of ' * leaf.num_lists}{leaf.type}"
    if kind == "tokens" and not is_tokens:
        hint = "; use `text` with a tokenizer for it" if is_text else ""
        raise SourceUnreadable(f"{held}, not a list of integers{hint}")
    if kind == "text" and not is_text:
        hint = "; use `tokens` for it, without a tokenizer" if is_tokens else ""
        raise SourceUnreadable(f"{held}, not a string{hint}")
    if kind == "values" and str(leaf.type) not in _TEXT_TYPES:
        raise SourceUnreadable(f"{held}, not a string or binary, nor a list of them")
    return found[0]


def check_column(schema: pa.Schema, column: str, kind: Kind) -> None:
    """As `find_leaf`, where its number does not matter."""
    find_leaf(schema, column, kind)


def columns_of(schema: pa.Schema) -> list[tuple[str, Kind]]:
    """The columns of a file that a source may name, in the file's order, each with what it holds."""
    leaves = [leaf for field in schema for leaf in _leaves(field.type, field.name, 0)]
    found: list[tuple[str, Kind]] = []
    for leaf in leaves:
        if _is_tokens(leaf):
            found.append((leaf.path, "tokens"))
        elif _is_text(leaf):
            found.append((leaf.path, "text"))
    return found


def is_without_values(schema: pa.Schema, leaf: int) -> bool:
    """Whether a leaf lies in lists of the fixed size 0; Parquet has a null for each of them, which is no token."""
    return [leaf for field in schema for leaf in _leaves(field.type, field.name, 0)][leaf].is_without_values


def transform_id_of(kind: Kind, tokenizer: Tokenizer, map: MapEncoder | None) -> str:
    """What turns rows into tokens, with its version; of texts the tokenizer's."""
    if map is not None:
        return map.transform_id
    return TOKENS_TRANSFORM_ID if kind == "tokens" else tokenizer.transform_id


def row_encoder_of(kind: Kind, tokenizer: Tokenizer, map: MapEncoder | None) -> RowEncoder | None:
    """What turns rows into tokens; None where they are tokens."""
    if map is not None:
        return map
    return None if kind == "tokens" else TextEncoder(tokenizer)


def to_documents(arrays: list[pa.Array], kind: Kind, first_row: int) -> Documents:
    """The rows of some arrays as they are, end to end: integers of lists, bytes of texts.

    Args:
        arrays: of lists or strings, as `parquet_page` gives them.
        first_row: number of the first row, for messages.

    Raises:
        SourceUnreadable: a null in an integer's place.
    """
    parts = []
    for array in arrays:
        if kind == "values":
            parts.append(_value_documents(array))
        else:
            parts.append(_text_documents(array) if kind == "text" else _list_documents(array, first_row))
        first_row += len(array)
    return join_documents(parts)


def join_documents(parts: list[Documents]) -> Documents:
    """Documents of several parts, end to end."""
    if len(parts) == 1:
        return parts[0]
    lengths = [np.diff(part.offsets) for part in parts]
    return Documents(
        values=np.concatenate([part.values for part in parts]) if parts else np.zeros(0, dtype=np.int32),
        offsets=np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *lengths])),
    )


def count_tokens(
    array: pa.Array, kind: Kind, first_row: int, tokenizer: Tokenizer = BYTES, *, num_opening: int = 0
) -> Int64Array:
    """Tokens of each row, [rows]; as `to_documents`, without making them.

    Args:
        array, kind, first_row: As `to_documents`.
        tokenizer: Of texts and values.
        num_opening: 1 where the first row is one value that is not in the file, and the end of the row before.
    """
    if kind == "text":
        return tokenizer.count_tokens(_texts(array), first_row)
    if kind == "values":
        offsets, values = _values(array)
        lists = pa.LargeListArray.from_arrays(pa.array(offsets), values)
        assert isinstance(tokenizer, RawBytes), "values have no other"
        counts = tokenizer.count_values(lists, first_row, goes_on=num_opening > 0)
        counts[:num_opening] += 1  # the value that is not in the file has no bytes, and is one to the caller
        return counts
    return np.diff(_list_documents(array, first_row).offsets)


def see_rows(array: pa.Array, kind: Kind, first_row: int, *, num_opening: int = 0) -> SeenIds | None:
    """What is seen of the ids of some rows; None of texts, since their tokenizer knows its ids.

    Args:
        array, kind, first_row: As `to_documents`.
        num_opening: Ids before all others that are not the file's.
    """
    if kind != "tokens":
        return None
    documents = _list_documents(array, first_row)
    return see_ids(documents.values[num_opening:], documents.offsets - num_opening, first_row)


def vocab_size_of(kind: Kind, tokenizer: Tokenizer, map: MapEncoder | None) -> int | None:
    """Ids of the tokenizer of texts; None where a column holds ids, or the ids are a function's."""
    return tokenizer.vocab_size if kind != "tokens" and map is None else None


def count_values(array: pa.Array) -> Int64Array:
    """Values that Parquet counts for each row, [rows]: an empty or null list is one, and so is a row without lists."""
    counts = _values_of_entries(array)
    return np.ones(len(array), dtype=np.int64) if counts is None else counts


def _values_of_entries(array: pa.Array) -> Int64Array | None:
    """As `count_values`; None where each entry is one."""
    while isinstance(array.type, pa.StructType):
        array = _child(array)
    if not isinstance(array.type, _LISTS):
        return None
    offsets, entries = _entries(array)
    counts = _values_of_entries(entries)
    if counts is not None:
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])[offsets]
    return np.maximum(np.diff(offsets), 1)


def _text_documents(array: pa.Array) -> Documents:
    """Bytes of texts; a null has none."""
    texts = _texts(array)
    if texts.null_count:
        texts = texts.fill_null("")  # a null may have bytes below it
    if not len(texts):
        return Documents(values=np.zeros(0, np.uint8), offsets=np.zeros(1, np.int64))
    _, offset_buffer, byte_buffer = texts.buffers()
    width = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    offsets = np.frombuffer(offset_buffer, width)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    values = np.zeros(0, np.uint8)
    if offsets[-1] > offsets[0]:  # Arrow may leave out the buffer of no bytes
        values = np.frombuffer(byte_buffer, np.uint8)[offsets[0] : offsets[-1]]
    return Documents(values=values, offsets=offsets - offsets[0])


def _value_documents(array: pa.Array) -> Documents:
    """Bytes of the values of each row; a null has none."""
    offsets, values = _values(array)
    inner = _text_documents(values)
    return Documents(values=inner.values, offsets=inner.offsets[offsets])


def _values(array: pa.Array) -> tuple[Int64Array, pa.Array]:
    """Where the values of each row begin, [rows + 1], and all values, as `_texts`."""
    offsets = np.arange(len(array) + 1)
    while isinstance(array.type, (*_LISTS, pa.StructType)):
        if isinstance(array.type, pa.StructType):
            array = _child(array)
        else:
            inner, array = _entries(array)
            offsets = inner[offsets]
    return offsets, _texts(array)


def _list_documents(array: pa.Array, first_row: int) -> Documents:
    offsets = np.arange(len(array) + 1)
    while not pa.types.is_integer(array.type):
        if isinstance(array.type, pa.StructType):
            array = _child(array)
        else:
            inner, array = _entries(array)
            offsets = inner[offsets]
    if array.null_count:
        row = first_row + _row_of(offsets, int(pc.index(array.is_null(), True).as_py()))
        raise SourceUnreadable(f"row {row} holds a null inside its list of tokens; a token must be an integer", row=row)
    values = array.to_numpy(zero_copy_only=True)
    if values.dtype == np.uint64 and len(values) and values.max() > _MOST_TOKEN:
        place = int(np.argmax(values > _MOST_TOKEN))
        row = first_row + _row_of(offsets, place)
        raise SourceUnreadable(f"row {row} holds the token {values[place]}; they end at 2^63 - 1", row=row)
    return Documents(values=values, offsets=offsets)


def _entries(array: pa.Array) -> tuple[Int64Array, pa.Array]:
    """Offsets of a list array's entries, from 0, and the entries."""
    if not isinstance(array.type, pa.ListType | pa.LargeListType | pa.MapType):
        array = array.cast(pa.large_list(array.type.value_field))
    offsets = array.offsets.to_numpy().astype(np.int64)
    entries = array.values[offsets[0] : offsets[-1]]
    offsets -= offsets[0]
    return offsets, entries


def _child(array: pa.StructArray) -> pa.Array:
    """The one field of structs; null where the struct is."""
    return array.flatten()[0] if array.null_count else array.field(0)


def _row_of(offsets: Int64Array, place: int) -> int:
    return int(np.searchsorted(offsets, place, side="right")) - 1


def _texts(array: pa.Array) -> pa.Array:
    """As string or large_string, which a binary becomes without a look at its bytes."""
    while isinstance(array.type, pa.StructType):
        array = _child(array)
    if isinstance(array.type, pa.DictionaryType):
        array = array.dictionary_decode()
    if array.type in (pa.string_view(), pa.binary_view()):
        array = array.cast(pa.large_binary())
    if pa.types.is_binary(array.type):
        return array.view(pa.string())
    return array.view(pa.large_string()) if pa.types.is_large_binary(array.type) else array


def _leaves(type: pa.DataType, path: str, num_lists: int) -> Iterator[_Leaf]:
    """Leaves below a field, depth first, as Parquet orders its columns."""
    if isinstance(type, pa.BaseExtensionType):
        yield from _leaves(type.storage_type, path, num_lists)
    elif isinstance(type, pa.DictionaryType | pa.RunEndEncodedType):
        yield from _leaves(type.value_type, path, num_lists)
    elif isinstance(type, _LISTS):
        of_no_size = isinstance(type, pa.FixedSizeListType) and not type.list_size
        for leaf in _leaves(type.value_type, path, num_lists + 1):
            yield leaf._replace(is_without_values=True) if of_no_size else leaf
    elif isinstance(type, pa.MapType):
        yield from _leaves(type.key_type, f"{path}.key", num_lists + 1)
        yield from _leaves(type.item_type, f"{path}.value", num_lists + 1)
    elif isinstance(type, pa.StructType):
        for field in type:
            yield from _leaves(field.type, f"{path}.{field.name}", num_lists)
    else:
        yield _Leaf(path, num_lists, type)


def _is_tokens(leaf: _Leaf) -> bool:
    return leaf.num_lists > 0 and bool(pa.types.is_integer(leaf.type))


def _is_text(leaf: _Leaf) -> bool:
    return leaf.num_lists == 0 and str(leaf.type) in _TEXT_TYPES


def _hint(column: str, paths: list[str]) -> str:
    inner = [path for path in paths if path.startswith(f"{column}.")]
    if inner:
        return f"it is a struct, name a field of it: {_listed(inner)}"
    nearest = difflib.get_close_matches(column, paths, n=1)
    return f"{f'did you mean {nearest[0]!r}? ' if nearest else ''}it has: {_listed(paths)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
