"""Tokens that no model is trained to predict: those that stand for images.

In: pieces of documents and where they belong, and the images in the documents. Out: the places of tokens whose label,
the next token, stands for an image. Must hold: a place lies inside its piece; the last token of a piece counts if the
token behind the piece stands for an image. Cost: a few array operations over the images of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.items import ItemTable


def unlabelled_places(
    tables: Mapping[int, ItemTable],
    source: NDArray[np.integer[Any]],
    rows: Int64Array,
    starts: Int64Array,
    tokens: Int64Array,
    places: Int64Array,
) -> Int64Array:
    """Places whose label stands for an image, in no order.

    Args:
        tables: Images of each source that has some, by its index.
        source, rows, starts, tokens, places: [n] pieces, as `Reader.read` takes them.
    """
    found = [np.zeros(0, np.int64)]
    for number, table in tables.items():
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
    return np.concatenate(found)
