"""The next few documents of every source, side by side.

In: windows of sources, and where draws have left them. Out: for sources that owe, the documents that they give, in a
few numpy calls for all of them. Must hold: what is given is what each source's window says (`Window.stop`); a source of
which too little is held is left to whoever has the windows. Cost: 20 bytes a held document, KEPT of each source; some
microseconds a source each time its documents are held. With hundreds of sources a draw takes a document or two of each,
and to ask each by itself would cost more than all else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchmix.mixture.window import Window

KEPT = 64
"""Documents held of a source; one that gives more than a quarter as many in a draw is not held."""
_WIDTH = KEPT + 2
"""Entries of a source in the table of ends; the last one is beyond all."""
_SPAN = 1 << 40
"""More than the tokens of KEPT documents, each below 2^31: keeps the sources apart in one sorted table."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Given:
    """What some sources gave; n documents of m sources, sorted by source."""

    source: Ints
    """[m] the sources that could be answered from what is held; some may give nothing."""
    num_documents: Ints
    """[m] documents each gave."""
    num_tokens: Ints
    """[m] tokens of these."""
    row: Ints
    """[n] in its source."""
    tokens: Ints
    """[n] tokens that count."""
    document_tokens: Ints
    """[n] tokens of the whole document."""
    rest: Ints
    """The sources that could not be answered."""


class ComingDocuments:
    """What earlier draws have seen of the documents to come; decides nothing."""

    def __init__(self) -> None:
        self._place: object = None
        self._ends = self._rows = self._whole = self._first = self.next_tokens = np.zeros(0, np.int64)

    def go_on_from(self, place: object, num_sources: int) -> None:
        """Begin a draw; all is forgotten unless `place` is the very object that the last draw ended with."""
        if place is not self._place or len(self.next_tokens) != num_sources:
            self._ends = np.full((num_sources, _WIDTH), _SPAN - 1, np.int64)
            self._ends += (np.arange(num_sources, dtype=np.int64) * _SPAN)[:, None]
            self._rows = np.zeros((num_sources, KEPT), np.int64)
            self._whole = np.zeros((num_sources, KEPT), np.int32)
            self._first = np.zeros(num_sources, np.int64)
            self.next_tokens = np.zeros(num_sources, np.int64)
        self._place = None  # until `end_at`: a draw that fails leaves nothing to go on from

    def end_at(self, place: object) -> None:
        """End a draw."""
        self._place = place

    def give(self, source: Ints, offset: Ints, owed_tokens: Ints) -> Given:
        """Take what sources owe.

        Args:
            source: [m] ascending.
            offset: [m] documents of its window that each has given.
            owed_tokens: [m] tokens that each owes, 1 or more.
        """
        ends = self._ends.reshape(-1)
        base = source * _WIDTH
        is_known = self.next_tokens[source] > 0
        start = base + np.where(is_known, offset - self._first[source], 0)
        target = ends[start] + np.minimum(owed_tokens, _SPAN)
        behind = np.searchsorted(ends, np.minimum(target, source * _SPAN + (_SPAN - 2)))
        is_beyond = ends[behind - 1] + ends[behind] >= 2 * target
        stop = np.maximum(start, behind - is_beyond)
        # The one that comes next must be held, too: at the end of what is held the window may end.
        is_held = is_known & (ends[np.minimum(stop, base + KEPT) + 1] < source * _SPAN + (_SPAN - 1))
        rest = source[~is_held]
        source, start, stop, base = source[is_held], start[is_held], stop[is_held], base[is_held]
        count = stop - start
        self.next_tokens[source] = ends[stop + 1] - ends[stop]
        which = np.arange(count.sum()) + np.repeat(start - (np.cumsum(count) - count), count)
        column = which - np.repeat(source, count) * (_WIDTH - KEPT)
        return Given(
            source=source,
            num_documents=count,
            num_tokens=ends[stop] - ends[start],
            row=self._rows.reshape(-1)[column],
            tokens=ends[which + 1] - ends[which],
            document_tokens=self._whole.reshape(-1)[column].astype(np.int64),
            rest=rest,
        )

    def hold(self, source: int, window: Window, offset: int, *, given: int) -> None:
        """Hold the documents of a window from `offset` on, of which there is one; the source gave `given` just now."""
        self.next_tokens[source] = window.tokens(offset)
        self._first[source] = offset
        if given > KEPT // 4:
            self._ends[source] = source * _SPAN + _SPAN - 1
            return
        rows = window.rows[offset : offset + KEPT]
        ends = window.ends[offset : offset + KEPT + 1]
        count = len(rows)
        self._ends[source, : count + 1] = ends - (ends[0] - source * _SPAN)
        self._ends[source, count + 1 :] = source * _SPAN + _SPAN - 1
        self._rows[source, :count] = rows
        whole = window.document_tokens
        self._whole[source, :count] = np.diff(ends) if whole is None else whole[offset : offset + KEPT]

    def forget(self, source: int) -> None:
        """Nothing is known of a source."""
        self.next_tokens[source] = 0
