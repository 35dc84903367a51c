"""Edits -> the windows of the epochs that they fell into.

In: what a run remembers of edits, and the versions of its streams. Out: for each stream the eras of its edited epoch.
Must hold: within the epoch, a row that stays comes once: it was given, or it is in the open window, or in the rest; a
row that came from another stream is left out if that one has given it in its present epoch. Cost: the windows that the
epoch has given are made once, at each start: some 50 ns a row; a byte for each row of the sources of these streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import StateError
from torchmix.mixture.edited_windows import EraWindows
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.spaces.rest import RestSpace
from torchmix.mixture.spaces.space import Space
from torchmix.planner.eras.records import Eras, StreamBefore
from torchmix.planner.eras.versions import Mask, StreamRows, Versions

MakeOrder = Callable[[str, Space, int | None], StreamOrder]
"""A stream's name, a space, and the window that an era begins with -> an order of the space."""
Members = tuple[tuple[str, str], ...]


class _Era(msgspec.Struct, kw_only=True, eq=False):
    """Windows of one era of an epoch."""

    start: int
    rows: StreamRows
    """What the stream had in it."""
    rest: RestSpace | None
    """The rows of its windows; None: all of the stream's."""
    order: StreamOrder
    hidden: dict[int, dict[str, Int64Array]] = msgspec.field(default_factory=dict)
    """Window of the epoch -> member -> rows that are not given any more, ascending."""

    @property
    def num_windows(self) -> int:
        """Windows of its order; none where nothing was left for it."""
        return self.order.num_windows if self.rest is None or self.rest.num_rows > 0 else 0

    def numbers(self, rows: Int64Array) -> Int64Array:
        """[n] numbers in the stream's space of this version."""
        return rows if self.rest is None else self.rest.base_rows(rows)


class _Live(msgspec.Struct, kw_only=True, eq=False):
    """A stream in an epoch that was edited."""

    epoch: int
    eras: list[_Era]
    given: dict[str, Mask]
    """Member -> rows that were given in this epoch."""
    promised: dict[str, Mask] = msgspec.field(default_factory=dict)
    """Rows of the window that is open, which are still to come in it."""
    left_out: dict[str, Mask] = msgspec.field(default_factory=dict)
    """Rows that came from another stream, which had given them: they come with the next epoch."""
    counted: int = 0
    """The windows before this one are in `given`."""


class Replay:
    """The edits of a run, one after the other."""

    def __init__(self, versions: Versions, now: Mapping[str, Members], make_order: MakeOrder) -> None:
        """Begin before all edits.

        Args:
            versions: Rows of streams.
            now: Members of the streams of the part, with fingerprints of their rows.
            make_order: Makes orders as those of the planner.
        """
        self._versions, self._now, self._make = versions, now, make_order
        self._live: dict[str, _Live | None] = {}

    def eras(self, eras: Eras) -> dict[str, tuple[int, list[EraWindows]]]:
        """The edited epoch of each stream that has one, with its eras.

        Raises:
            StateMismatch: The catalog does not have rows of before.
            StateError: A place that no run comes to.
        """
        for edit in eras.edits:
            self._apply(edit)
        return {
            name: (live.epoch, self._windows(name, live))
            for name, live in self._live.items()
            if live is not None and name in self._now
        }

    def _apply(self, edit: tuple[StreamBefore, ...]) -> None:
        rows = {one.name: self._versions.rows(one.name, one.members) for one in edit if one.members}
        after = {one.name: self._versions.rows(one.name, one.after) if one.after else None for one in edit}
        lives = {before.name: self._at(before, rows.get(before.name)) for before in edit}
        for before in edit:
            now = after[before.name]
            if now is not None:
                gone = {name: _gone(lives[name], rows.get(name), after[name], now) for name in lives}
                self._begin(before, lives[before.name], rows.get(before.name), now, list(gone.values()))
            else:
                self._live[before.name] = None

    def _at(self, before: StreamBefore, rows: StreamRows | None) -> _Live:
        """The stream where it stood: with all that it had given in its epoch."""
        live = self._live.get(before.name)
        if live is None or live.epoch != before.epoch:
            live = _Live(epoch=before.epoch, eras=[], given={})
            if rows is not None:
                live.eras.append(_Era(start=0, rows=rows, rest=None, order=self._make(before.name, rows.space, None)))
        if rows is None:
            return live
        era = _era_of(live, before.window)
        # A stream that has given its last epoch stands behind the last window of that.
        most = era.num_windows - bool(before.offset)
        if not 0 <= before.window - era.start <= most or before.offset < 0:
            raise _misplaced(before)
        for window in range(live.counted, before.window):
            _mark(live, window)
        live.counted = before.window
        if before.offset:
            _mark(live, before.window, before.offset)
        return live

    def _begin(
        self, before: StreamBefore, live: _Live, rows: StreamRows | None, now: StreamRows, gone: list[dict[str, Mask]]
    ) -> None:
        """Begin an era with the next window: with what the epoch has not given, and what is new."""
        start = before.window + (before.offset > 0)
        promised: dict[str, Mask] = {}
        if before.offset:
            promised = _promise(live, before, now)
        rest: list[Int64Array] = []
        left_out: dict[str, Mask] = {}
        is_all = start == 0
        for name, kept in now.kept.items():
            left = kept.copy()
            was = rows.kept.get(name) if rows is not None else None
            new = kept if was is None else kept & ~was
            out = new & False
            if was is not None and name in live.left_out:
                out |= was & live.left_out[name]
            for of_stream in gone:
                if name in of_stream:
                    out |= new & of_stream[name]
            left_out[name] = out
            for masks in (live.given, promised, left_out):
                if name in masks:
                    left &= ~masks[name]
            is_all = is_all and bool((left == kept).all())
            rest.append(np.flatnonzero(left) + now.first[name])
        if is_all:
            self._live[before.name] = None  # nothing was given: the epoch is one of a stream that always had these rows
            return
        live.left_out = left_out
        live.eras = [era for era in live.eras if era.start < start]
        space = RestSpace(now.space, np.concatenate(rest))
        live.eras.append(_Era(start=start, rows=now, rest=space, order=self._make(before.name, space, start)))
        self._live[before.name] = live

    def _windows(self, name: str, live: _Live) -> list[EraWindows]:
        now = self._versions.rows(name, self._now[name])
        return [_windows_of(era, now) for era in live.eras]


