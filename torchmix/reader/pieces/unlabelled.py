"""Tokens that no model is trained to predict: those that stand for images, and those without loss.

In: pieces of documents and where they belong, and the images and runs without loss in the documents. Out: the places of
tokens whose label, the next token, is one of these. Must hold: a place lies inside its piece; the last token of a piece
counts if the token behind the piece does. Cost: a few array operations over the items of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.items import ItemTable
from torchmix.catalog.settings import IMAGE_BYTES
from torchmix.catalog.store import SourceCatalog
from torchmix.formats.documents.item_kinds import NO_LOSS
from torchmix.formats.images.headers import IMAGE


def tables_without_labels(sources: Sequence[SourceCatalog]) -> list[tuple[int, ItemTable]]:
    """Items of sources whose tokens are no labels, each with the number of its source."""
    return [
        (number, source.sizes.items[kind])
        for number, source in enumerate(sources)
        for kind in (IMAGE, NO_LOSS)
        if kind in source.sizes.items and source.tokenizer != IMAGE_BYTES
    ]


def unlabelled_places(
    tables: Sequence[tuple[int, ItemTable]],
    source: NDArray[np.integer[Any]],
    rows: Int64Array,
    starts: Int64Array,
    tokens: Int64Array,
    places: Int64Array,
) -> Int64Array:
    """Places without a label, each once, in no order.

    Args:
        tables: From `tables_without_labels`.
        source, rows, starts, tokens, places: [n] pieces, as `Reader.read` takes them.
    """
    found = [np.zeros(0, np.int64)]
    for number, table in tables:
        piece = np.flatnonzero(source == number)
        first = np.asarray(table.first_item_of_row[rows[piece]], np.int64)
        count = np.asarray(table.first_item_of_row[rows[piece] + 1], np.int64) - first
        item = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
        piece = np.repeat(piece, count)
        offset = np.asarray(table.offset[item], np.int64)
        begin = np.maximum(offset - 1, starts[piece])
        stop = np.minimum(offset - 1 + np.asarray(table.tokens[item], np.int64), starts[piece] + tokens[piece])
        width = np.maximum(stop - begin, 0)
        target = places[piece] + begin - starts[piece]
        found.append(np.arange(width.sum()) + np.repeat(target - (np.cumsum(width) - width), width))
    joined = np.concatenate(found)
    if len({number for number, _ in tables}) == len(tables) or not len(joined):
        return joined  # runs of one table never overlap
    is_without = np.zeros(int(joined.max()) + 1, np.bool_)
    is_without[joined] = True
    return np.flatnonzero(is_without)
