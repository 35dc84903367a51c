"""The next window of each stream, made ahead, a few a step.

In: where the streams stand after each step, and what the step asked of them. Out: windows, kept by their orders until
they are drawn from. Must hold: no order changes; a window that is needed before it was made ahead is made by the draw.
Cost: a few array operations a step, and A_STEP windows. Streams of equal size reach the end of a window in the same
step: without this file, 300 of them would make 300 windows in that step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.draw import Position
from torchmix.mixture.order import StreamOrder

A_STEP = 8
"""Windows made after a step; more where that many would come too late."""
MOST_STEPS = 64
"""Most steps ahead that a window is made; few streams need fewer, since a window takes memory."""


class NextWindows:
    """Makes windows before they are needed; decides nothing."""

    def __init__(self, orders: Sequence[StreamOrder], max_epochs: Int64Array) -> None:
        """`max_epochs`: int64 [S] epochs that each stream may give."""
        self._orders = orders
        self._max_epochs = max_epochs
        self._most_steps = min(MOST_STEPS, 2 + 2 * len(orders) // A_STEP)
        self._after: Position | None = None
        # Arrays [S], about the current window of each stream.
        self._is_known = np.zeros(len(orders), np.bool_)
        self._is_made = np.zeros(len(orders), np.bool_)
        self._left_tokens = np.zeros(len(orders), np.int64)

    def follow(self, before: Position, after: Position, asked: Int64Array) -> None:
        """Make what will be due soon.

        Args:
            before, after: Where the streams stood before a step, and stand after it.
            asked: int64 [S] tokens that the step asked of each.
        """
        if before is not self._after:
            self._is_known[:] = False
        self._after = after
        self._is_known &= (before.window == after.window) & (before.epoch == after.epoch)
        self._left_tokens -= before.debt + asked - after.debt  # less what each stream has given
        for s in np.flatnonzero(~self._is_known & (asked > 0)).tolist():
            place = int(after.epoch[s]), int(after.window[s])
            left = self._orders[s].left_tokens(*place, int(after.offset[s]))
            if left is not None:
                self._left_tokens[s], self._is_known[s], self._is_made[s] = left, True, False
        steps_left = self._left_tokens // np.maximum(asked, 1)
        is_due = self._is_known & ~self._is_made & (asked > 0) & (steps_left >= 1) & (steps_left <= self._most_steps)
        due = np.flatnonzero(is_due)
        due = due[np.argsort(steps_left[due], kind="stable")]
        # The first k windows are in time if each step that is left before the k-th is due makes one.
        needed = -(-np.arange(1, len(due) + 1) // steps_left[due])
        for s in due[: max(A_STEP, int(needed.max(initial=0)))].tolist():
            self._is_made[s] = True
            place = self._orders[s].following(int(after.epoch[s]), int(after.window[s]))
            if place[0] < self._max_epochs[s]:
                self._orders[s].make_ahead(*place)
