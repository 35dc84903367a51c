"""What a Parquet column may hold, and its rows as documents.

In: the Arrow schema of a file and a column's name; Arrow arrays of that column. Out: which leaf of the file it is, or a
clear error; `Documents`, or their lengths alone. The kinds: `tokens`, integers of any width in lists, used as they are;
`text`, a string or binary that the tokenizer turns into ids; `values`, strings or binaries, one or a list of them a
row, whose bytes are a document end to end; `json`, a string that holds JSON, or lists of strings, which become JSON;
and `flags`, lists of integers or booleans that are looked at and never read again. Must hold: a row's tokens are all
integers of all its lists, in order, however lists and structs are nested; a null row or list holds none; a null in an
integer's place, or in that of a struct around it, is an error that names its row. Cost: tokens are not copied, only
their offsets widened; text as its tokenizer.

A column is named by its path through structs, `meta.text`; lists have no part in it, so that `turns.ids` may be the
field `ids` of a struct, of a list of structs, or of both.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from torchmix.array_types import Int64Array
from torchmix.errors import SourceUnreadable
from torchmix.formats.array_rows import (
    LISTS,
    child_of,
    entries_of,
    json_texts,
    list_documents,
    text_documents,
    texts_of,
    value_documents,
    values_of_rows,
)
from torchmix.formats.seen_ids import SeenIds, see_ids
from torchmix.formats.source import Documents
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.documents.loss_flags import LossFlags
from torchmix.transform.images.raw_bytes import RawBytes
from torchmix.transform.maps.map_encoder import MapEncoder
from torchmix.transform.row_encoder import RowEncoder, TextEncoder
from torchmix.transform.tokenizer import Tokenizer

Kind = Literal["tokens", "text", "values", "json", "flags"]

TOKENS_TRANSFORM_ID = "tokens-1"

_SHOWN_NAMES = 20
_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}


class SchemaLeaf(NamedTuple):
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
    leaves = leaves_of(schema)
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
    if kind in ("values", "json") and str(leaf.type) not in _TEXT_TYPES:
        raise SourceUnreadable(f"{held}, not a string or binary, nor a list of them")
    if kind == "flags" and not (leaf.num_lists and (is_tokens or pa.types.is_boolean(leaf.type))):
        raise SourceUnreadable(f"{held}, not a list of integers or booleans")
    return found[0]


def check_column(schema: pa.Schema, column: str, kind: Kind) -> None:
    """As `find_leaf`, where its number does not matter."""
    find_leaf(schema, column, kind)


def leaves_of(schema: pa.Schema) -> list[SchemaLeaf]:
    """The leaves of a file, in its order."""
    return [leaf for field in schema for leaf in _leaves(field.type, field.name, 0)]


def columns_of(schema: pa.Schema) -> list[tuple[str, Literal["tokens", "text"]]]:
    """The columns of a file that a source may name, in the file's order, each with what it holds."""
    found: list[tuple[str, Literal["tokens", "text"]]] = []
    for leaf in leaves_of(schema):
        if _is_tokens(leaf):
            found.append((leaf.path, "tokens"))
        elif _is_text(leaf):
            found.append((leaf.path, "text"))
    return found


def is_without_values(schema: pa.Schema, leaf: int) -> bool:
    """Whether a leaf lies in lists of the fixed size 0; Parquet has a null for each of them, which is no token."""
    return leaves_of(schema)[leaf].is_without_values


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
        if kind in ("text", "json"):
            parts.append(text_documents(array if kind == "text" else json_texts(array)))
        else:
            parts.append(value_documents(array) if kind == "values" else list_documents(array, first_row))
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
        return tokenizer.count_tokens(texts_of(array), first_row)
    if kind == "values":
        offsets, values = values_of_rows(array)
        lists = pa.LargeListArray.from_arrays(pa.array(offsets), values)
        assert isinstance(tokenizer, RawBytes), "values have no other"
        counts = tokenizer.count_values(lists, first_row, goes_on=num_opening > 0)
        counts[:num_opening] += 1  # the value that is not in the file has no bytes, and is one to the caller
        return counts
    if kind == "json":
        if num_opening and count_values(array.slice(0, 1))[0] > 1:
            raise SourceUnreadable(
                f"row {first_row} goes over several pages of the file, and lists of texts are read by page; "
                "write the file again, as with pyarrow 18 or later",
                row=first_row,
            )
        counts = tokenizer.count_tokens(json_texts(array.slice(num_opening)), first_row + num_opening)
        return np.concatenate([np.ones(num_opening, np.int64), counts])
    if kind == "flags":
        assert isinstance(tokenizer, LossFlags), "flags have no other"
        documents = list_documents(array, first_row)
        tokenizer.see(documents.values[num_opening:], documents.offsets, first_row, goes_on=num_opening > 0)
        return np.diff(documents.offsets)
    return np.diff(list_documents(array, first_row).offsets)


def see_rows(array: pa.Array, kind: Kind, first_row: int, *, num_opening: int = 0) -> SeenIds | None:
    """What is seen of the ids of some rows; None of texts, since their tokenizer knows its ids.

    Args:
        array, kind, first_row: As `to_documents`.
        num_opening: Ids before all others that are not the file's.
    """
    if kind != "tokens":
        return None
    documents = list_documents(array, first_row)
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
        array = child_of(array)
    if not isinstance(array.type, LISTS):
        return None
    offsets, entries = entries_of(array)
    counts = _values_of_entries(entries)
    if counts is not None:
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])[offsets]
    return np.maximum(np.diff(offsets), 1)


def _leaves(type: pa.DataType, path: str, num_lists: int) -> Iterator[SchemaLeaf]:
    """Leaves below a field, depth first, as Parquet orders its columns."""
    if isinstance(type, pa.BaseExtensionType):
        yield from _leaves(type.storage_type, path, num_lists)
    elif isinstance(type, pa.DictionaryType | pa.RunEndEncodedType):
        yield from _leaves(type.value_type, path, num_lists)
    elif isinstance(type, LISTS):
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
        yield SchemaLeaf(path, num_lists, type)


def _is_tokens(leaf: SchemaLeaf) -> bool:
    return leaf.num_lists > 0 and bool(pa.types.is_integer(leaf.type))


def _is_text(leaf: SchemaLeaf) -> bool:
    return leaf.num_lists == 0 and str(leaf.type) in _TEXT_TYPES


def _hint(column: str, paths: list[str]) -> str:
    inner = [path for path in paths if path.startswith(f"{column}.")]
    if inner:
        return f"it is a struct, name a field of it: {_listed(inner)}"
    nearest = difflib.get_close_matches(column, paths, n=1)
    return f"{f'did you mean {nearest[0]!r}? ' if nearest else ''}it has: {_listed(paths)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
