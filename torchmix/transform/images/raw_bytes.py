"""The values of a column as they are: bytes for tokens.

In: an Arrow array of lists of binaries or strings. Out: uint8 values, end to end. Must hold: a row has as many tokens
as its values have bytes together, a null none. So all that indexes and reads texts indexes and reads the images of a
source, too: by page, by range, with checksums. Cost: none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array

See = Callable[[int, list[bytes | None], bool], None]
"""Called while a file is scanned with each row and its values; True: they follow those that the row had before."""


class RawBytes:
    """Values as tokens; implements `tokenizer.Tokenizer`."""

    vocab_size = 256
    vocabulary = "raw bytes"

    def __init__(self, transform_id: str, see: See | None = None) -> None:
        """`see` is shown the values of each row that is counted."""
        self.transform_id = transform_id
        self._see = see

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`; a row is its bytes."""
        import pyarrow.compute as pc  # not needed for ids, and slow to load

        lengths = np.asarray(pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False), np.int64)
        content = b"".join(value or b"" for value in _bytes(texts))
        return np.frombuffer(content, np.uint8), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `tokenizer.Tokenizer`; a row is one value."""
        offsets = pa.array(np.arange(len(texts) + 1))
        return self.count_values(pa.LargeListArray.from_arrays(offsets, texts), first_row, goes_on=False)

    def count_values(self, lists: pa.LargeListArray, first_row: int, *, goes_on: bool) -> Int64Array:
        """Bytes of the values of each row, [rows].

        Args:
            lists: [rows] of strings or binaries, none of them null; its values may be.
            first_row: Row of the first list, in the file.
            goes_on: The first list holds one value that is not in the file, and the last values of the row before.
        """
        borders = lists.offsets.to_numpy().tolist()
        values = _bytes(lists.values)
        counts = np.zeros(len(borders) - 1, np.int64)
        for row, (start, stop) in enumerate(pairwise(borders)):
            of_row = values[start:stop]
            counts[row] = sum(len(value or b"") for value in of_row)
            if self._see is not None:
                is_rest = goes_on and not row
                self._see(first_row + row, of_row[1:] if is_rest else of_row, is_rest)
        return counts

    def decode(self, ids: Sequence[int]) -> str:
        """See `tokenizer.Tokenizer`."""
        return f"{len(ids)} bytes"


def _bytes(texts: pa.Array) -> list[bytes | None]:
    binary = pa.large_binary() if pa.types.is_large_string(texts.type) else pa.binary()
    values: list[bytes | None] = texts.view(binary).to_pylist()
    return values