def _windows_of(era: _Era, now: StreamRows) -> EraWindows:
    def numbers(rows: Int64Array) -> Int64Array:
        return now.numbers_of(era.rows, era.numbers(rows))

    empty = np.zeros(0, np.int64)
    hidden = {
        window: np.sort(np.concatenate([empty, *(rows + now.first[name] for name, rows in by_member.items())]))
        for window, by_member in era.hidden.items()
    }
    return EraWindows(
        start=era.start,
        num_windows=era.num_windows,
        windows=era.order.windows,
        numbers=numbers,
        hidden=hidden,
    )


def _era_of(live: _Live, window: int) -> _Era:
    found = [era for era in live.eras if era.start <= window]
    if not found:
        raise StateError(f"the state's eras name window {window}, which no run comes to; use another checkpoint")
    return found[-1]


def _mark(live: _Live, window: int, pieces: int | None = None) -> None:
    """Note the rows that a window has given: all, or those of its first pieces."""
    era = _era_of(live, window)
    made = era.order.window(live.epoch, window - era.start)
    rows = era.numbers(made.rows if pieces is None else made.rows[: made.documents_before(pieces)])
    for name, _, of_source in era.rows.by_member(rows):
        hidden = era.hidden.get(window, {}).get(name)
        if hidden is not None:
            of_source = of_source[~np.isin(of_source, hidden)]
        _mask(live.given, era.rows, name)[of_source] = True


def _promise(live: _Live, before: StreamBefore, now: StreamRows) -> dict[str, Mask]:
    """The rows that the open window still gives; rows that are gone are hidden in it."""
    era = _era_of(live, before.window)
    made = era.order.window(live.epoch, before.window - era.start)
    if before.offset > made.num_pieces:
        raise _misplaced(before)
    promised: dict[str, Mask] = {}
    hidden = era.hidden.setdefault(before.window, {})
    begun = made.documents_before(before.offset)
    for name, at, of_source in era.rows.by_member(era.numbers(made.rows)):
        kept = now.kept[name][of_source] if name in now.kept else np.zeros(len(of_source), np.bool_)
        earlier = hidden.get(name)
        is_hidden = np.zeros(len(of_source), np.bool_) if earlier is None else np.isin(of_source, earlier)
        coming = of_source[(at >= begun) & kept & ~is_hidden]
        _mask(promised, era.rows, name)[coming] = True
        hidden[name] = np.unique(of_source[~kept | is_hidden])
    return promised


def _gone(live: _Live, was: StreamRows | None, after: StreamRows | None, now: StreamRows) -> dict[str, Mask]:
    """Member of `now` -> rows that a stream had, has given in its epoch, and has no more."""
    found: dict[str, Mask] = {}
    if was is None:
        return found
    for member, given in live.given.items():
        if member not in was.kept:
            continue
        kept = after.kept.get(member) if after is not None else None
        lost = was.kept[member] & given & ~(np.zeros_like(given) if kept is None else kept)
        for name, source in now.sources.items():
            if source == was.sources[member] and lost.any():
                found[name] = found[name] | lost if name in found else lost
    return found


def _mask(masks: dict[str, Mask], rows: StreamRows, name: str) -> Mask:
    return masks.setdefault(name, np.zeros(len(rows.kept[name]), np.bool_))


def _misplaced(before: StreamBefore) -> StateError:
    return StateError(
        f"the state's eras have stream {before.name!r} at window {before.window}, piece {before.offset}, which no run "
        f"comes to; the state is damaged, use another checkpoint"
    )
