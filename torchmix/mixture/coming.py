"""The next few pieces of every stream, side by side.

What is given is what each stream's window says (`Window.take`); the caller answers for a stream with too few pieces
held. Cost: 24 bytes a held piece, KEPT pieces a stream; some microseconds a stream each time its pieces are held. With
hundreds of streams a draw takes a piece or two from each, and asking one stream at a time would cost more than all the
rest of a draw.
"""

from __future__ import annotations

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.windows import Window

KEPT = 64
"""Pieces held for each stream; a stream that gives more than a quarter as many in one draw is not held."""
_WIDTH = KEPT + 2
"""Entries of a stream in the table of ends; the last one is a sentinel beyond all tokens."""
_SPAN = 1 << 40
"""More than the tokens of KEPT pieces, each below 2^31. Keeps the streams apart in one sorted table."""


class Given(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What some streams gave; n pieces of m streams, sorted by stream."""

    stream: Int64Array
    """[m] the streams whose held pieces were enough; some may give nothing."""
    num_pieces: Int64Array
    """[m] pieces that each gave."""
    num_tokens: Int64Array
    """[m] tokens of these pieces."""
    row: Int64Array
    """[n] row of the document in its stream."""
    start: Int64Array
    """[n] first token in the document."""
    tokens: Int64Array
    """[n] tokens that count."""
    document_tokens: Int64Array
    """[n] tokens of the whole document."""
    rest: Int64Array
    """The streams with too few pieces held."""


class ComingPieces:
    """The next pieces of each stream, kept from draw to draw. A cache: it decides nothing."""

    def __init__(self) -> None:
        self._place: object = None
        self._ends = self._rows = self._starts = self._whole = self._first = self.next_tokens = np.zeros(0, np.int64)

    def go_on_from(self, place: object, num_streams: int) -> None:
        """Begin a draw; forget everything unless `place` is the same object that the last draw ended with."""
        if place is not self._place or len(self.next_tokens) != num_streams:
            self._ends = np.full((num_streams, _WIDTH), _SPAN - 1, np.int64)
            self._ends += (np.arange(num_streams, dtype=np.int64) * _SPAN)[:, None]
            self._rows = np.zeros((num_streams, KEPT), np.int64)
            self._starts = np.zeros((num_streams, KEPT), np.int32)
            self._whole = np.zeros((num_streams, KEPT), np.int32)
            self._first = np.zeros(num_streams, np.int64)
            self.next_tokens = np.zeros(num_streams, np.int64)
        self._place = None  # until `end_at`: a draw that fails leaves nothing to continue from

    def end_at(self, place: object) -> None:
        """End a draw; the next one may continue from `place`."""
        self._place = place

    def give(self, stream: Int64Array, offset: Int64Array, owed_tokens: Int64Array) -> Given:
        """Take what streams owe, as far as their held pieces are enough.

        Args:
            stream: [m] ascending.
            offset: [m] pieces that each has given from its window.
            owed_tokens: [m] tokens that each owes, 1 or more.
        """
        ends = self._ends.reshape(-1)
        base = stream * _WIDTH
        is_known = self.next_tokens[stream] > 0
        start = base + np.where(is_known, offset - self._first[stream], 0)
        target = ends[start] + np.minimum(owed_tokens, _SPAN)
        behind = np.searchsorted(ends, np.minimum(target, stream * _SPAN + (_SPAN - 2)))
        is_beyond = ends[behind - 1] + ends[behind] >= 2 * target
        stop = np.maximum(start, behind - is_beyond)
        # The piece after the last one taken must be held too: the window may end where the held pieces end.
        is_held = is_known & (ends[np.minimum(stop, base + KEPT) + 1] < stream * _SPAN + (_SPAN - 1))
        rest = stream[~is_held]
        stream, start, stop, base = stream[is_held], start[is_held], stop[is_held], base[is_held]
        count = stop - start
        self.next_tokens[stream] = ends[stop + 1] - ends[stop]
        which = np.arange(count.sum()) + np.repeat(start - (np.cumsum(count) - count), count)
        column = which - np.repeat(stream, count) * (_WIDTH - KEPT)
        return Given(
            stream=stream,
            num_pieces=count,
            num_tokens=ends[stop] - ends[start],
            row=self._rows.reshape(-1)[column],
            start=self._starts.reshape(-1)[column].astype(np.int64),
            tokens=ends[which + 1] - ends[which],
            document_tokens=self._whole.reshape(-1)[column].astype(np.int64),
            rest=rest,
        )

    def hold(self, stream: int, window: Window, offset: int, *, given: int) -> None:
        """Hold the pieces of a window from `offset` on, at least one. The stream gave `given` pieces in this draw."""
        self.next_tokens[stream] = window.tokens(offset)
        self._first[stream] = offset
        if given > KEPT // 4 or window.unit_pieces > 1 or window.charges is not None:  # only the window knows its costs
            self._ends[stream] = stream * _SPAN + _SPAN - 1
            return
        pieces = window.pieces(offset, min(offset + KEPT, window.num_pieces))
        count = len(pieces.row)
        self._ends[stream, 0] = stream * _SPAN
        np.cumsum(pieces.tokens, out=self._ends[stream, 1 : count + 1])
        self._ends[stream, 1 : count + 1] += stream * _SPAN
        self._ends[stream, count + 1 :] = stream * _SPAN + _SPAN - 1
        self._rows[stream, :count] = pieces.row
        self._starts[stream, :count] = pieces.start
        self._whole[stream, :count] = pieces.document_tokens

    def forget(self, stream: int) -> None:
        """Drop the held pieces of a stream."""
        self.next_tokens[stream] = 0
