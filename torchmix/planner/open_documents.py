"""Which documents the coming steps continue.

In: the cursor after a step. Out: documents that are given in part: longer than a sample and drawn in part, or with
deferred pieces; and the first token still to come of each. Must hold: no later step asks for an earlier token of these
documents. Cost: a search in the window of each source that has long documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.planner.cursor import Cursor
from torchmix.planner.planner import Planner


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentsToCome:
    """Documents that later steps continue. All arrays int64 [n]; each (source, row) once."""

    source: Int64Array
    """Index by sorted source name."""
    row: Int64Array
    start: Int64Array
    """The first token that is still to come."""


def documents_to_come(planner: Planner, cursor: Cursor) -> DocumentsToCome:
    """The documents that are drawn in part, or of which some pieces were given and others are deferred.

    Args:
        planner: The planner that made the cursor.
        cursor: The cursor after the step.
    """
    position, pool = cursor.position, cursor.pool
    found: list[tuple[int, int, int]] = []
    for s in planner.streams_with_long_documents:
        offset = int(position.offset[s])
        if offset > 0:
            document = planner.orders[s].open_document(int(position.epoch[s]), int(position.window[s]), offset)
            if document is not None:
                found.append(document)
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
