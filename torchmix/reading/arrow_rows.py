"""Documents -> an Arrow array of rows.

In: token ids end to end, and where each document begins. Out: a list array over the same memory; or a string array of
documents that the bytes tokenizer made. Must hold: a row of tokens without any is an empty list, whatever the file has;
a text is the file's, byte for byte, and a null where the file has one. Cost: lists none; texts about 1 ns a byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT


def token_rows(values: NDArray[np.integer[Any]], offsets: NDArray[np.int64]) -> pa.LargeListArray:
    """Lists of integers over the memory of `values`; document i is `values[offsets[i]:offsets[i + 1]]`."""
    return pa.LargeListArray.from_arrays(_array(offsets), _array(values))


def text_rows(values: NDArray[np.integer[Any]], offsets: NDArray[np.int64]) -> pa.LargeStringArray:
    """The texts of documents that the bytes tokenizer made; other arguments as for `token_rows`."""
    lengths = np.diff(offsets)
    is_valid = lengths > 0  # a text ends with a token of its own, a null has none
    text_offsets = np.zeros(len(offsets), np.int64)
    np.cumsum(lengths - is_valid, out=text_offsets[1:])
    content = values[offsets[0] : offsets[-1]]
    content = content[content != END_OF_DOCUMENT].astype(np.uint8)
    num_null = int(len(lengths) - np.count_nonzero(is_valid))
    validity = pa.py_buffer(np.packbits(is_valid, bitorder="little")) if num_null else None
    return pa.LargeStringArray.from_buffers(
        len(lengths), pa.py_buffer(text_offsets), pa.py_buffer(content), validity, num_null
    )


def _array(values: NDArray[np.integer[Any]]) -> pa.Array:
    """The same memory; `pa.array` looks first whether pandas is there, and what it would say."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])
