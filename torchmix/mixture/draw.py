"""Shares -> the stretches of documents that a step draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import SourceExhausted
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.windows import Taken, Window

# --- What a step draws from each document: a stretch of consecutive tokens.
#
# A stretch begins and ends at the border of a piece.


class Stretches(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Stretches of documents, in order. All arrays int64 [n]."""

    stream: Int64Array
    """Index by sorted stream name: local to this process, in no key and no digest."""
    epoch: Int64Array
    row: Int64Array
    """Row in the space of the stream."""
    start: Int64Array
    """First token of the stretch in its document; a multiple of the tokens of a sample."""
    tokens: Int64Array
    """Tokens that count: after truncation, if the recipe truncates."""
    document_tokens: Int64Array
    """Tokens of the whole document, as the catalog has them."""

    def take(self, order: Int64Array | NDArray[np.bool_]) -> Stretches:
        """The stretches at `order` (positions or a mask)."""
        return Stretches(**{name: getattr(self, name)[order] for name in _COLUMNS})


_COLUMNS = Stretches.__struct_fields__


def joined(parts: list[Stretches]) -> Stretches:
    """One table by stream; parts that follow each other in a document are joined, parts of 0 tokens dropped.

    Args:
        parts: Each by stream, in the order in which they were drawn.
    """
    given = [part for part in parts if len(part.row)]
    table = given[0] if given else Stretches(**{name: np.zeros(0, np.int64) for name in _COLUMNS})
    if len(given) > 1:
        columns = {name: np.concatenate([getattr(part, name) for part in given]) for name in _COLUMNS}
        table = Stretches(**columns).take(columns["stream"].argsort(kind="stable"))
    if not table.tokens.all():
        table = table.take(table.tokens > 0)
    if not table.start.any():  # every part begins its document, so none continues another
        return table
    goes_on = table.start[1:] == (table.start + table.tokens)[:-1]
    for same in (table.stream, table.epoch, table.row):
        goes_on &= same[1:] == same[:-1]
    if not goes_on.any():
        return table
    first = np.flatnonzero(np.append(True, ~goes_on))
    return replace(table.take(first), tokens=np.add.reduceat(table.tokens, first))


# --- A draw by tokens: each stream pays its debt.
#
# After every draw, the tokens drawn from a stream differ by at most half a sample (half its longest document, if that
# is shorter) from its share, in whole tokens, of all tokens ever asked; within an epoch no document is lost or
# repeated. Cost: two binary searches for each stream that owes, some microseconds.
#
# A stream is charged with exact integers: `debt` whole tokens that it still owes, and `residue` / 2^32 of one more. It
# gives pieces of at most a sample, while the midpoint of the next piece lies below its debt.

MAX_ASKED_TOKENS = 1 << 30
"""Most tokens that one draw asks: 2^32 shares x 2^30 tokens + 2^32 residue stays below 2^63."""


