"""Rows of Arrow arrays as documents: bytes of texts, integers of lists, bytes or JSON of lists of texts.

In: an array of a column. Out: `Documents`, or an array of texts. Must hold: a document has all values of its row, in
order, however lists and structs are nested; a null row or list has none. Cost: integers and bytes are not copied, only
their offsets widened; JSON costs Python objects.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from torchmix.array_types import Int64Array
from torchmix.errors import SourceUnreadable
from torchmix.formats.source import Documents

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
