"""Shares -> the stretches of documents that a step draws.

In: the position of each stream, and the number of tokens asked. Out: stretches of documents, and the new positions.
Must hold: after every draw, the tokens drawn from a stream differ by at most half a sample (half its longest document,
if that is shorter) from its share, in whole tokens, of all tokens ever asked; within an epoch no document is lost or
repeated. Cost: one binary search per stream and window. A stream that is known to owe less than half its next piece is
skipped by an array comparison.

A stream is charged with exact integers: `debt` whole tokens that it still owes, and `residue` / 2^32 of one more. It
gives pieces of at most a sample, while the midpoint of the next piece lies below its debt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import SourceExhausted
from torchmix.mixture.coming import ComingPieces, Given
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.stretches import Stretches, joined
from torchmix.mixture.window import Taken, Window

MAX_ASKED_TOKENS = 1 << 30
"""Most tokens that one draw asks: 2^32 shares x 2^30 tokens + 2^32 residue stays below 2^63."""


class Position(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where every stream stands. All arrays int64 [S], by sorted stream name."""

    epoch: Int64Array
    window: Int64Array
    offset: Int64Array
    """Pieces already taken from the window."""
    debt: Int64Array
    """Tokens owed; negative when a piece was taken early."""
    residue: Int64Array
    """In [0, 2^32): the fraction of a token owed beyond `debt`."""

    @staticmethod
    def start(num_streams: int) -> Position:
        """Nothing drawn yet."""
        zeros = np.zeros(num_streams, np.int64)
        return Position(epoch=zeros, window=zeros, offset=zeros, debt=zeros, residue=zeros)