class Position(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
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
) -> Draw:
    """Draw about `asked_tokens` tokens, from each stream its share.

    Args:
        orders: [S] the streams' orders, sorted by name.
        shares: int64 [S], sum 2^32; 0 for a stream that has run out.
        position: Where the streams stand; not changed.
        asked_tokens: Tokens to charge, in [0, 2^30].
        max_epochs: int64 [S] epochs a stream may give.

    Returns:
        Stretches sorted by stream, in each stream's own order. A stream in `ran_out` stands at (max_epochs, 0, 0)
        without debt: the other streams are asked for what it did not give.
    """
    assert 0 <= asked_tokens <= MAX_ASKED_TOKENS, asked_tokens
    # Shares count 2^-32 of a token: the high bits are whole tokens, the low ones are carried, so none is lost.
    charged = position.residue + shares * asked_tokens
    asked = charged >> 32
    residue = charged & 0xFFFFFFFF
    debt = position.debt + asked
    epoch, window, offset = position.epoch.copy(), position.window.copy(), position.offset.copy()
    runs: list[_Run] = []
    ran_out: list[int] = []
    for s in np.flatnonzero((debt > 0) & (shares > 0)).tolist():
        place = _Place(int(epoch[s]), int(window[s]), int(offset[s]))
        taken = _take_by_window(s, orders[s], place, int(debt[s]), max_epochs=int(max_epochs[s]))
        epoch[s], window[s], offset[s] = taken.place
        debt[s] = taken.debt
        runs += taken.runs
        if taken.ran_out:
            ran_out.append(s)
            residue[s] = 0  # with its debt: the others are asked for what it cannot give
    return Draw(
        stretches=joined([_of_runs(runs)] if runs else []),
        position=Position(epoch=epoch, window=window, offset=offset, debt=debt, residue=residue),
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
    """What one stream gave."""

    runs: list[_Run]
    place: _Place
    """The place of the stream afterwards."""
    debt: int
    ran_out: bool


def _take_by_window(stream: int, order: StreamOrder, place: _Place, debt: int, *, max_epochs: int) -> _FromWindows:
    """Take what a stream owes, window by window.

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
        if epoch >= max_epochs:  # nothing is left, so the debt is dropped
            return _FromWindows(runs, _Place(epoch, window, offset), debt=0, ran_out=True)
        if order.is_sparse and (used := order.next_used(epoch, window)) != (epoch, window):
            (epoch, window), offset = used, 0  # pass over windows without used rows; the new place may be the end
            continue
        documents = order.window(epoch, window)
        taken = documents.take(offset, debt)
        if taken.stop > offset:
            runs.append(_Run(stream, epoch, documents, taken))
            debt -= taken.tokens_after - taken.tokens_before
        if taken.stop < documents.num_pieces:  # the debt is paid: the next piece's midpoint lies beyond it
            return _FromWindows(runs, _Place(epoch, window, taken.stop), debt, ran_out=False)
        # The window is given whole. A debt that is left is asked of the next one, whose first piece decides by itself.
        window, offset = window + 1, 0
        if window >= order.num_windows_of(epoch):
            epoch, window = epoch + 1, 0
    return _FromWindows(runs, _Place(epoch, window, offset), debt, ran_out=False)


def _of_runs(runs: list[_Run]) -> Stretches:
    parts = [run.window.stretches(run.taken) for run in runs]
    counts = [len(part.row) for part in parts]
    place = np.array([(run.stream, run.epoch) for run in runs], np.int64).repeat(counts, axis=0)
    tokens = np.concatenate([part.tokens for part in parts])
    # Where no document is shortened, both columns are one array, and the second is not built.
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
        less = f"stop before it (`max_steps={step}`)" if step else "take a smaller batch"
        return SourceExhausted(
            f"every source has given its max_epochs: no data is left for step {step}; {less} or raise `max_epochs` in "
            f"the recipe"
        )
    return SourceExhausted(
        f"source '{name}' has given its max_epochs ({epochs}) and step {step} asks for more; raise `max_epochs`, "
        f"set `on_exhausted: renormalise` to continue with the other sources, or lower its share. "
        f"`torchmix check RECIPE --steps N` shows when each source runs out"
    )


# --- Shares -> a number of documents: each from the stream that owes most.
#
# Exactly so many documents are drawn, or those that there are; a stream is charged its share of each document's
# tokens, whoever gives it. Cost: some microseconds a document.
#
# Each time the stream with the largest debt gives its next document; of two with equal debts, the one whose name comes
# first. A document longer than a sample is given a sample at a time, and each of these counts as one. Debts sum to 0,
# so only a stream with a debt of 0 or more gives. Its debt stays above minus one sample, and all debts stay below as
# many samples as there are streams.

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
    debt = (position.debt << 32) + position.residue  # in 2^-32 of a token, as the shares
    gives, paid = shares > 0, np.zeros(len(orders), np.int64)
    coming: dict[int, _Coming] = {}
    taken: list[tuple[int, int, int, int, int, int]] = []
    ran_out: tuple[int, ...] = ()
    while len(taken) < count:
        s = int(np.where(gives, debt, NEVER).argmax())  # the first of equal ones, so the first by name
        if s not in coming:
            place = int(position.epoch[s]), int(position.window[s]), int(position.offset[s])
            coming[s] = _Coming(orders[s], *place, max_epochs=int(max_epochs[s]))
        piece = coming[s].next()
        if piece is None:
            ran_out = (s,)
            break
        cost = piece[3] if charge is None else charge
        paid[s] += cost
        # All streams are charged together what one pays. Shares sum to 2^32, so the sum of debts does not change.
        debt += shares * cost
        debt[s] -= cost << 32
        taken.append((s, *piece))
    table = np.array(taken, np.int64).reshape(-1, 6)
    table = table[np.argsort(table[:, 0], kind="stable")]  # stable: each stream's pieces stay in its own order
    stretches = Stretches(
        **dict(zip(("stream", "epoch", "row", "start", "tokens", "document_tokens"), table.T, strict=True))
    )
    epoch, window, offset = position.epoch.copy(), position.window.copy(), position.offset.copy()
    for s, one in coming.items():
        epoch[s], window[s], offset[s] = one.epoch, one.window, one.offset
    asked = (debt >> 32) + paid - position.debt  # debt after = debt before + asked - paid
    debt[list(ran_out)] = 0  # after `asked`: what it owes no more was still charged
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
                if tokens:  # a document that counts for nothing keeps its place, and is passed over
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
            # Reversed, so that `pop` gives the first.
            self._held = list(zip(*(column.tolist() for column in columns), strict=True))[::-1]
        return None

    def _end_window(self) -> None:
        self.window, self.offset = self.window + 1, 0
        if self.window >= self._order.num_windows_of(self.epoch):
            self.epoch, self.window = self.epoch + 1, 0


# --- The next window of each stream, made ahead, a few a step.
#
# No order changes; a window that is needed before it was made ahead is made by the draw. Cost: a few array operations
# a step, and A_STEP windows. Streams of equal size reach the end of a window in the same step: without this, 300 of
# them would make 300 windows in that step.

A_STEP = 8
"""Windows made after a step; more where that many would come too late."""
MOST_STEPS = 64
"""Most steps ahead that a window is made; few streams need fewer, since a window takes memory."""


def most_steps_ahead(num_streams: int) -> int:
    """Most steps ahead that a window of so many streams is made."""
    return min(MOST_STEPS, 2 + 2 * num_streams // A_STEP)


def most_urgent(is_due: NDArray[np.bool_], steps_left: Int64Array) -> tuple[list[int], int]:
    """The streams that are due, the most urgent first; how many of them are to have their windows made in each step.

    Args:
        is_due: bool [S].
        steps_left: int64 [S] steps until the window of each is needed; 1 or more where it is due.
    """
    due = np.flatnonzero(is_due)
    due = due[np.argsort(steps_left[due], kind="stable")]
    # The first k windows are in time if each step that is left before the k-th is due makes one.
    needed = -(-np.arange(1, len(due) + 1) // steps_left[due])
    return due.tolist(), max(A_STEP, int(needed.max(initial=0)))


class NextWindows:
    """Makes windows before they are needed; decides nothing."""

    def __init__(self, orders: Sequence[StreamOrder], max_epochs: Int64Array) -> None:
        """`max_epochs`: int64 [S] epochs that each stream may give."""
        self._orders = orders
        self._max_epochs = max_epochs
        self._most_steps = most_steps_ahead(len(orders))
        self._after: Position | None = None
        # Arrays [S], about the current window of each stream.
        self._is_known = np.zeros(len(orders), np.bool_)
        self._is_made = np.zeros(len(orders), np.bool_)
        self._left_tokens = np.zeros(len(orders), np.int64)

    def follow(self, before: Position, after: Position, asked: Int64Array) -> None:
        """Make what will be due soon.

        Args:
            before, after: Where the streams stood before a step, and stand after it.
            asked: int64 [S] tokens that the step asked of each.
        """
        if before is not self._after:  # not the step after the last one followed: a state was loaded, say
            self._is_known[:] = False
        self._after = after
        self._is_known &= (before.window == after.window) & (before.epoch == after.epoch)
        self._left_tokens -= before.debt + asked - after.debt  # less what each stream has given
        for s in np.flatnonzero(~self._is_known & (asked > 0)).tolist():
            place = int(after.epoch[s]), int(after.window[s])
            left = self._orders[s].left_tokens(*place, int(after.offset[s]))
            if left is not None:
                self._left_tokens[s], self._is_known[s], self._is_made[s] = left, True, False
        # A window that ends within this step's tokens (steps_left 0) is made by the draw; it is too late to be ahead.
        steps_left = self._left_tokens // np.maximum(asked, 1)
        is_due = self._is_known & ~self._is_made & (asked > 0) & (steps_left >= 1) & (steps_left <= self._most_steps)
        due, at_once = most_urgent(is_due, steps_left)
        for s in due[:at_once]:
            self._is_made[s] = True
            place = self._orders[s].following(int(after.epoch[s]), int(after.window[s]))
            if place[0] < self._max_epochs[s]:
                self._orders[s].make_ahead(*place)
