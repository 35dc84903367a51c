"""What a step draws from each document: a stretch of consecutive tokens.

In: parts of documents as they are drawn, by stream, in each stream's own order. Out: the same tokens, with the parts of
one document joined to one stretch. Must hold: a stretch begins and ends at the border of a piece. Cost: a few array
operations; nothing to join where every part begins its document.
"""

from __future__ import annotations

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array


class Stretches(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Stretches of documents, in order. All arrays int64 [n]."""

    stream: Int64Array
    """Index by sorted stream name: local to this process, in no key and no digest."""
    epoch: Int64Array
    row: Int64Array
    """Row in the space of the stream."""
    start: Int64Array
    """First token of the stretch in its document; a multiple of the tokens of a sample."""
    tokens: Int64Array
    """Tokens that count: after truncation, if the recipe truncates."""
    document_tokens: Int64Array
    """Tokens of the whole document, as the catalog has them."""

    def take(self, order: Int64Array | NDArray[np.bool_]) -> Stretches:
        """The stretches at `order` (positions or a mask)."""
        return Stretches(**{name: getattr(self, name)[order] for name in _COLUMNS})


_COLUMNS = Stretches.__struct_fields__


def joined(parts: list[Stretches]) -> Stretches:
    """One table by stream; parts that follow each other in a document are joined, parts of 0 tokens dropped.

    Args:
        parts: Each by stream, in the order in which they were drawn.
    """
    given = [part for part in parts if len(part.row)]
    table = given[0] if given else Stretches(**{name: np.zeros(0, np.int64) for name in _COLUMNS})
    if len(given) > 1:
        columns = {name: np.concatenate([getattr(part, name) for part in given]) for name in _COLUMNS}
        table = Stretches(**columns).take(columns["stream"].argsort(kind="stable"))
    if not table.tokens.all():
        table = table.take(table.tokens > 0)
    if not table.start.any():
        return table
    goes_on = table.start[1:] == (table.start + table.tokens)[:-1]
    for same in (table.stream, table.epoch, table.row):
        goes_on &= same[1:] == same[:-1]
    if not goes_on.any():
        return table
    first = np.flatnonzero(np.append(True, ~goes_on))
    return replace(table.take(first), tokens=np.add.reduceat(table.tokens, first))