class Draw(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The result of one draw."""

    stretches: Stretches
    position: Position
    asked: Int64Array
    """[S] whole tokens charged to each stream."""
    ran_out: tuple[int, ...]
    """Streams that could not give all that they owe, because they have given their `max_epochs`."""


def draw(
    orders: Sequence[StreamOrder],
    shares: Int64Array,
    position: Position,
    asked_tokens: int,
    *,
    max_epochs: Int64Array,
    coming: ComingPieces | None = None,
) -> Draw:
    """Draw about `asked_tokens` tokens, from each stream its share.

    Args:
        orders: [S] the streams' orders, sorted by name.
        shares: int64 [S], sum 2^32; 0 for a stream that has run out.
        position: Where the streams stand; not changed.
        asked_tokens: Tokens to charge, in [0, 2^30].
        max_epochs: int64 [S] epochs a stream may give.
        coming: The next pieces that earlier draws of these orders have kept.

    Returns:
        Stretches sorted by stream, in each stream's own order. A stream in `ran_out` stands at (max_epochs, 0, 0)
        without debt: the other streams are asked for what it did not give.
    """
    assert 0 <= asked_tokens <= MAX_ASKED_TOKENS, asked_tokens
    charged = position.residue + shares * asked_tokens
    asked = charged >> 32
    residue = charged & 0xFFFFFFFF
    debt = position.debt + asked
    coming = coming or ComingPieces()
    coming.go_on_from(position, len(orders))
    owing = np.flatnonzero((debt > 0) & (shares > 0) & (2 * debt > coming.next_tokens))
    offset = position.offset.copy()
    given = coming.give(owing, offset[owing], debt[owing])
    offset[given.stream] += given.num_pieces
    debt[given.stream] -= given.num_tokens
    epoch, window = position.epoch.copy(), position.window.copy()
    runs: list[_Run] = []
    ran_out: list[int] = []
    for s in given.rest.tolist():
        coming.forget(s)
        place = _Place(int(epoch[s]), int(window[s]), int(offset[s]))
        taken = _take_by_window(s, orders[s], place, int(debt[s]), max_epochs=int(max_epochs[s]))
        epoch[s], window[s], offset[s] = taken.place
        debt[s] = taken.debt
        runs += taken.runs
        if taken.ran_out:
            ran_out.append(s)
            residue[s] = 0
        elif taken.next_in is not None:
            num_taken = sum(run.taken.stop - run.taken.start for run in taken.runs)
            coming.hold(s, taken.next_in, taken.place.offset, given=num_taken)
    stands = Position(epoch=epoch, window=window, offset=offset, debt=debt, residue=residue)
    coming.end_at(stands)
    return Draw(
        stretches=joined([_of_held(given, epoch), *([_of_runs(runs)] if runs else [])]),
        position=stands,
        asked=asked,
        ran_out=tuple(ran_out),
    )


class _Place(NamedTuple):
    epoch: int
    window: int
    offset: int


class _Run(NamedTuple):
    """Pieces that a stream gave from one window."""

    stream: int
    epoch: int
    window: Window
    taken: Taken


class _FromWindows(NamedTuple):
    """What one stream gave on the slow path."""

    runs: list[_Run]
    place: _Place
    """The place of the stream afterwards."""
    debt: int
    next_in: Window | None
    """The window of `place`, which has a piece there; None where the next piece lies in a window not made yet."""
    ran_out: bool


def _take_by_window(stream: int, order: StreamOrder, place: _Place, debt: int, *, max_epochs: int) -> _FromWindows:
    """Take what a stream owes, window by window: the slow path, for streams with too few pieces held.

    Args:
        stream: Index of the stream.
        order: Its order.
        place: Where it stands.
        debt: Tokens that it owes.
        max_epochs: Epochs that it may give.
    """
    epoch, window, offset = place
    runs: list[_Run] = []
    while debt > 0:
        if epoch >= max_epochs:
            return _FromWindows(runs, _Place(epoch, window, offset), debt=0, next_in=None, ran_out=True)
        if order.is_sparse and (used := order.next_used(epoch, window)) != (epoch, window):
            (epoch, window), offset = used, 0
            continue
        documents = order.window(epoch, window)
        taken = documents.take(offset, debt)
        if taken.stop > offset:
            runs.append(_Run(stream, epoch, documents, taken))
            debt -= taken.tokens_after - taken.tokens_before
        if taken.stop < documents.num_pieces:
            return _FromWindows(runs, _Place(epoch, window, taken.stop), debt, next_in=documents, ran_out=False)
        window, offset = window + 1, 0
        if window >= order.num_windows_of(epoch):
            epoch, window = epoch + 1, 0
    return _FromWindows(runs, _Place(epoch, window, offset), debt, next_in=None, ran_out=False)


def _of_held(given: Given, epoch: Int64Array) -> Stretches:
    stream = np.repeat(given.stream, given.num_pieces)
    return Stretches(
        stream=stream,
        epoch=epoch[stream],
        row=given.row,
        start=given.start,
        tokens=given.tokens,
        document_tokens=given.document_tokens,
    )


def _of_runs(runs: list[_Run]) -> Stretches:
    parts = [run.window.stretches(run.taken) for run in runs]
    counts = [len(part.row) for part in parts]
    place = np.array([(run.stream, run.epoch) for run in runs], np.int64).repeat(counts, axis=0)
    tokens = np.concatenate([part.tokens for part in parts])
    is_whole = all(part.document_tokens is part.tokens for part in parts)
    whole = tokens if is_whole else np.concatenate([part.document_tokens for part in parts], dtype=np.int64)
    return Stretches(
        stream=place[:, 0],
        epoch=place[:, 1],
        row=np.concatenate([part.row for part in parts]),
        start=np.concatenate([part.start for part in parts]),
        tokens=tokens,
        document_tokens=whole,
    )


def exhausted_error(name: str, epochs: int, step: int, *, all_sources: bool) -> SourceExhausted:
    """The error for a stream that has run out; it says what the user can do."""
    if all_sources:
        return SourceExhausted(
            f"every source has given its max_epochs: no data is left for step {step}; stop before it "
            f"(`max_steps={step}`) or raise `max_epochs` in the recipe"
        )
    return SourceExhausted(
        f"source '{name}' has given its max_epochs ({epochs}) and step {step} asks for more; raise `max_epochs`, "
        f"set `on_exhausted: renormalise` to go on with the other sources, or lower its share. "
        f"`torchmix check RECIPE --steps N` shows when each source runs out"
    )
