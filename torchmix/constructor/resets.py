"""Ids inside a row that end a document: where they are, and how they cut the pieces.

In: the tokens that were read, and the id after which each piece resets. Out: the places of these ids, and the pieces
cut after each of them. Must hold: packing stays as planned; a piece's padding belongs to its last part. Cost: 0.2 ns a
token for each distinct id, a few numpy passes over pieces and resets, and nothing if no source resets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.recipe.parts import Part
from torchmix.recipe.source.resets import sources_with_resets

NO_RESET = -1
"""Stands for the id of a source without `reset_id`."""


class CutPieces(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The n pieces of a replica, cut into p >= n contiguous parts, in memory order."""

    piece: Int64Array
    """[p] number of the piece, ascending."""
    start: Int64Array
    """[p] first token of the part among the replica's tokens, ascending."""
    tokens: Int64Array
    """[p] tokens, 1 or more."""
    padded_tokens: Int64Array
    """[p] tokens with padding."""


def find_resets(
    values: NDArray[np.integer[Any]],
    start: Int64Array,
    tokens: Int64Array,
    id_of_piece: Int64Array,
) -> Int64Array:
    """Places of the ids that end a document, ascending.

    Args:
        values: [N] token ids; anything in padding.
        start: [n] first token of each piece, ascending.
        tokens: [n] its tokens.
        id_of_piece: [n] id that ends a document in it, or NO_RESET.
    """
    found: list[Int64Array] = []
    for token in np.unique(id_of_piece[id_of_piece != NO_RESET]).tolist():
        places = np.flatnonzero(values == token)
        piece = np.searchsorted(start, places, side="right") - 1
        is_inside = (piece >= 0) & (places < (start + tokens)[piece]) & (id_of_piece[piece] == token)
        found.append(places[is_inside])
    return np.sort(np.concatenate([np.zeros(0, np.int64), *found]))


def cut_pieces(start: Int64Array, tokens: Int64Array, padded_tokens: Int64Array, resets: Int64Array) -> CutPieces:
    """Cut each piece after every reset in it that is not its last token.

    Args:
        start: [n] first token of each piece, ascending.
        tokens: [n] its tokens.
        padded_tokens: [n] the same with padding.
        resets: Places in pieces, ascending.
    """
    if not len(resets):
        return CutPieces(piece=np.arange(len(start)), start=start, tokens=tokens, padded_tokens=padded_tokens)
    stop = start + tokens
    piece = np.searchsorted(start, resets, side="right") - 1
    goes_on = resets + 1 < stop[piece]
    piece, cut = piece[goes_on], resets[goes_on] + 1
    piece_of_part = np.insert(np.arange(len(start)), piece + 1, piece)
    part_start = np.insert(start, piece + 1, cut)
    is_last = np.diff(piece_of_part, append=len(start)) > 0
    part_tokens = np.where(is_last, stop[piece_of_part], np.append(part_start[1:], 0)) - part_start
    padding = np.where(is_last, (padded_tokens - tokens)[piece_of_part], 0)
    return CutPieces(piece=piece_of_part, start=part_start, tokens=part_tokens, padded_tokens=part_tokens + padding)


def reset_ids_of(part: Part, sources: Sequence[str]) -> Int64Array | None:
    """The `reset_id` of each source, as `build` takes them."""
    ids = sources_with_resets(part.sources)
    return np.array([ids.get(name, NO_RESET) for name in sources]) if ids else None
