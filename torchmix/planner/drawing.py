"""Draws from the streams of a part, and the windows that draws keep.

In: where the streams stand, integer shares, and the aligned tokens that are missing. Out: what was drawn, and its
pieces. Must hold: what is kept decides nothing; a draw follows from its arguments and the orders alone. Cost: that of
mixture/draw.py; a window of every stream, and the next one of some.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.coming import ComingPieces
from torchmix.mixture.document_draw import draw_documents
from torchmix.mixture.draw import MAX_ASKED_TOKENS, Draw, Position, draw
from torchmix.mixture.next_windows import NextWindows
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.stretches import Stretches
from torchmix.planner.asking import DrawnTokens, ask_less
from torchmix.planner.pack import Pieces, aligned
from torchmix.planner.stream_order import DOCUMENT_CHARGE
from torchmix.recipe.parts import Part


class Drawing:
    """Draws from the streams of a part."""

    def __init__(self, part: Part, orders: Sequence[StreamOrder], max_epochs: Int64Array, *, align_tokens: int) -> None:
        """Take the streams.

        Args:
            part: What is planned.
            orders: [S] orders of its streams, by sorted name.
            max_epochs: int64 [S] epochs that each may give.
            align_tokens: A piece takes a multiple of this many tokens in its sample.
        """
        self._orders, self._max_epochs, self._align_tokens = orders, max_epochs, align_tokens
        self._counts_documents = part.counts_documents
        self._coming = ComingPieces()
        self._next_windows = NextWindows(orders, max_epochs)
        number = {name: s for s, name in enumerate(sorted(part.sources))}
        streams = [part.streams[name] for name in sorted(part.streams)]
        self._source_of_stream = np.array([number[stream.sources[0]] for stream in streams], np.int64)
        self._has_own_rows = np.array([stream.is_flat for stream in streams], np.bool_)
        """[S] whether the rows of a stream's space are not those of one source."""

    def forget(self) -> None:
        """Hold nothing of the orders that were drawn from: they have changed."""
        self._coming = ComingPieces()
        self._next_windows = NextWindows(self._orders, self._max_epochs)

    def draw(
        self, position: Position, shares: Int64Array, need: int, drawn: DrawnTokens, capacity: int
    ) -> tuple[Draw, int, int]:
        """The draw that counts when `need` aligned tokens are missing; what it cost, and the aligned tokens it gave."""
        ask: int | None = min(drawn.to_ask(need), MAX_ASKED_TOKENS)
        while ask is not None:
            found = draw(self._orders, shares, position, ask, max_epochs=self._max_epochs, coming=self._coming)
            raw, sum_aligned = self._cost_of(found.stretches), self.aligned_sum(found.stretches.tokens)
            ask = ask_less(ask, need_tokens=need, raw_tokens=raw, aligned_tokens=sum_aligned, capacity_tokens=capacity)
        return found, raw, sum_aligned

    def documents(
        self, position: Position, shares: Int64Array, count: int, drawn: DrawnTokens
    ) -> tuple[Draw, DrawnTokens]:
        """So many documents, or as many as there are, and the totals with them; see `draw_documents`."""
        charge = DOCUMENT_CHARGE if self._counts_documents else None
        found = draw_documents(self._orders, shares, position, count, max_epochs=self._max_epochs, charge=charge)
        return found, drawn.plus(self._cost_of(found.stretches), self.aligned_sum(found.stretches.tokens))

    def follow(self, before: Position, after: Position, asked: Int64Array) -> None:
        """Make windows that will be due soon; see `NextWindows.follow`."""
        self._next_windows.follow(before, after, asked)

    def _cost_of(self, stretches: Stretches) -> int:
        """What streams are charged for stretches: their tokens, or documents, which are drawn as a whole."""
        if self._counts_documents:
            return DOCUMENT_CHARGE * int(np.count_nonzero(stretches.tokens))
        return int(stretches.tokens.sum())

    def aligned_sum(self, tokens: Int64Array) -> int:
        """Tokens that stretches take in their samples."""
        # A stretch is split into whole samples and a rest, so rounding up the whole stretch gives the same sum.
        return int(aligned(tokens, self._align_tokens).sum() if self._align_tokens > 1 else tokens.sum())

    def pieces_of(self, step: int, stretches: Stretches) -> Pieces:
        """What was drawn in a step, by source and row there."""
        source, row = self._source_of_stream[stretches.stream], stretches.row
        own = np.flatnonzero(self._has_own_rows[stretches.stream])
        if len(own):
            row = row.copy()
            for s in np.unique(stretches.stream[own]).tolist():
                mine = own[stretches.stream[own] == s]
                source[mine], row[mine] = self._orders[s].space.places(stretches.row[mine])
        return Pieces(
            stream=stretches.stream,
            source=source,
            epoch=stretches.epoch,
            row=row,
            start=stretches.start,
            tokens=stretches.tokens,
            drawn_step=np.full_like(row, step),
            document_tokens=stretches.document_tokens,
        )
