"""Which long documents the coming steps go on with.

In: the cursor after a step. Out: documents of several samples of which some tokens are still to come, and the first of
these. Must hold: no later step asks an earlier token of them. Cost: a look-up for each source that stands in a window
with long documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchmix.planner.planner import Cursor, Planner

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DocumentsToCome:
    """Documents that later steps go on with. All arrays int64 [n]; each (source, row) once."""

    source: Ints
    """Index by sorted source name."""
    row: Ints
    start: Ints
    """The first token that is still to come."""


def documents_to_come(planner: Planner, cursor: Cursor) -> DocumentsToCome:
    """The documents of several samples that are drawn in part, or whose pieces are deferred.

    Args:
        planner: Whose orders the cursor's positions are of.
        cursor: After the step.
    """
    position, pool = cursor.position, cursor.pool
    found: list[tuple[int, int, int]] = []
    for s in planner.sources_with_long_documents:
        offset = int(position.offset[s])
        if offset > 0:
            document = planner.orders[s].open_document(int(position.epoch[s]), int(position.window[s]), offset)
            if document is not None:
                found.append((s, *document))
    if planner.sources_with_long_documents and len(pool):
        is_long = pool.document_tokens > planner.part.batch.length
        found += zip(*(column[is_long].tolist() for column in (pool.source, pool.row, pool.start)), strict=True)
    first: dict[tuple[int, int], int] = {}
    for source, row, start in found:
        first[source, row] = min(start, first.get((source, row), start))
    table = np.array([(*place, start) for place, start in first.items()], np.int64).reshape(-1, 3)
    return DocumentsToCome(source=table[:, 0], row=table[:, 1], start=table[:, 2])
