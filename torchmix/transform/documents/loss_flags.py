"""What a column says of the loss of tokens -> runs of tokens without loss.

In: the flags of each row, as the column is scanned. Out: how many each row has, and its runs. Must hold: 0, false and
numbers below 0, as labels of -100, mean no loss; all else means loss. Cost: a few array operations for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array

TRANSFORM_ID = "loss-1"


class LossFlags:
    """Takes the flags of one file; stands where a tokenizer stands."""

    transform_id = TRANSFORM_ID
    vocab_size = 2
    vocabulary = "flags"

    def __init__(self) -> None:
        """Nothing is seen yet."""
        self._without: dict[int, NDArray[np.bool_]] = {}

    def see(self, values: NDArray[np.integer[Any]], offsets: Int64Array, first_row: int, *, goes_on: bool) -> None:
        """Take the flags of some rows.

        Args:
            values: Of all rows, end to end.
            offsets: [rows + 1] where those of each begin; with `goes_on` they count one value before the first.
            first_row: Row of the file.
            goes_on: The first row's flags follow those that it had before.
        """
        without = values <= 0
        borders = np.maximum(offsets - goes_on, 0).tolist()
        for row, (start, stop) in enumerate(pairwise(borders), first_row):
            of_row = without[start:stop]
            if goes_on and row == first_row:
                of_row = np.concatenate([self._without.get(row, of_row[:0]), of_row])
            self._without[row] = of_row

    def count(self, row: int) -> int:
        """How many flags a row has."""
        return len(self._without.get(row, ()))

    def runs(self, row: int) -> tuple[Int64Array, Int64Array]:
        """Where the runs of a row's tokens without loss begin, and how long they are."""
        borders = np.flatnonzero(np.diff(self._without[row], prepend=False, append=False))
        return borders[::2], borders[1::2] - borders[::2]

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`; flags are never read."""
        raise NotImplementedError

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `tokenizer.Tokenizer`; flags are never read."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """See `tokenizer.Tokenizer`."""
        return f"{len(ids)} flags"
