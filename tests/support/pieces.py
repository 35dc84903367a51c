"""Pieces made from their lengths alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchmix.planner.pack import Pieces
from torchmix.planner.plan import name_hash


def pieces_of(
    tokens: Sequence[int] | np.ndarray, *, drawn_step: int | Sequence[int] = 0, source: int = 0, first_row: int = 0
) -> Pieces:
    """Whole documents of the given lengths, in rows `first_row`, `first_row` + 1, and so on, of one source."""
    lengths = np.asarray(tokens, np.int64)
    zeros = np.zeros_like(lengths)
    return Pieces(
        stream=zeros + source,
        source=zeros + source,
        epoch=zeros,
        row=first_row + np.arange(len(lengths), dtype=np.int64),
        start=zeros,
        tokens=lengths,
        drawn_step=zeros + np.asarray(drawn_step, np.int64),
        document_tokens=lengths,
    )


def name_hashes(names: Sequence[str], pieces: Pieces) -> np.ndarray:
    """uint64 [n] hash of the name of each piece, of streams that are sources with these sorted names."""
    return np.array([name_hash(name, name) for name in names], np.uint64)[pieces.source]
