"""Rows as a file holds them -> tokens: what a tokenizer, or a function of the user's, makes of single rows.

In: rows of a source, any of them in any order, with their numbers and seeds. Out: ids of each row, end to end. Must
hold: pure, and row by row: what becomes of a row depends on that row, its number, epoch and seed alone, never on the
rows beside it; so rows are encoded in whatever batches are at hand. Its length follows from the row's content alone:
the index measures it once. Cost: that of the tokenizer or the function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.transform.tokenizer import Tokenizer


class RowsToEncode(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Rows of one source, or of several with the same encoder, in one epoch."""

    rows: pa.Array
    """[n] large_string, or large_list of integers: the column, as the file holds it; none is null."""
    row: Int64Array
    """[n] number of each row in its source; while a file is indexed, in the file."""
    epoch: int
    """Pass over the source, from 0."""
    seed: NDArray[np.uint64]
    """[n] a key of the recipe's seed, source, row and epoch; 0 while a file is indexed."""
    first_row: int
    """Row of the file that the first one is, for messages."""


class EncodedRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What became of n rows."""

    values: NDArray[np.integer[Any]]
    """[tokens] ids of all rows, end to end."""
    offsets: Int64Array
    """[n + 1] where each row begins in them."""
    others: Mapping[str, pa.Array] = msgspec.field(default_factory=dict)
    """[n] lists of numbers of each row, by name, that travel with its ids."""


def join_encoded(parts: Sequence[EncodedRows]) -> EncodedRows:
    """Rows of several parts, end to end; where one of them has no such other array, its rows have empty lists."""
    begins = np.cumsum([0, *(int(part.offsets[-1]) for part in parts)])
    offsets = [part.offsets[1:] + begin for part, begin in zip(parts, begins.tolist(), strict=False)]
    types = {name: array.type for part in parts for name, array in part.others.items()}
    others = {
        name: pa.concat_arrays(
            [part.others[name] if name in part.others else pa.nulls(len(part.offsets) - 1, type) for part in parts]
        )
        for name, type in types.items()
    }
    return EncodedRows(
        values=np.concatenate([part.values for part in parts]),
        offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        others=others,
    )


class RowEncoder(Protocol):
    """Turns rows into tokens. Equal encoders may encode rows of several sources together."""

    @property
    def takes(self) -> Literal["text", "tokens"]:
        """What its rows are."""

    @property
    def is_mapped(self) -> bool:
        """Whether number, epoch and seed of a row matter."""

    def encode(self, asked: RowsToEncode) -> EncodedRows:
        """Encode rows.

        Raises:
            SourceUnreadable: A row cannot be encoded.
        """


class TextEncoder(msgspec.Struct, frozen=True):
    """A tokenizer as an encoder of rows."""

    tokenizer: Tokenizer

    @property
    def takes(self) -> Literal["text", "tokens"]:
        """See `RowEncoder`."""
        return "text"

    @property
    def is_mapped(self) -> bool:
        """See `RowEncoder`."""
        return False

    def encode(self, asked: RowsToEncode) -> EncodedRows:
        """See `RowEncoder`."""
        values, offsets = self.tokenizer.tokenize(asked.rows, asked.first_row)
        return EncodedRows(values=values, offsets=offsets)


def row_array(values: NDArray[np.integer[Any]], offsets: Int64Array, takes: str) -> pa.Array:
    """Rows of bytes or ids as an Arrow array over the same memory.

    Args:
        values: [offsets[-1]] bytes of texts as uint8, or ids.
        offsets: [n + 1] from 0 on.
        takes: `text` or `tokens`.
    """
    num_rows = len(offsets) - 1
    begins = pa.py_buffer(np.ascontiguousarray(offsets))
    if takes == "text":
        buffers = [None, begins, pa.py_buffer(np.ascontiguousarray(values))]
        return pa.Array.from_buffers(pa.large_string(), num_rows, buffers)
    ids = pa.array(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.large_list(ids.type), num_rows, [None, begins], children=[ids])
