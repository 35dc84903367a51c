"""The values of a column as they are: bytes for tokens.

In: an Arrow array of binary or string. Out: uint8 values, end to end. Must hold: a row has as many tokens as its value
has bytes, a null none. So all that indexes and reads texts indexes and reads the images of a source, too: by page, by
range, with checksums. Cost: none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

See = Callable[[int, bytes], None]
"""Called with the row of a value and the value, while a file is scanned."""


class RawBytes:
    """Values as tokens; implements `tokenizer.Tokenizer`."""

    vocab_size = 256
    vocabulary = "raw bytes"

    def __init__(self, transform_id: str, see: See | None = None) -> None:
        """`see` is shown each value that is counted."""
        self.transform_id = transform_id
        self._see = see

    def tokenize(self, texts: pa.Array, where: str, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`."""
        lengths = self._lengths(texts)
        content = b"".join(value or b"" for value in _values(texts))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        return np.frombuffer(content, np.uint8), offsets

    def count_tokens(self, texts: pa.Array, where: str, first_row: int) -> NDArray[np.int64]:
        """See `tokenizer.Tokenizer`."""
        if self._see is not None:
            for row, value in enumerate(_values(texts)):
                if value is not None:
                    self._see(first_row + row, value)
        return self._lengths(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """See `tokenizer.Tokenizer`."""
        return f"{len(ids)} bytes"

    def _lengths(self, texts: pa.Array) -> NDArray[np.int64]:
        lengths = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
        return np.asarray(lengths, np.int64)


def _values(texts: pa.Array) -> list[bytes | None]:
    binary = pa.large_binary() if pa.types.is_large_string(texts.type) else pa.binary()
    values: list[bytes | None] = texts.view(binary).to_pylist()
    return values
