"""Ramps: values that rise by 0 or 1 a place, from a given value at each of given places.

In: where each ramp starts and with which value. Out: the caller's array, filled to its end. Positions that begin again
at each document, the number of a document's source, and the index of a rank's slice are ramps.

Cost: two passes over the array in place, 0.6 ns a value on one core. np.repeat alone is faster, but takes fresh memory
of the array's size, and the first touch of that costs more than all the work (see `memory.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def fill_ramps(start: NDArray[np.int64], value: NDArray[Any], *, slope: int, out: NDArray[Any]) -> None:
    """Write out[start[i] + k] = value[i] + slope * k, up to the next start.

    Args:
        start: [n] places in out, rising.
        value: [n] first value of each ramp.
        slope: What each place adds to the one before.
        out: Integers, written in place; no meaning before start[0].
    """
    # The array holds differences first, then their running sum. The one at a start leads from the value that the ramp
    # before has reached; before start[0] that is a ramp which rises from 0 just outside the array.
    reached = np.concatenate([[slope], value])[:-1] + slope * (np.diff(start, prepend=0) - 1)
    out[:] = slope
    out[start] = value - reached
    np.cumsum(out, dtype=out.dtype, out=out)
