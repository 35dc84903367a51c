"""The fold of some steps in one native call; `Planner.fold` is the reference, and equal bit for bit.

A *run of steps* is folded from a cursor on, and kept until its steps are asked for: a cache keyed by the cursor, so no
caller knows of it. The first run has one step, and each that continues it twice as many, so the first step comes as
soon as it would alone. What is rare ends a run before its step: a window is needed, a stream runs out, a decision is
due, an epoch begins that something follows from, samples become longer. The reference makes that one step where a
stream runs out. Cost: see docs/performance.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.draw import Position, most_steps_ahead, most_urgent
from torchmix.mixture.keys import named_key
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.windows import Window
from torchmix.native import calls
from torchmix.native.load import array_of, is_native
from torchmix.native.load import run as run_native
from torchmix.planner.cursor import Cursor, Decided, Decision, Eras, begun_by, gone_by
from torchmix.planner.drawing import DrawnTokens, SharesOfStep
from torchmix.planner.graph.dgraph import TokensOfStep
from torchmix.planner.pack import Packed, Pieces
from torchmix.planner.plan import PieceNames
from torchmix.planner.stream_order import DOCUMENT_CHARGE
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step, samples_of_step


class FoldedStep(NamedTuple):
    """The result of a step that no layout changes."""

    packed: Packed
    drawn: Callable[[], Pieces]
    """The pieces drawn in this step, which most callers do not look at."""
    tokens: TokensOfStep
    after: Cursor


def pieces_of(columns: Iterable[Int64Array]) -> Pieces:
    """Pieces of the eight columns of a table."""
    stream, source, epoch, row, start, tokens, drawn_step, whole = columns
    return Pieces(
        stream=stream,
        source=source,
        epoch=epoch,
        row=row,
        start=start,
        tokens=tokens,
        drawn_step=drawn_step,
        document_tokens=whole,
    )


def position_of(columns: Iterable[Int64Array]) -> Position:
    """Places of streams of the five columns of a table."""
    epoch, window, offset, debt, residue = columns
    return Position(epoch=epoch, window=window, offset=offset, debt=debt, residue=residue)


# --- The windows at hand: of each stream the one that it stands in, and those that follow, as the native call has them.
#
# Cost: 152 bytes a window, besides its documents; some 10 us when one comes to hand.

MOST_AT_ONCE = 64
"""Most windows of a stream that are made together; one that lacks windows again and again gets twice as many."""


class _Chain(NamedTuple):
    """A window at hand."""

    slot: int
    place: tuple[int, int]
    """Where the one before ended; windows between have no used rows."""
    after: tuple[int, int]
    """The place behind it."""


class WindowsAtHand:
    """The windows that streams draw from, in a table."""

    def __init__(self, orders: Sequence[StreamOrder], max_epochs: Int64Array, own_rows: Int64Array) -> None:
        """Take the streams; none is at hand.

        Args:
            orders: [S] by sorted name.
            max_epochs: int64 [S] epochs that each may give.
            own_rows: Streams whose rows are not those of one source.
        """
        self.table = np.zeros((2 * len(orders), calls.FOLD_WINDOW), np.int64)
        self.at = np.full(len(orders), calls.NOT_AT_HAND, np.int64)
        """int64 [S] the window that each stream is to draw from."""
        self._orders, self._max_epochs, self._own_rows = orders, max_epochs.tolist(), {*own_rows.tolist()}
        self._free = list(range(len(self.table)))[::-1]
        self._arrays: dict[int, tuple[Any, ...]] = {}
        """By window of the table: what it has the addresses of."""
        self._chains: list[deque[_Chain]] = [deque() for _ in orders]
        self._at_once = [1] * len(orders)
        self._kept_from = np.full(len(orders), calls.NOT_AT_HAND, np.int64)
        """The first window of each chain."""

    def go_to(self, position: Position) -> None:
        """Let streams stand elsewhere than the last run of steps left them."""
        for s, place in enumerate(zip(position.epoch.tolist(), position.window.tolist(), strict=True)):
            chain = self._chains[s]
            found = next((one.slot for one in chain if place in (one.place, self._place(one.slot))), None)
            if found is None:
                self._drop(s, len(chain))
            self.at[s] = calls.NOT_AT_HAND if found is None else found
        self._kept_from[:] = calls.NOT_AT_HAND

    def add(self, streams: Sequence[int], position: Position) -> None:
        """Bring the next windows of streams that lacked some to hand."""
        for s in streams:
            for _ in range(self._at_once[s]):
                if not self.add_next(s, position):
                    break
            self._at_once[s] = min(2 * self._at_once[s], MOST_AT_ONCE)

    def add_next(self, s: int, position: Position) -> bool:
        """Bring the next window of a stream to hand; False where its epochs are given."""
        order, chain = self._orders[s], self._chains[s]
        place = chain[-1].after if chain else (int(position.epoch[s]), int(position.window[s]))
        used = place
        while used[0] < self._max_epochs[s] and (found := order.next_used(*used)) != used:
            used = found
        slot = calls.NO_WINDOW
        if used[0] < self._max_epochs[s]:
            slot = self._put(s, order.window(*used), used)
        if chain:
            self.table[chain[-1].slot, -1] = slot
        if self.at[s] == calls.NOT_AT_HAND:
            self.at[s] = slot
        if slot == calls.NO_WINDOW:
            return False
        chain.append(_Chain(slot, place, (int(self.table[slot, 16]), int(self.table[slot, 17]))))
        return True

    def drop_behind(self, before: Int64Array) -> None:
        """Let go of windows that streams had left before they continued from the windows in `before` [S]."""
        for s in np.flatnonzero((before != self._kept_from) & (before >= 0)).tolist():
            self._at_once[s], self._kept_from[s] = max(1, self._at_once[s] // 2), before[s]
            chain = self._chains[s]
            while chain and chain[0].slot != before[s]:
                self._drop(s, 1)

    def _place(self, slot: int) -> tuple[int, int]:
        return int(self.table[slot, 12]), int(self.table[slot, 13])

    def _drop(self, s: int, count: int) -> None:
        for _ in range(count):
            slot = self._chains[s].popleft().slot
            del self._arrays[slot]
            self.table[slot] = 0
            self._free.append(slot)

    def _put(self, s: int, window: Window, used: tuple[int, int]) -> int:
        if not self._free:
            self._free = list(range(len(self.table), 2 * len(self.table)))[::-1]
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        slot, order, rows, source = self._free.pop(), self._orders[s], window.rows, None
        if s in self._own_rows:
            source, rows = map(partial(np.ascontiguousarray, dtype=np.int64), order.space.places(rows))
        arrays = (rows, source, window.ends, window.charges, window.first_piece, window.document_tokens)
        kinds = (np.int64,) * 5 + (np.int32,)
        row = self.table[slot]
        for number, (array, kind) in enumerate(zip(arrays, kinds, strict=True)):
            row[2 * number : 2 * number + 2] = 0, 0
            if array is not None:
                found = array_of(array, kind)
                row[2 * number : 2 * number + 2] = found.at or 0, found.n
        epoch, number = used
        after = (epoch, number + 1) if number + 1 < order.num_windows_of(epoch) else (epoch + 1, 0)
        pieces = max(1, window.piece_tokens), window.unit_pieces
        row[12:] = (*used, *pieces, *after, calls.NOT_AT_HAND)
        self._arrays[slot] = (*arrays, window)
        return slot


# --- What the steps of a run are to be, which Python knows before the call.


class Rules(Protocol):
    """What steps follow from besides the cursor, as a planner has it; the attributes are described there."""

    part: Part
    streams: tuple[str, ...]
    sources: tuple[str, ...]
    orders: tuple[StreamOrder, ...]
    max_epochs: Int64Array
    source_of_stream: Int64Array
    names: PieceNames
    align_tokens: int
    shares_of_step: SharesOfStep

    def cuts(self, length: int) -> Int64Array:
        """Where documents of each source are cut in samples of so many tokens."""

    def decides_at(self, step: int) -> bool:
        """Whether what a policy has decided takes hold at a step."""

    def eras_after(self, eras: Eras, position: Position) -> Eras:
        """The edits that are still needed of those before a step."""


class _StepsToCome(NamedTuple):
    """The steps from a cursor on that may be folded together: K of them."""

    decided: Decided
    decisions: tuple[Decision, ...]
    """After each of them."""
    shares: Int64Array
    """int64 [K, S], or [1, S] where all are alike."""
    samples: Int64Array
    """int64 [K]."""
    length: int
    ends_at_epoch: bool


MOST_STEPS = 16
MOST_PIECES = 1 << 13
"""Room for about as many pieces a call, or for one step: a call takes a millisecond or two, and the step that makes it
waits for all of them."""


class Folding:
    """The steps that a planner has folded ahead; a cache that decides nothing."""

    def __init__(self, rules: Rules) -> None:
        """Nothing is folded yet."""
        self._rules = rules
        self._seed = rules.part.seed
        names = rules.names
        self._names = (names.only.view(np.int64), names.pairs, names.hashes.view(np.int64))
        self._run: _RunOfSteps | None = None
        self._orders: Sequence[StreamOrder] = ()
        self._windows: WindowsAtHand
        self._due: list[int] = []
        self._due_at_once = 0
        self._of_step = 1 << 8
        """Pieces of a step that there is room for."""
        self._work = np.zeros(0, np.int64)
        self._digested = np.zeros(0, np.int64)

    def forget(self) -> None:
        """Hold nothing of the orders: they have changed."""
        self._run, self._orders = None, ()

    def at(self, cursor: Cursor, decided: Decided, decisions: tuple[Decision, ...]) -> FoldedStep | None:
        """The step at a cursor; None: the reference is to make it.

        Args:
            cursor: Before the step.
            decided: What a policy has decided for it.
            decisions: Those of the cursor, and those of its step.
        """
        if not is_native() or len(cursor.pool.document_tokens) != len(cursor.pool):
            return None
        last = self._run
        goes_on = last is not None and cursor is last.end
        most = min(2 * last.num_steps, MOST_STEPS) if last is not None and goes_on else 1
        coming = self._coming(cursor, decided, decisions, most)
        if coming is None:
            return None
        self._run = None
        self._take_orders()
        if not goes_on:
            self._windows.go_to(cursor.position)
        self._run = self._fold(cursor, coming)
        return None if self._run is None else self.kept(cursor)

    def kept(self, cursor: Cursor) -> FoldedStep | None:
        """The step at a cursor, if it is folded already."""
        found = self._run.step(cursor) if self._run is not None and is_native() else None
        if found is not None and self._due:
            self._make_due(found.after.position)
        return found

    def _take_orders(self) -> None:
        rules = self._rules
        if self._orders is not rules.orders:
            self._orders = rules.orders
            own = [s for s, name in enumerate(rules.streams) if rules.part.streams[name].is_flat]
            self._windows = WindowsAtHand(rules.orders, rules.max_epochs, np.array(own, np.int64))
            self._due = []

    def _coming(
        self, cursor: Cursor, decided: Decided, decisions: tuple[Decision, ...], most: int
    ) -> _StepsToCome | None:
        """The steps that one call may fold; None where not even the first has shares."""
        rules, batch = self._rules, self._rules.part.batch
        most = max(1, min(most, MOST_PIECES // self._of_step))
        length = length_of_step(batch, cursor.step)
        gone, begun = gone_by(decisions), begun_by(decisions)
        shares: list[Int64Array] = []
        samples: list[int] = []
        for step in range(cursor.step, cursor.step + most):
            if step > cursor.step and (length_of_step(batch, step) != length or rules.decides_at(step)):
                break
            found = rules.shares_of_step.at(step, gone, decided.shares, begun)
            if found is None:
                break
            shares.append(found)
            samples.append(samples_of_step(batch, step))
        if not shares:
            return None
        are_alike = all(each is shares[0] for each in shares)
        return _StepsToCome(
            decided=decided,
            decisions=decisions,
            shares=np.ascontiguousarray(shares[:1] if are_alike else shares, np.int64),
            samples=np.array(samples, np.int64),
            length=length,
            ends_at_epoch=bool(cursor.eras.edits) or rules.shares_of_step.places.have_epochs,
        )

    def _fold(self, cursor: Cursor, coming: _StepsToCome) -> _RunOfSteps | None:
        while True:
            room = _Room(len(coming.samples), self._of_step, len(cursor.pool), len(self._orders))
            call, before = self._call(cursor, coming, room), self._windows.at.copy()
            ended = run_native(call)
            done = call.num_done
            if done:
                break
            if ended == calls.NEEDS_WINDOWS:
                self._windows.add(room.needed[: call.num_needed].tolist(), cursor.position)
            elif ended == calls.NEEDS_ROOM:
                self._of_step *= 2
            else:
                return None
        self._windows.drop_behind(before)
        stretch = _RunOfSteps(self._rules, cursor, coming, room, done, self._digested)
        self._of_step = max(self._of_step, _round_up(room.most_of_step(done) * 3 // 2))
        self._look_ahead(room, done)
        if ended == calls.NEEDS_ROOM:
            self._of_step *= 2
        return stretch

    def _call(self, cursor: Cursor, coming: _StepsToCome, room: _Room) -> calls.Fold:
        part, rules = self._rules.part, self._rules
        room.begin_at(cursor)
        steps = range(cursor.step, cursor.step + len(coming.samples))
        keys = np.array(
            [[named_key(self._seed, what, step) for step in steps] for what in ("pack", "samples")], np.uint64
        )
        size = room.work_size(int(coming.samples.max()), coming.length // rules.align_tokens)
        if len(self._work) < size:
            self._work = np.empty(size, np.int64)
        if len(self._digested) < room.digested_size:
            self._digested = np.empty(room.digested_size, np.int64)
        arrays: dict[str, Any] = {
            "windows": self._windows.table,
            "shares": coming.shares,
            "samples": coming.samples,
            "pack_key": np.array(keys[0], np.uint64).view(np.int64),
            "sample_key": np.array(keys[1], np.uint64).view(np.int64),
            "source_of_stream": rules.source_of_stream,
            "name_of_stream": self._names[0],
            "pair": self._names[1],
            "name_of_pair": self._names[2],
            "at": self._windows.at,
            "digested": self._digested[: room.digested_size],
            "cuts": self._cuts(coming.length),
            "work": self._work,
            **room.arrays(),
        }
        call = calls.Fold(
            num_streams=len(rules.streams),
            num_sources=len(rules.sources),
            first_step=cursor.step,
            length=coming.length,
            align_tokens=rules.align_tokens,
            method=calls.FOLD_METHODS[part.packing.method],
            charge=DOCUMENT_CHARGE if part.counts_documents else 0,
            ends_at_epoch=coming.ends_at_epoch,
        )
        for name, array in arrays.items():
            setattr(call, name, array_of(array, np.int64))
        call.windows.n = len(self._windows.table)
        room.kept = arrays
        return call

    def _cuts(self, length: int) -> Int64Array:
        """Where documents of each source are cut, if that is not where samples of all end."""
        cuts = self._rules.cuts(length)
        is_plain = self._rules.part.packing.method == "concat" or bool((cuts == length).all())
        return np.zeros(0, np.int64) if is_plain else cuts

    def _look_ahead(self, room: _Room, done: int) -> None:
        """Which windows are to be made while the steps of the run are handed out."""
        asked = room.sums[:done, 0].sum(axis=0) // done
        # Those of the next call are to be made by then, while the steps of this one are handed out.
        beyond = np.maximum(room.left // np.maximum(asked, 1) - MOST_STEPS, 0)
        is_due = (room.left >= 0) & (asked > 0) & (beyond <= most_steps_ahead(len(asked)))
        self._due, self._due_at_once = most_urgent(is_due, done + beyond)

    def _make_due(self, position: Position) -> None:
        for s in self._due[: self._due_at_once]:
            self._windows.add_next(s, position)
        del self._due[: self._due_at_once]


def _round_up(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


def _odd_lines(count: int) -> int:
    """As many int64 or a few more, an odd number of lines of a cache: columns of powers of two would displace each
    other there."""
    return ((count + 7) // 8 | 1) * 8


class _Room:
    """What a call writes: the tables of K steps, each step behind the one before."""

    def __init__(self, num_steps: int, of_step: int, in_pool: int, num_streams: int) -> None:
        count = num_steps * of_step
        self._of_step, self._num_steps, self._num_streams, self._in_pool = of_step, num_steps, num_streams, in_pool
        self.position = np.empty((num_steps + 1, 5, num_streams), np.int64)
        self.marks = np.zeros((num_steps + 1, calls.NUM_MARKS), np.int64)
        self.pool = np.empty((8, _odd_lines(in_pool + num_steps * max(of_step, in_pool))), np.int64)
        self.drawn = np.empty((8, _odd_lines(count)), np.int64)
        self.pieces = np.empty((11, _odd_lines(count)), np.int64)
        self.sums = np.empty((num_steps, 4, num_streams), np.int64)
        self.left, self.needed = np.empty((2, num_streams), np.int64)
        self.digested_size = 7 * _odd_lines(count)
        self.kept: dict[str, Any] = {}
        """Arrays whose addresses the call has."""

    def begin_at(self, cursor: Cursor) -> None:
        """Write where the first step begins."""
        at, pool = cursor.position, cursor.pool
        for number, column in enumerate((at.epoch, at.window, at.offset, at.debt, at.residue)):
            self.position[0, number] = column
        for number, name in enumerate(Pieces.__struct_fields__):
            self.pool[number, : len(pool)] = getattr(pool, name)
        self.marks[0, [calls.POOL_END, calls.RAW, calls.ALIGNED]] = len(pool), cursor.drawn.raw, cursor.drawn.aligned

    def arrays(self) -> dict[str, Int64Array]:
        """By name in the call."""
        names = ("position", "marks", "pool", "drawn", "pieces", "sums", "left", "needed")
        return {name: getattr(self, name) for name in names}

    def work_size(self, num_samples: int, units: int) -> int:
        """int64 that a step needs while it is made."""
        of_rooms = units if num_samples > calls.FEW_SAMPLES else 0
        return 20 * self._num_streams + 56 * (self._of_step + self._in_pool) + 24 * num_samples + of_rooms + 1024

    def drawn_pieces(self, start: int, stop: int) -> Pieces:
        """A stretch of the pieces drawn."""
        return pieces_of(self.drawn[:, start:stop])

    def most_of_step(self, done: int) -> int:
        """Entries of the largest part of a table that a step has."""
        ends = self.marks[: done + 1, : calls.PIECES_END + 1]
        return int(np.diff(ends, axis=0).max(initial=0))


class _RunOfSteps:
    """Steps that one call has folded; each is made up when it is asked for."""

    def __init__(
        self, rules: Rules, cursor: Cursor, coming: _StepsToCome, room: _Room, num_steps: int, digested: Int64Array
    ) -> None:
        self.num_steps = num_steps
        self._rules, self._coming, self._room, self._digested = rules, coming, room, digested
        self._cursors, self._steps = [cursor], list[FoldedStep]()
        self._marks = room.marks[: num_steps + 1].tolist()

    @property
    def end(self) -> Cursor | None:
        """The cursor after its last step; None before that is asked for."""
        return self._cursors[-1] if len(self._steps) == self.num_steps else None

    def step(self, cursor: Cursor) -> FoldedStep | None:
        """The step at a cursor, if it is one of these."""
        number = cursor.step - self._cursors[0].step
        if not 0 <= number < min(self.num_steps, len(self._cursors)) or self._cursors[number] is not cursor:
            return None
        if number == len(self._steps):
            self._steps.append(self._made(number, cursor))
            self._cursors.append(self._steps[-1].after)
        return self._steps[number]

    def _made(self, number: int, before: Cursor) -> FoldedStep:
        room, was, now = self._room, self._marks[number], self._marks[number + 1]
        placed = [*room.pieces[:, was[calls.PIECES_END] : now[calls.PIECES_END]]]
        pool = pieces_of(room.pool[:, was[calls.POOL_END] : now[calls.POOL_END]])
        asked, drawn, delivered, in_pool = room.sums[number]
        table = self._digested[7 * was[calls.PIECES_END] : 7 * now[calls.PIECES_END]]
        digest = hashlib.sha256(before.order_digest + struct.pack("<q", before.step))
        digest.update(table.data)
        position = position_of(room.position[number + 1])
        after = Cursor(
            step=before.step + 1,
            position=position,
            pool=pool,
            order_digest=digest.digest()[:8],
            decisions=self._coming.decisions,
            drawn=DrawnTokens(raw=now[calls.RAW], aligned=now[calls.ALIGNED]),
            decided=self._coming.decided,
            eras=self._rules.eras_after(before.eras, position),
        )
        return FoldedStep(
            packed=Packed(
                pieces=pieces_of(placed[:8]), sample=placed[8], slot=placed[9], sample_offset=placed[10], pool=pool
            ),
            drawn=partial(room.drawn_pieces, was[calls.DRAWN_END], now[calls.DRAWN_END]),
            tokens=TokensOfStep(
                asked=asked, drawn=drawn, pool=in_pool, delivered=delivered, num_labelled=now[calls.NUM_LABELLED]
            ),
            after=after,
        )
