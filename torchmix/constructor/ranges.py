"""Ranges of a flat array, copied end to end by native code.

In: an array cut into ranges of tens to thousands of values, and which of them are wanted, in which order. Out: the
caller's array, filled.

Cost: 0.5 ns a value for ranges of 800 values, 0.9 ns for ranges of 60, on one core. A mask of the values takes 1.2 and
2 ns, an index per value 1.5 ns, a slice per range in Python 0.9 and 6 ns. pyarrow has the loop we want, a memcpy per
range, as `take` on binary strings, so the ranges pose as strings here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

BLOCK = 1 << 18
"""Values that pyarrow copies at a time, or one range if it is longer: its result is memory on the way to `out`, and a
small block gets the memory of the last one again."""


def copy_ranges(values: NDArray[Any], cuts: NDArray[np.int64], wanted: NDArray[np.int64], *, out: NDArray[Any]) -> None:
    """Copy the ranges `wanted`, one behind the other.

    Args:
        values: [n], contiguous, of any fixed-size dtype.
        cuts: [k + 1] positions in values, never falling, in [0, n]; range i is values[cuts[i] : cuts[i + 1]].
        wanted: [r] numbers of ranges, each in [0, k), in any order and as often as liked.
        out: As long as the wanted ranges together; its dtype may be wider than that of values.
    """
    cuts_bytes = pa.py_buffer(cuts * values.dtype.itemsize)
    strings = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(cuts) - 1, [None, cuts_bytes, pa.py_buffer(values)]
    )
    stop_of_wanted = np.cumsum(cuts[wanted + 1] - cuts[wanted])
    first, start = 0, 0
    while start < len(out):
        # At least one range, and behind it those that fill the block.
        after = max(first + 1, int(np.searchsorted(stop_of_wanted, start + BLOCK, side="right")))
        stop = int(stop_of_wanted[after - 1])
        if stop > start:  # pyarrow makes no buffer for no bytes
            copied = strings.take(pa.array(wanted[first:after])).buffers()[2]
            out[start:stop] = np.frombuffer(copied, values.dtype)
        first, start = after, stop
