"""Pieces asked of a reader in tests, and what must come back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.support.catalogs import World
from torchmix.reader.protocol import StepReader, WantedPieces


class Pieces(NamedTuple):
    """[n] each."""

    source: NDArray[np.int32]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    tokens: NDArray[np.int64]

    def wanted(self, *, gap: int = 0) -> WantedPieces:
        """What a reader is asked for, with `gap` places that nothing belongs to around each piece."""
        ends = np.cumsum(self.tokens + gap)
        return WantedPieces(
            source=self.source,
            row=self.rows,
            epoch=np.zeros_like(self.rows),
            start=self.starts,
            tokens=self.tokens,
            places=ends - self.tokens - gap // 2,
            num_places=int(ends[-1]) if len(ends) else 0,
        )


def pieces(*asked: tuple[int, int, int, int]) -> Pieces:
    """Pieces written as (source, row, start, tokens)."""
    columns = np.array(asked, np.int64).reshape(-1, 4).T
    return Pieces(columns[0].astype(np.int32), *columns[1:])


def random_pieces(world: World, rng: np.random.Generator, count: int) -> Pieces:
    """Pieces of random sources, rows and spans: whole documents, heads, tails, middles and nothing at all."""
    names = sorted(world.documents)
    asked = []
    for source in rng.integers(0, len(names), count).tolist():
        row = int(rng.integers(0, len(world.documents[names[source]])))
        length = len(world.documents[names[source]][row])
        start = int(rng.integers(0, length + 1)) if rng.random() < 0.5 else 0
        stop = int(rng.integers(start, length + 1)) if rng.random() < 0.5 else length
        asked.append((source, row, start, stop - start))
    return pieces(*asked)


def whole_documents(world: World) -> Pieces:
    """Every document of every source once, in order."""
    names = sorted(world.documents)
    return pieces(
        *(
            (source, row, 0, len(document))
            for source, name in enumerate(names)
            for row, document in enumerate(world.documents[name])
        )
    )


def read_with_successors(reader: StepReader, asked: Pieces) -> NDArray[np.integer[Any]]:
    """What the reader gives, as one array: each piece and behind it its successor. Places leave gaps on purpose."""
    wanted = asked.wanted(gap=3)
    read = reader.read(wanted)
    parts = [read.values[:0]]
    for place, tokens, successor in zip(wanted.places.tolist(), asked.tokens.tolist(), read.successors, strict=True):
        parts += [read.values[place : place + tokens], np.array([successor], read.values.dtype)]
    return np.concatenate(parts)


def expected(world: World, asked: Pieces) -> NDArray[np.int64]:
    """Tokens of each piece and the one that follows in the document, 0 at its end; from the documents themselves."""
    names = sorted(world.documents)
    parts: list[Any] = [np.zeros(0, np.int64)]
    for source, row, start, tokens in zip(*(column.tolist() for column in asked), strict=True):
        document = world.documents[names[source]][row]
        successor = document[start + tokens] if start + tokens < len(document) else 0
        parts.append([*document[start : start + tokens], successor])
    return np.concatenate(parts)
