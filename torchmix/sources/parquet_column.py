"""What a Parquet column may hold, and its rows as documents.

In: the Arrow schema of a file, and Arrow arrays of one column. Out: a clear error or none; `Documents`, or their
lengths alone. Two kinds: `tokens`, a list of integers of any width, used as they are, and `text`, a string that the
bytes tokenizer turns into ids. Must hold: a null row is a document of no tokens, and a null inside a list is an error
that names its row. Cost: tokens are not copied, only their offsets widened; text as in bytes_tokenizer.py.
"""

from __future__ import annotations

import difflib
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from torchmix.errors import SourceUnreadable
from torchmix.sources.source import Documents, Int64Array
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.tokenizer import Tokenizer

Kind = Literal["tokens", "text"]

TOKENS_TRANSFORM_ID = "tokens-1"


def check_column(schema: pa.Schema, column: str, kind: Kind, where: str) -> None:
    """See that a file has the column, and that it holds what `kind` says; `where` begins every message.

    Raises:
        SourceUnreadable: it has not, or it holds something else.
    """
    names: list[str] = schema.names
    if column not in names:
        parent = column.split(".")[0]
        if parent in names and parent != column:
            hint = f"{parent!r} is a column of type {schema.field(parent).type}; nested fields are not read, flatten it"
        else:
            nearest = difflib.get_close_matches(column, names, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            hint += f"it has: {', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
        raise SourceUnreadable(f"{where}: no column {column!r}; {hint}")
    if names.count(column) > 1:
        raise SourceUnreadable(f"{where}: {names.count(column)} columns are named {column!r}; there must be one")
    held_type = schema.field(column).type
    is_tokens, is_text = _holds_tokens(held_type), _holds_text(held_type)
    if kind == "tokens" and not is_tokens:
        hint = "; use `text` with a tokenizer for it" if is_text else ""
        raise SourceUnreadable(f"{where}: column {column!r} is {held_type}, not a list of integers{hint}")
    if kind == "text" and not is_text:
        hint = "; use `tokens` for it, without a tokenizer" if is_tokens else ""
        raise SourceUnreadable(f"{where}: column {column!r} is {held_type}, not a string{hint}")


def transform_id_of(kind: Kind, tokenizer: Tokenizer) -> str:
    """What turns rows into tokens, with its version; of texts the tokenizer's."""
    return tokenizer.transform_id if kind == "text" else TOKENS_TRANSFORM_ID


def to_documents(
    arrays: list[pa.Array], kind: Kind, where: str, first_row: int, tokenizer: Tokenizer = BYTES
) -> Documents:
    """The rows of some arrays, end to end.

    Args:
        arrays: of list<integer> or string, as `parquet_page` gives them.
        first_row: number of the first row, for messages.
        tokenizer: of texts.

    Raises:
        SourceUnreadable: a null inside a list, or a text that the tokenizer refuses.
    """
    parts = []
    for array in arrays:
        if kind == "text":
            values, offsets = tokenizer.tokenize(array, where, first_row)
            parts.append(Documents(values=values, offsets=offsets))
        else:
            parts.append(_list_documents(array, where, first_row))
        first_row += len(array)
    if len(parts) == 1:
        return parts[0]
    lengths = [np.diff(part.offsets) for part in parts]
    return Documents(
        values=np.concatenate([part.values for part in parts]) if parts else np.zeros(0, dtype=np.int32),
        offsets=np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *lengths])),
    )


def count_tokens(array: pa.Array, kind: Kind, where: str, first_row: int, tokenizer: Tokenizer = BYTES) -> Int64Array:
    """Tokens of each row, [rows]; as `to_documents`, without making them."""
    if kind == "text":
        return tokenizer.count_tokens(array, where, first_row)
    return np.diff(_list_documents(array, where, first_row).offsets)


def _list_documents(array: pa.Array, where: str, first_row: int) -> Documents:
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values[offsets[0] : offsets[-1]]
    offsets -= offsets[0]
    if values.null_count:
        place = int(pc.index(values.is_null(), True).as_py())
        row = first_row + int(np.searchsorted(offsets, place, side="right")) - 1
        raise SourceUnreadable(f"{where}: row {row} holds a null inside its list of tokens; a token must be an integer")
    return Documents(values=values.to_numpy(zero_copy_only=True), offsets=offsets)


def _plain(held_type: pa.DataType) -> pa.DataType:
    """The type of the values, without what Arrow puts around them."""
    while True:
        if isinstance(held_type, pa.BaseExtensionType):
            held_type = held_type.storage_type
        elif pa.types.is_dictionary(held_type):
            held_type = held_type.value_type
        else:
            return held_type


def _holds_tokens(held_type: pa.DataType) -> bool:
    held_type = _plain(held_type)
    is_list = pa.types.is_list(held_type) or pa.types.is_large_list(held_type) or pa.types.is_fixed_size_list(held_type)
    return bool(is_list and pa.types.is_integer(_plain(held_type.value_type)))


def _holds_text(held_type: pa.DataType) -> bool:
    return str(_plain(held_type)) in ("string", "large_string", "string_view")
