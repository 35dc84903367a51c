"""Documents -> an Arrow array of rows.

In: token ids or bytes of texts end to end, and where each document begins. Out: a list array or a string array over the
same memory. Must hold: a row of tokens without any is an empty list, whatever the file has; a text is the file's, byte
for byte, and a null where the file has one. Cost: no copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def token_rows(values: NDArray[np.integer[Any]], offsets: NDArray[np.int64]) -> pa.LargeListArray:
    """Lists of integers over the memory of `values`; document i is `values[offsets[i]:offsets[i + 1]]`."""
    return pa.LargeListArray.from_arrays(_array(offsets), _array(values))


def text_rows(content: NDArray[np.uint8], offsets: NDArray[np.int64], is_valid: NDArray[np.bool_]) -> pa.Array:
    """Texts over the memory of `content`: text i is `content[offsets[i]:offsets[i + 1]]`, null unless it is valid."""
    num_null = len(is_valid) - int(np.count_nonzero(is_valid))
    validity = pa.py_buffer(np.packbits(is_valid, bitorder="little")) if num_null else None
    return pa.LargeStringArray.from_buffers(
        len(is_valid), pa.py_buffer(offsets), pa.py_buffer(content), validity, num_null
    )


def _array(values: NDArray[np.integer[Any]]) -> pa.Array:
    """The same memory as an Arrow array; `pa.array` would try pandas first."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])
