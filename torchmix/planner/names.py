"""The names of pieces, as hashes.

In: the streams of a part and their sources. Out: for each piece the hash of its two names, `plan.name_hash`. Must hold:
no index enters a hash, so adding a stream or a source changes no other's. Cost: a SHA-256 a pair of names, once; a
table access a piece, and a binary search for a piece of a stream with several sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from torchmix.planner.pack import Pieces
from torchmix.planner.plan import name_hash


class PieceNames:
    """The hashes of all pairs of a stream and one of its sources."""

    def __init__(self, sources_of_stream: Mapping[str, Sequence[str]], sources: Sequence[str]) -> None:
        """Take the names.

        Args:
            sources_of_stream: Sources of each stream, by sorted name of the stream; sorted.
            sources: All sources, sorted.
        """
        number = {name: s for s, name in enumerate(sources)}
        self._num_sources = len(sources)
        only: list[int] = []
        pairs: list[tuple[int, int]] = []
        for s, (stream, members) in enumerate(sources_of_stream.items()):
            hashes = [name_hash(stream, source) for source in members]
            only.append(hashes[0])
            if len(members) > 1:
                pairs += [
                    (s * len(sources) + number[source], each) for source, each in zip(members, hashes, strict=True)
                ]
        self._only = np.array(only, np.uint64)
        """[S] hash of a stream with its first source."""
        self._pairs = np.array([pair for pair, _ in pairs], np.int64)
        """Streams with several sources: stream * number of sources + source, ascending."""
        self._hashes = np.array([each for _, each in pairs], np.uint64)

    def of(self, pieces: Pieces) -> NDArray[np.uint64]:
        """uint64 [n] hash of each piece's stream and source."""
        hashes: NDArray[np.uint64] = self._only[pieces.stream]
        if len(self._pairs):
            pair = pieces.stream * self._num_sources + pieces.source
            at = np.minimum(self._pairs.searchsorted(pair), len(self._pairs) - 1)
            hashes = np.where(self._pairs[at] == pair, self._hashes[at], hashes)
        return hashes
