"""What a column may hold, and the rows of Arrow arrays as documents, where some rows cannot be read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from torchmix.array_types import Int32Array, Int64Array
from torchmix.catalog.manifest import MOST_ID, BadRows, ListBytes
from torchmix.errors import CatalogError, SourceUnreadable
from torchmix.formats.source import Documents, PageRun, SeenIds, join_seen, see_ids
from torchmix.transform.bytes_tokenizer import BYTES, RawBytes
from torchmix.transform.documents.layout import LossFlags
from torchmix.transform.maps import MapEncoder
from torchmix.transform.tokenizer import RowEncoder, TextEncoder, Tokenizer

# --- Rows of Arrow arrays as documents: bytes of texts, integers of lists, bytes or JSON of lists of texts.
#
# A document has all values of its row, in order, however lists and structs are nested; a null row or list has none.
# Cost: integers and bytes are not copied, only their offsets widened; JSON costs Python objects.

LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
_MOST_TOKEN = 2**63 - 1


def text_documents(array: pa.Array) -> Documents:
    """Bytes of texts; a null has none."""
    texts = texts_of(array)
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


def value_documents(array: pa.Array) -> Documents:
    """Bytes of the values of each row; a null has none."""
    offsets, values = values_of_rows(array)
    inner = text_documents(values)
    return Documents(values=inner.values, offsets=inner.offsets[offsets])


def values_of_rows(array: pa.Array) -> tuple[Int64Array, pa.Array]:
    """Where the values of each row begin, [rows + 1], and all values, as `_texts`."""
    offsets = np.arange(len(array) + 1)
    while isinstance(array.type, (*LISTS, pa.StructType)):
        if isinstance(array.type, pa.StructType):
            array = child_of(array)
        else:
            inner, array = entries_of(array)
            offsets = inner[offsets]
    return offsets, texts_of(array)


def list_documents(array: pa.Array, first_row: int) -> Documents:
    """Integers of lists, or booleans as 0 and 1.

    Args:
        array: [rows]
        first_row: Row of the first one, for messages.

    Raises:
        SourceUnreadable: A null in an integer's place.
    """
    import pyarrow.compute as pc  # not needed for ids, and slow to load

    offsets = np.arange(len(array) + 1)
    while not (pa.types.is_integer(array.type) or pa.types.is_boolean(array.type)):
        if isinstance(array.type, pa.StructType):
            array = child_of(array)
        else:
            inner, array = entries_of(array)
            offsets = inner[offsets]
    if array.null_count:
        row = first_row + _row_of(offsets, int(pc.index(array.is_null(), True).as_py()))
        raise SourceUnreadable(f"row {row} holds a null inside its list of tokens; a token must be an integer", row=row)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    values = array.to_numpy(zero_copy_only=True)
    if values.dtype == np.uint64 and len(values) and values.max() > _MOST_TOKEN:
        place = int(np.argmax(values > _MOST_TOKEN))
        row = first_row + _row_of(offsets, place)
        raise SourceUnreadable(f"row {row} holds the token {values[place]}; they end at 2^63 - 1", row=row)
    return Documents(values=values, offsets=offsets)


def entries_of(array: pa.Array) -> tuple[Int64Array, pa.Array]:
    """Offsets of a list array's entries, from 0, and the entries."""
    if not isinstance(array.type, pa.ListType | pa.LargeListType | pa.MapType):
        array = array.cast(pa.large_list(array.type.value_field))
    offsets = array.offsets.to_numpy().astype(np.int64)
    entries = array.values[offsets[0] : offsets[-1]]
    offsets -= offsets[0]
    return offsets, entries


def child_of(array: pa.StructArray) -> pa.Array:
    """The one field of structs; null where the struct is."""
    return array.flatten()[0] if array.null_count else array.field(0)


def _row_of(offsets: Int64Array, place: int) -> int:
    return int(np.searchsorted(offsets, place, side="right")) - 1


def texts_of(array: pa.Array) -> pa.Array:
    """As string or large_string, which a binary becomes without a look at its bytes."""
    while isinstance(array.type, pa.StructType):
        array = child_of(array)
    if isinstance(array.type, pa.DictionaryType):
        array = array.dictionary_decode()
    if array.type in (pa.string_view(), pa.binary_view()):
        array = array.cast(pa.large_binary())
    if pa.types.is_binary(array.type):
        return array.view(pa.string())
    return array.view(pa.large_string()) if pa.types.is_large_binary(array.type) else array


