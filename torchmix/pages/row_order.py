"""The rows of one epoch, window by window.

In: a source's order and an epoch. Out: row numbers. Must hold: over all windows every row comes exactly once; any
window can be asked alone, so a reader resumes from three numbers: epoch, window, rows of it already used. Cost: that of
the window, see `mixture.order`.
"""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from torchmix.mixture.order import SourceOrder
from torchmix.recipe.options import whole_number


class RowOrder:
    """A sequence of windows: `len(order)` of them, `order[w]` the rows of one, `for rows in order` all in turn."""

    def __init__(self, order: SourceOrder, epoch: int) -> None:
        self._order = order
        self._epoch = epoch

    def __len__(self) -> int:
        """Windows of the epoch."""
        return self._order.num_windows

    def __getitem__(self, window: SupportsIndex) -> NDArray[np.int64]:
        """Rows of a window in [0, len(self)), in the order in which to use them.

        Raises:
            IndexError: There is no such window.
            OptionError: It is no whole number.
        """
        window = whole_number("permuted_order", "window", window, -(2**63))
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of an epoch of {len(self)}")
        return self._order.window(self._epoch, window).rows
