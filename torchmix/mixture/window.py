"""The documents of one window, in the order in which they are drawn, and the pieces that they are drawn by.

In: rows, the tokens that each counts for, and the tokens of a sample. Out: the pieces that pay a debt of tokens. Must
hold: a document of n tokens has max(1, ceil(n / sample)) pieces, each a sample long except the last; pieces are taken
while the midpoint of the next one lies below the debt. Cost: a few binary searches a draw. There is no table of pieces:
a row may have thousands.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array


class WindowPieces(NamedTuple):
    """Parts of documents of one window, in order. Arrays [n]."""

    row: Int64Array
    start: Int64Array
    """First token of the part in its document."""
    tokens: Int64Array
    """Tokens that count; may be 0."""
    document_tokens: Int64Array | NDArray[np.int32]
    """Tokens of the whole document, as the catalog has them."""


class Taken(NamedTuple):
    """Consecutive pieces of a window."""

    start: int
    """The first of them."""
    stop: int
    tokens_before: int
    """Tokens of the window before the first."""
    tokens_after: int
    """Tokens of the window before `stop`."""


class Window(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The documents of one window, in the order in which they are drawn."""

    rows: Int64Array
    """[W] row of each document in its source."""
    ends: Int64Array
    """[W + 1] tokens of the documents before each; starts with 0."""
    document_tokens: NDArray[np.int32] | None
    """[W] tokens of each whole document, as the catalog has them; None if `ends` counts whole documents."""
    first_piece: Int64Array | None = None
    """[W + 1] pieces of the documents before each; None if each document is one."""
    piece_tokens: int = 0
    """Tokens of a piece, where documents have several pieces."""
    unit_pieces: int = 1
    """Pieces that are drawn together, counted from the beginning of a document: those of a sample, once samples have
    become longer."""
    charges: Int64Array | None = None
    """[W + 1] what the documents before each cost where shares count documents; None: their tokens. With charges each
    document is one piece."""

    @property
    def num_pieces(self) -> int:
        """Pieces of all documents; a document that counts for nothing has one piece of 0 tokens."""
        return len(self.rows) if self.first_piece is None else int(self.first_piece[-1])

    def take(self, start: int, owed_tokens: int) -> Taken:
        """The pieces that pay `owed_tokens` (1 or more), from piece `start` on.

        Pieces are taken while the midpoint of the next one lies below the debt. Where documents are charged, all
        tokens here are what they cost.
        """
        ends = self._costs.data  # single values of a memoryview cost a third of an array's
        before = self.tokens_before(start)
        target = owed_tokens + before
        behind = bisect_left(ends, target)  # documents that begin below the target
        if behind > len(self.rows):
            return Taken(start, self.num_pieces, before, ends[-1])
        first_token, last_token = ends[behind - 1], ends[behind]
        if self.first_piece is None:
            if first_token + last_token < 2 * target:
                return Taken(start, behind, before, last_token)
            return Taken(start, behind - 1, before, first_token)
        inside, size = target - first_token, self.piece_tokens * self.unit_pieces
        whole = (inside - 1) // size  # units of the last document that end below the target
        begin = max(whole * size, before - first_token)  # some of the next unit may have been given
        end = min((whole + 1) * size, last_token - first_token)
        if begin + end < 2 * inside:
            begin = end
        stop = self.first_piece.data[behind - 1] + -(-begin // self.piece_tokens)
        return Taken(start, stop, before, first_token + begin)

    def tokens(self, piece: int) -> int:
        """Tokens that piece number `piece` counts for, with those that are drawn together with it, or what it costs."""
        ends = self._costs.data
        if self.first_piece is None:
            return int(ends[piece + 1] - ends[piece])
        first_piece = self.first_piece.data
        document = bisect_right(first_piece, piece) - 1
        inside = piece - first_piece[document]
        left = ends[document + 1] - ends[document] - inside * self.piece_tokens
        return int(max(0, min(left, (self.unit_pieces - inside % self.unit_pieces) * self.piece_tokens)))

    def tokens_before(self, piece: int) -> int:
        """Tokens of all pieces before number `piece`, in [0, num_pieces], or what they cost."""
        ends = self._costs.data
        if self.first_piece is None:
            return int(ends[piece])
        first_piece = self.first_piece.data
        document = bisect_right(first_piece, piece) - 1
        inside = piece - first_piece[document]
        if not inside:
            return int(ends[document])
        # A document that a selection removed counts for nothing but keeps its pieces: it ends before the next piece.
        return int(min(ends[document] + inside * self.piece_tokens, ends[document + 1]))

    def documents_before(self, piece: int) -> int:
        """Documents of which a piece lies before number `piece`, in [0, num_pieces]."""
        return piece if self.first_piece is None else int(bisect_left(self.first_piece.data, piece))

    def open_document(self, piece: int) -> tuple[int, int] | None:
        """Row and next token of the document that piece number `piece` continues; None if the piece begins one."""
        if self.first_piece is None:
            return None
        document = bisect_right(self.first_piece.data, piece) - 1
        inside = piece - int(self.first_piece[document])
        return (int(self.rows[document]), inside * self.piece_tokens) if inside else None

    def stretches(self, taken: Taken) -> WindowPieces:
        """The pieces taken, with the pieces of one document joined."""
        start, stop, before, after = taken
        if self.first_piece is None:
            return self._documents(start, stop, np.zeros(stop - start, np.int64), self.ends[start : stop + 1])
        first_piece = self.first_piece.data
        first, last = bisect_right(first_piece, start) - 1, bisect_left(first_piece, stop)
        edges = self.ends[first : last + 1].copy()
        begins = np.zeros(last - first, np.int64)
        begins[0] = before - edges[0]
        edges[0], edges[-1] = before, after
        return self._documents(first, last, begins, edges)

    def pieces(self, start: int, stop: int) -> WindowPieces:
        """Pieces `start` to `stop`, one by one."""
        if self.first_piece is None:
            return self._documents(start, stop, np.zeros(stop - start, np.int64), self.ends[start : stop + 1])
        number = np.arange(start, stop)
        document = self.first_piece.searchsorted(number, side="right") - 1
        counted = self.ends[document + 1] - self.ends[document]
        begins = np.minimum((number - self.first_piece[document]) * self.piece_tokens, counted)
        whole = counted if self.document_tokens is None else self.document_tokens[document]
        return WindowPieces(self.rows[document], begins, np.minimum(counted - begins, self.piece_tokens), whole)

    def units(self, start: int, stop: int) -> tuple[WindowPieces, Int64Array]:
        """Pieces `start` to `stop`, those that are drawn together as one; and the number of pieces of each.

        The last one may have pieces beyond `stop`.
        """
        if self.first_piece is None or self.unit_pieces == 1:
            return self.pieces(start, stop), np.ones(stop - start, np.int64)
        number = np.arange(start, stop)
        document = self.first_piece.searchsorted(number, side="right") - 1
        inside = number - self.first_piece[document]
        begins_unit = inside % self.unit_pieces == 0
        begins_unit[0] = True  # samples may have been shorter when the pieces before were drawn
        number, document, inside = number[begins_unit], document[begins_unit], inside[begins_unit]
        after = np.minimum((inside // self.unit_pieces + 1) * self.unit_pieces, np.diff(self.first_piece)[document])
        counted = self.ends[document + 1] - self.ends[document]
        begins = np.minimum(inside * self.piece_tokens, counted)
        tokens = np.minimum(after * self.piece_tokens, counted) - begins
        whole = counted if self.document_tokens is None else self.document_tokens[document]
        return WindowPieces(self.rows[document], begins, tokens, whole), after - inside

    @property
    def _costs(self) -> Int64Array:
        return self.ends if self.charges is None else self.charges

    def _documents(self, first: int, last: int, begins: Int64Array, edges: Int64Array) -> WindowPieces:
        """Documents `first` to `last`, each with its tokens between two `edges`."""
        tokens = edges[1:] - edges[:-1]
        if self.document_tokens is not None:
            whole: Int64Array | NDArray[np.int32] = self.document_tokens[first:last]
        elif self.first_piece is None:
            whole = tokens
        else:
            whole = self.ends[first + 1 : last + 1] - self.ends[first:last]
        return WindowPieces(self.rows[first:last], begins, tokens, whole)
