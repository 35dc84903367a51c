"""The documents of one window, in the order in which they are drawn.

In: rows, and the tokens that each counts for. Out: how far a draw gets that owes so many tokens. Must hold: documents
are taken while the midpoint of the next one lies below what is owed. Cost: one binary search a draw.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Window:
    """The documents of one window, in the order in which they are drawn."""

    rows: NDArray[np.int64]
    """[W] row of each document in its source."""
    ends: NDArray[np.int64]
    """[W + 1] tokens of the documents before each; starts with 0."""
    document_tokens: NDArray[np.int32] | None
    """[W] tokens of each whole document, as the catalog has them; None if those are what `ends` counts."""

    def stop(self, start: int, owed_tokens: int) -> tuple[int, int]:
        """Where a draw of `owed_tokens` (1 or more) that begins at document `start` stops, and the tokens it takes.

        Documents are taken while the midpoint of the next one lies below what is owed.
        """
        ends = self.ends.data  # single values of a memoryview cost a third of an array's
        before = ends[start]
        target = owed_tokens + before
        behind = bisect_left(ends, target, start)  # documents that begin below the target
        if behind > len(self.rows):
            stop = len(self.rows)
        else:
            is_beyond = ends[behind - 1] + ends[behind] >= 2 * target
            stop = max(start, behind - is_beyond)
        return stop, ends[stop] - before

    def tokens(self, document: int) -> int:
        """Tokens that document number `document` counts for."""
        ends = self.ends.data
        return int(ends[document + 1] - ends[document])
