"""The pieces of several steps and replicas, asked for at once.

In: pieces by any key. Out: the tokens of each. Must hold: as if each had been asked for alone; a page that several of
them need is decoded once. Cost: one call of the reader.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.constructor.build import ReplicaPieces
from torchmix.reader.pieces.piece_copy import OtherRows, Tokens
from torchmix.reader.protocol import StepReader

Key = TypeVar("Key", bound=Hashable)


def read_together(
    reader: StepReader, pieces_of: Mapping[Key, ReplicaPieces], lengths: Sequence[int]
) -> dict[Key, Tokens]:
    """Tokens of each, in memory that the next call uses again.

    Args:
        reader: Who reads.
        pieces_of: At least one.
        lengths: Tokens of a sample of each.

    Raises:
        TorchmixError: Some piece cannot be read.
    """
    sizes = [pieces.num_samples * length for pieces, length in zip(pieces_of.values(), lengths, strict=True)]
    stops = list(accumulate(sizes))
    starts = [stop - size for stop, size in zip(stops, sizes, strict=True)]

    def wanted_places() -> list[Int64Array]:
        of_each = zip(pieces_of.values(), lengths, starts, strict=True)
        return [pieces.places(length) + start for pieces, length, start in of_each]

    def of_all(name: str) -> NDArray[Any]:
        return _joined([getattr(pieces, name) for pieces in pieces_of.values()])

    tokens = reader.read(
        of_all("source"),
        of_all("row"),
        of_all("start"),
        of_all("tokens"),
        places=_joined(wanted_places()),
        num_places=stops[-1],
        epochs=of_all("epoch"),
    )
    found: dict[Key, Tokens] = {}
    first = 0
    for (key, pieces), start, stop in zip(pieces_of.items(), starts, stops, strict=True):
        last = first + len(pieces.row)
        found[key] = tokens_of_part(tokens, (first, last), (start, stop))
        first = last
    return found


def tokens_of_part(tokens: Tokens, pieces: tuple[int, int], places: tuple[int, int]) -> Tokens:
    """The tokens of some consecutive pieces, which lie in a range of places."""
    (first, last), (start, stop) = pieces, places
    unlabelled = tokens.unlabelled
    return Tokens(
        values=tokens.values[start:stop],
        successors=tokens.successors[first:last],
        others=tuple(_cut(other, first, last) for other in tokens.others),
        unlabelled=None if unlabelled is None else unlabelled[(unlabelled >= start) & (unlabelled < stop)] - start,
    )


def _cut(other: OtherRows, first: int, last: int) -> OtherRows:
    """The rows that begin with some of the pieces, which are numbered from 0 on."""
    chosen = np.flatnonzero((other.piece >= first) & (other.piece < last))
    return other.only(chosen, other.piece[chosen] - first)


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