def json_texts(array: pa.Array) -> pa.Array:
    """Rows as JSON: texts are JSON already; of lists of texts, with their nulls."""
    if not isinstance(array.type, (*LISTS, pa.StructType)) or not _has_lists(array.type):
        return texts_of(array)
    rows = [None if row is None else json.dumps(_plain(row), ensure_ascii=False) for row in array.to_pylist()]
    return pa.array(rows, pa.large_string())


def _has_lists(held: pa.DataType) -> bool:
    while isinstance(held, pa.StructType):
        held = held.field(0).type
    return isinstance(held, LISTS)


def _plain(held: Any) -> Any:
    """Without structs, of which each has one field, and with text for bytes."""
    if isinstance(held, dict):
        return _plain(next(iter(held.values())))
    if isinstance(held, list):
        return [_plain(value) for value in held]
    return held.decode("utf-8", "replace") if isinstance(held, bytes) else held


# --- What a Parquet column may hold, and its rows as documents.
#
# A row's tokens are all integers of all its lists, in order, however lists and structs are nested; a null row or list
# holds none; a null in an integer's place, or in that of a struct around it, is an error that names its row. Cost:
# tokens are not copied, only their offsets widened; text as its tokenizer.
#
# A column is named by its path through structs, `meta.text`; lists have no part in it, so that `turns.ids` may be the
# field `ids` of a struct, of a list of structs, or of both.

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
        raise SourceUnreadable(f"no column {column!r}; {_hint(column, [leaf.path for leaf in leaves], kind)}")
    leaf = leaves[found[0]]
    if pa.types.is_null(leaf.type):
        raise SourceUnreadable(
            f"column {column!r} has no value in the whole file, so that its writer gave it no type; leave the file "
            "out, or write it again with the type that the column has in other files"
        )
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
        arrays: of lists or strings, as `decode_pages` gives them.
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
        tokenizer: The tokenizer of texts and values.
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


def see_rows(array: pa.Array, kind: Kind, first_row: int, *, num_opening: int) -> SeenIds | None:
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


def _hint(column: str, paths: list[str], kind: Kind) -> str:
    inner = [path for path in paths if path.startswith(f"{column}.")]
    if inner and kind == "json":
        return f"it is a struct of {_listed(inner)}; write its rows as text of JSON"
    if inner:
        return f"it is a struct, name a field of it: {_listed(inner)}"
    nearest = difflib.get_close_matches(column, paths, n=1)
    return f"{f'did you mean {nearest[0]!r}? ' if nearest else ''}it has: {_listed(paths)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")


# --- What sources share whose rows are values of one named column, or member.
#
# A format whose rows are such values adds only how its files and pages are read.


