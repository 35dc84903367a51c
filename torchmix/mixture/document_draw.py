"""Shares -> a number of documents: each from the stream that owes most.

In: the position of each stream, and how many documents are wanted. Out: as `draw`. Must hold: exactly so many documents
are drawn, or those that there are; a stream is charged its share of each document's tokens, whoever gives it. Cost:
some microseconds a document.

Each time the stream with the largest debt gives its next document; of two with equal debts, the one whose name comes
first. A document longer than a sample is given a sample at a time, and each of these counts as one. Debts sum to 0, so
only a stream with a debt of 0 or more gives. Its debt stays above minus one sample, and all debts stay below as many
samples as there are streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.draw import Draw, Position
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.stretches import Stretches

HELD = 16
"""Pieces of a stream that are looked up together."""
NEVER = -(1 << 62)
"""Less than any debt."""


def draw_documents(
    orders: Sequence[StreamOrder],
    shares: Int64Array,
    position: Position,
    count: int,
    *,
    max_epochs: Int64Array,
    charge: int | None = None,
) -> Draw:
    """Draw `count` documents.

    Args:
        orders: [S] the streams' orders, sorted by name.
        shares: int64 [S], sum 2^32; 0 for a stream that has run out.
        position: Where the streams stand; not changed.
        count: Documents, or pieces of long ones.
        max_epochs: int64 [S] epochs a stream may give.
        charge: What a document costs, however long, where shares count documents; None: its tokens.

    Returns:
        One row a piece, by stream, in each stream's own order. It ends early where the stream that is to give has run
        out: the one in `ran_out`, which then stands at (max_epochs, 0, 0) without debt.
    """
    debt = (position.debt << 32) + position.residue
    gives, paid = shares > 0, np.zeros(len(orders), np.int64)
    coming: dict[int, _Coming] = {}
    taken: list[tuple[int, int, int, int, int, int]] = []
    ran_out: tuple[int, ...] = ()
    while len(taken) < count:
        s = int(np.where(gives, debt, NEVER).argmax())
        if s not in coming:
            place = int(position.epoch[s]), int(position.window[s]), int(position.offset[s])
            coming[s] = _Coming(orders[s], *place, max_epochs=int(max_epochs[s]))
        piece = coming[s].next()
        if piece is None:
            ran_out = (s,)
            break
        cost = piece[3] if charge is None else charge
        paid[s] += cost
        debt += shares * cost
        debt[s] -= cost << 32
        taken.append((s, *piece))
    table = np.array(taken, np.int64).reshape(-1, 6)
    table = table[np.argsort(table[:, 0], kind="stable")]
    stretches = Stretches(
        **dict(zip(("stream", "epoch", "row", "start", "tokens", "document_tokens"), table.T, strict=True))
    )
    epoch, window, offset = position.epoch.copy(), position.window.copy(), position.offset.copy()
    for s, one in coming.items():
        epoch[s], window[s], offset[s] = one.epoch, one.window, one.offset
    asked = (debt >> 32) + paid - position.debt
    debt[list(ran_out)] = 0
    stands = Position(epoch=epoch, window=window, offset=offset, debt=debt >> 32, residue=debt & 0xFFFFFFFF)
    return Draw(stretches=stretches, position=stands, asked=asked, ran_out=ran_out)


class _Coming:
    """The next pieces of one stream."""

    def __init__(self, order: StreamOrder, epoch: int, window: int, offset: int, *, max_epochs: int) -> None:
        self._order, self._max_epochs = order, max_epochs
        self.epoch, self.window, self.offset = epoch, window, offset
        self._held: list[tuple[int, int, int, int, int]] = []
        """The pieces from `offset` on, in reverse; empty where they are not looked up."""
        self._num_pieces = 0
        """Pieces of the window that they are of."""

    def next(self) -> tuple[int, int, int, int, int] | None:
        """Epoch, row, start, tokens and document's tokens of the next piece that has tokens; None: there is none."""
        order = self._order
        while self.epoch < self._max_epochs:
            if self._held:
                epoch, (row, start, tokens, whole, num_pieces) = self.epoch, self._held.pop()
                self.offset += num_pieces
                if self.offset == self._num_pieces:
                    self._end_window()
                if tokens:
                    return epoch, row, start, tokens, whole
                continue
            if order.is_sparse and (used := order.next_used(self.epoch, self.window)) != (self.epoch, self.window):
                (self.epoch, self.window), self.offset = used, 0
                continue
            documents = order.window(self.epoch, self.window)
            self._num_pieces = documents.num_pieces
            if self.offset == self._num_pieces:  # an empty window
                self._end_window()
                continue
            found, counts = documents.units(self.offset, min(self.offset + HELD, self._num_pieces))
            columns = (found.row, found.start, found.tokens, found.document_tokens, counts)
            self._held = list(zip(*(column.tolist() for column in columns), strict=True))[::-1]
        return None

    def _end_window(self) -> None:
        self.window, self.offset = self.window + 1, 0
        if self.window >= self._order.num_windows_of(self.epoch):
            self.epoch, self.window = self.epoch + 1, 0
