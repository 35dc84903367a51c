"""How large the lists are that maps give beside ids.

In: lists of rows as a map gives them. Out: the most bytes of a row, and of a row over its tokens, as a step holds them.
Must hold: a step of T tokens in S samples, of a source whose lists are so large, has at most T x `of_token` +
S x `of_row` bytes of lists, since a row that begins in a sample ends in it, or is the one that goes on. Cost: some
array operations a list.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import ListBytes

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
