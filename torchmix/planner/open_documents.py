"""Which documents the coming steps continue.

In: the cursor after a step. Out: documents that are given in part: longer than a sample and drawn in part, or with
deferred pieces; and the first token still to come of each. Must hold: no later step asks for an earlier token of these
documents. Cost: a search in the window of each source that has long documents, and has moved since the cursor before.
"""

from __future__ import annotations

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.planner.cursor import Cursor
from torchmix.planner.planner import Planner


class DocumentsToCome(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Documents that later steps continue. All arrays int64 [n]; each (source, row) once."""

    source: Int64Array
    """Index by sorted source name."""
    row: Int64Array
    start: Int64Array
    """The first token that is still to come."""


class BegunDocuments:
    """Follows the cursors of a planner; what is remembered of the one before decides nothing."""

    def __init__(self, planner: Planner) -> None:
        """Nothing is followed yet."""
        self._planner = planner
        self._streams = np.array(planner.streams_with_long_documents, np.int64)
        self._place = np.full((3, len(self._streams)), -1, np.int64)
        """Epoch, window and offset of these streams, as they were last."""
        self._drawn_in_part: dict[int, tuple[int, int, int]] = {}
        """By stream: source, row and next token."""

    def at(self, cursor: Cursor) -> DocumentsToCome:
        """The documents of which some pieces were given and others were not.

        Args:
            cursor: The cursor after a step.
        """
        self._follow(cursor)
        return _to_come(self._planner, cursor, [*self._drawn_in_part.values()])

    def _follow(self, cursor: Cursor) -> None:
        position, streams = cursor.position, self._streams
        place = np.array([position.epoch[streams], position.window[streams], position.offset[streams]])
        has_moved = (place != self._place).any(axis=0)
        self._place = place
        for s, (epoch, window, offset) in zip(streams[has_moved].tolist(), place[:, has_moved].T.tolist(), strict=True):
            document = self._planner.orders[s].open_document(epoch, window, offset) if offset > 0 else None
            if document is None:
                self._drawn_in_part.pop(s, None)
            else:
                self._drawn_in_part[s] = document


def _to_come(planner: Planner, cursor: Cursor, found: list[tuple[int, int, int]]) -> DocumentsToCome:
    """The documents drawn in part, which are found already, and those with deferred pieces."""
    pool = cursor.pool
    if len(pool):
        is_begun = pool.start > 0  # `concat` cuts any document
        if planner.streams_with_long_documents:
            is_begun |= pool.document_tokens > planner.part.batch.length
        found += zip(*(column[is_begun].tolist() for column in (pool.source, pool.row, pool.start)), strict=True)
    first: dict[tuple[int, int], int] = {}
    for source, row, start in found:
        first[source, row] = min(start, first.get((source, row), start))
    table = np.array([(*place, start) for place, start in first.items()], np.int64).reshape(-1, 3)
    return DocumentsToCome(source=table[:, 0], row=table[:, 1], start=table[:, 2])
