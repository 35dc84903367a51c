"""Pieces made from their lengths alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchmix.planner.pack import Pieces


def pieces_of(
    tokens: Sequence[int] | np.ndarray, *, drawn_step: int | Sequence[int] = 0, source: int = 0, first_row: int = 0
) -> Pieces:
    """Whole documents of the given lengths, in rows `first_row`, `first_row` + 1, and so on, of one source."""
    lengths = np.asarray(tokens, np.int64)
    zeros = np.zeros_like(lengths)
    return Pieces(
        source=zeros + source,
        epoch=zeros,
        row=first_row + np.arange(len(lengths), dtype=np.int64),
        start=zeros,
        tokens=lengths,
        drawn_step=zeros + np.asarray(drawn_step, np.int64),
        document_tokens=lengths,
    )
