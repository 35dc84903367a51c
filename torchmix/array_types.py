"""Names for the types of arrays that many files take and give.

In and out: nothing; for signatures alone. Must hold: a name stands here once, and every room may import it. Cost: none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
"""Lengths, tokens, boundaries."""
Int64Array = NDArray[np.int64]
"""Rows, positions, offsets, sums."""
