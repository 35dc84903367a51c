"""Names for the types of arrays and numbers that many files take and give."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
"""Lengths, tokens, boundaries."""
Int64Array = NDArray[np.int64]
"""Rows, positions, offsets, sums."""
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A number of a record that is read from bytes: one that an array can hold."""