class ColumnSource(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of such a source."""

    name: str
    column: str
    kind: Kind
    tokenizer: Tokenizer = BYTES
    """Encodes texts; unused with `tokens`."""
    map: MapEncoder | None = None
    """The function that rows go through; lengths are measured once their pages are known."""

    @property
    def transform_id(self) -> str:
        """See `FormatSource.transform_id`."""
        return transform_id_of(self.kind, self.tokenizer, self.map)

    @property
    def vocab_size(self) -> int | None:
        """See `FormatSource.vocab_size`."""
        return vocab_size_of(self.kind, self.tokenizer, self.map)

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `FormatSource.row_encoder`."""
        return row_encoder_of(self.kind, self.tokenizer, self.map)


# --- Rows as documents, where some rows cannot be read: those have no tokens.
#
# A row is bad or not by itself, whatever rows are beside it; a page decodes to the lengths that the index found.


def look_at_rows(
    array: pa.Array,
    kind: Kind,
    first_row: int,
    tokenizer: Tokenizer,
    bad: BadRows | None,
    *,
    num_opening: int = 0,
) -> tuple[Int64Array, SeenIds | None]:
    """Tokens of each row, [rows], and what is seen of their ids; bad rows have none.

    Args:
        array, kind, first_row, tokenizer: As `column.count_tokens`.
        bad: Takes the bad rows, those with ids that no model has too; None: the first one is an error, and the
            answer says which ids no model has.
        num_opening: Ids before all others that are not the file's.

    Raises:
        SourceUnreadable: A row is bad, and nobody takes it.
    """
    try:
        tokens = count_tokens(array, kind, first_row, tokenizer, num_opening=num_opening)
        seen = see_rows(array, kind, first_row, num_opening=num_opening)
        if bad is not None and seen is not None and seen.outside is not None:
            raise SourceUnreadable(f"holds the token {seen.outside.token}; ids go from 0 to {MOST_ID}")
        return tokens, seen
    except SourceUnreadable as error:
        if bad is None:
            raise
        if len(array) == 1:
            bad.add(first_row, reason_of(error))
            return np.zeros(1, np.int64), None
    half = len(array) // 2
    first, second = (
        look_at_rows(
            array.slice(start, stop - start),
            kind,
            first_row + start,
            tokenizer,
            bad,
            num_opening=0 if start else num_opening,
        )
        for start, stop in pairwise((0, half, len(array)))
    )
    return np.concatenate([first[0], second[0]]), join_seen([first[1], second[1]])


def reason_of(error: CatalogError) -> str:
    """What is wrong with a row, on one line, without its source and file."""
    return " ".join(error.message.split())


def documents_of_run(arrays: list[pa.Array], kind: Kind, run: PageRun) -> Documents:
    """The rows of a run; of a file with bad rows, lists without tokens are not looked at.

    Args:
        arrays, kind: As `column.to_documents`.
        run: Which the arrays were read from.

    Raises:
        SourceUnreadable: A row is bad that was not when it was indexed.
    """
    is_free = kind != "tokens"  # whose bytes may be any
    if is_free or run.tokens is None or not passes_over_rows(run) or sum(map(len, arrays)) != len(run.tokens):
        return to_documents(arrays, kind, run.first_row)
    parts: list[Documents] = []
    lengths = np.zeros(len(run.tokens), np.int64)
    row = 0
    for array in arrays:
        for start, stop in _with_tokens(run.tokens[row : row + len(array)]):
            part = to_documents([array.slice(start, stop - start)], kind, run.first_row + row + start)
            lengths[row + start : row + stop] = np.diff(part.offsets)
            parts.append(part)
        row += len(array)
    values = np.concatenate([part.values for part in parts]) if parts else np.zeros(0, np.int32)
    return Documents(values=values, offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def passes_over_rows(run: PageRun) -> bool:
    """Whether rows of a run may be bad: those that the catalog says have no tokens, in a file that has bad rows."""
    return run.has_bad_rows and run.tokens is not None and not run.tokens.all()


def _with_tokens(tokens: Int32Array) -> list[tuple[int, int]]:
    """Ranges of consecutive rows that have tokens."""
    borders = np.flatnonzero(np.diff(tokens > 0, prepend=False, append=False)).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))


# --- How large the lists are that maps give beside ids.
#
# A step of T tokens in S samples, of a source whose lists are so large, has at most T x `of_token` + S x `of_row`
# bytes of lists, since a row that begins in a sample ends in it, or is the one that continues. Cost: some array
# operations a list.

ROW_BYTES = 16
"""A row's length and place, int64 each, in each of the lists."""


def see_lists(lists: Mapping[str, pa.Array], tokens: Int64Array) -> ListBytes | None:
    """Look at the lists of some rows.

    Args:
        lists: By name, [n] lists of numbers.
        tokens: [n] tokens of each row; one without any is in no step.
    """
    has_tokens = tokens > 0
    if not lists or not has_tokens.any():
        return None
    num_bytes = np.full(len(tokens), ROW_BYTES * len(lists), np.int64)
    for array in lists.values():
        kind = np.dtype(array.type.value_type.to_pandas_dtype())
        is_widened = kind.kind == "u" and kind.itemsize in (2, 4)  # torch has no such types everywhere
        num_bytes += np.diff(array.offsets.to_numpy()) * (kind.itemsize << is_widened)
    found = num_bytes[has_tokens]
    return ListBytes(of_row=int(found.max()), of_token=int((-(-found // tokens[has_tokens])).max()))
