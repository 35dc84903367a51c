"""Edits of rows -> the windows of the epochs that they fell into, and the orders that follow them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.earlier import EarlierRows
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import StateError, StateMismatch
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.spaces import RestSpace, Space
from torchmix.mixture.windows import EraWindows
from torchmix.planner.cursor import NO_ERAS, Eras, Members, StreamBefore
from torchmix.planner.stream_order import flat_space, order_of_space, space_of_rows
from torchmix.recipe.parts import Part
from torchmix.recipe.sources import rows_of

# --- Which edits a run remembers.
#
# They are enough, with the catalog, to make every window that is still to come of the epochs that were edited; what no
# such epoch needs is forgotten. Cost: some 60 bytes for each stream of an edit, until its epoch ends.


def still_needed(eras: Eras, streams: Sequence[str], epoch: Int64Array, max_epochs: Int64Array) -> Eras:
    """The edits that an epoch which is not over follows from; the last one that a stream may give is never over.

    Args:
        eras: All that are remembered.
        streams: Names of the streams.
        epoch: [S] the epoch that each stands in.
        max_epochs: [S] epochs that each may give.
    """
    if not eras.edits:
        return eras
    last = [
        {one, one - 1} if one >= most else {one} for one, most in zip(epoch.tolist(), max_epochs.tolist(), strict=True)
    ]
    epochs = dict(zip(streams, last, strict=True))
    kept = []
    for edit in reversed(eras.edits):
        if any(before.epoch in epochs.get(before.name, ()) for before in edit):
            kept.append(edit)
            for before in edit:  # what one has given decides what another one gets
                epochs.setdefault(before.name, set()).add(before.epoch)
    if len(kept) == len(eras.edits):
        return eras
    return Eras(edits=tuple(reversed(kept)), counts=eras.counts) if kept or eras.counts else NO_ERAS


# --- The rows of a stream, in the version that it has now or had before an edit.
#
# Rows of a source have the same numbers in all versions, as files are only added behind the others. Cost: a byte for
# each row of a source, for each member and version that is looked at.

Mask = NDArray[np.bool_]


class StreamRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The rows of a stream in one version."""

    space: Space
    sources: Mapping[str, str]
    """Member -> source, by sorted name of the member."""
    first: Mapping[str, int]
    """Member -> number in the space of row 0 of its source."""
    kept: Mapping[str, Mask]
    """Member -> [rows of the source now] whether the stream has the row."""

    @property
    def source(self) -> str:
        """One of its sources."""
        return next(iter(self.sources.values()))

    def by_member(self, rows: Int64Array) -> Iterator[tuple[str, Int64Array, Int64Array]]:
        """Members of rows of the space, the places of these rows in the array, and their rows in the source."""
        names, firsts = list(self.first), np.array(list(self.first.values()), np.int64)
        which = firsts.searchsorted(rows, side="right") - 1
        for number in np.unique(which).tolist():
            at = np.flatnonzero(which == number)
            yield names[number], at, rows[at] - firsts[number]

    def numbers_of(self, other: StreamRows, rows: Int64Array) -> Int64Array:
        """[n] numbers that rows of another version's space have in this one's, which has all members of that."""
        found: Int64Array = rows.copy()
        for name, at, of_source in other.by_member(rows):
            found[at] = of_source + self.first[name]
        return found


class Versions:
    """Versions of the streams of a part."""

    def __init__(self, part: Part, sizes: Mapping[str, SourceSizes], earlier: EarlierRows | None) -> None:
        """Take what the catalog has.

        Args:
            part: In use.
            sizes: The sizes of its sources, as they are now.
            earlier: The rows that sources and views had before; None: nothing is known.
        """
        self._part, self._sizes, self._earlier = part, sizes, earlier
        self._found: dict[tuple[str, Members], StreamRows] = {}

    def sources_of(self, members: Members) -> set[str]:
        """Sources of members, of those whose rows the catalog has."""
        found = [] if self._earlier is None else [self._earlier.rows(*member) for member in members]
        return {one[0] for one in found if one is not None}

    def rows(self, stream: str, members: Members) -> StreamRows:
        """A version of a stream.

        Args:
            stream: Its name; it may be one that the part has no more.
            members: Members with the fingerprints of their rows, by sorted name.

        Raises:
            StateMismatch: The catalog does not have these rows.
        """
        if (stream, members) not in self._found:
            self._found[stream, members] = self._made(stream, members)
        return self._found[stream, members]

    def _made(self, stream: str, members: Members) -> StreamRows:
        spaces: list[Space] = []
        sources, first, kept, end = dict[str, str](), dict[str, int](), dict[str, Mask](), 0
        for name, fingerprint in members:
            if self._earlier is None:
                raise StateMismatch(f"without a catalog, the rows that {name!r} had before an edit are not known")
            source, sizes, view = self._earlier.found(name, fingerprint)
            mask = np.zeros(self._sizes[source].num_documents, np.bool_)
            spaces.append(space_of_rows(self._part, source, sizes, view))
            start, stop = rows_of(self._part.sources[source], sizes.num_documents)
            mask[slice(start, stop) if view is None else view.kept] = True
            mask[:start] = mask[stop:] = False
            sources[name], first[name], kept[name] = source, end, mask
            end += sizes.num_documents
        is_flat = [name for name, _ in members] != [stream]
        space = flat_space(self._part, spaces) if is_flat else spaces[0]
        return StreamRows(space=space, sources=sources, first=first, kept=kept)


# --- Edits -> the windows of the epochs that they fell into.
#
# Within the epoch, a row that stays comes once: it was given, or it is in the open window, or in the rest; a row that
# came from another stream is left out if that one has given it in its present epoch. Cost: the windows that the epoch
# has given are made once, at each start: some 50 ns a row; a byte for each row of the sources of these streams.

MakeOrder = Callable[[str, Space, str, int | None], StreamOrder]
"""A stream's name, a space, one of its sources, and the window that an era begins with -> an order of the space."""


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
                live.eras.append(
                    _Era(start=0, rows=rows, rest=None, order=self._make(before.name, rows.space, rows.source, None))
                )
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
        live.eras.append(
            _Era(start=start, rows=now, rest=space, order=self._make(before.name, space, now.source, start))
        )
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


# --- The orders of a planner, made to follow edits of their rows.
#
# Orders follow the edits that were entered last, and no others.


class EditedOrders:
    """Which edits the orders of a part follow."""

    def __init__(
        self,
        part: Part,
        orders: Sequence[StreamOrder],
        sizes: Mapping[str, SourceSizes],
        fingerprints: Mapping[str, str],
        earlier: EarlierRows | None,
    ) -> None:
        """Begin with none.

        Args:
            part: What is planned.
            orders: The order of each stream, by sorted name.
            sizes: The sizes of each source.
            fingerprints: The fingerprint of each source and view; empty: not known.
            earlier: Rows that these had before.
        """
        self._part, self._orders, self.earlier = part, orders, earlier
        self.members: dict[str, Members] = {
            name: tuple((one, fingerprints[one]) for one in stream.members) if fingerprints else ()
            for name, stream in sorted(part.streams.items())
        }
        """Members of each stream, with the fingerprints of their rows."""
        self._versions = Versions(part, sizes, earlier)
        self._entered = NO_ERAS
        self._edited: dict[str, tuple[int, list[EraWindows]]] = {}

    def rows(self, stream: str, members: Members) -> StreamRows:
        """A version of a stream; see `Versions.rows`."""
        return self._versions.rows(stream, members)

    def sources_of(self, members: Members) -> set[str]:
        """Sources of members, as far as the part still has them."""
        return self._versions.sources_of(members)

    def enter(self, eras: Eras) -> bool:
        """Make the orders follow edits; whether they followed others.

        Raises:
            StateMismatch: The catalog does not have the rows that a stream had before an edit.
            StateError: A place that no run comes to.
        """
        if eras.edits == self._entered.edits:
            return False
        self._edited = Replay(self._versions, self.members, self._order).eras(eras)
        self._entered = eras
        self.take(self._orders)
        return True

    def num_windows_of(self, eras: Eras, before: Mapping[str, Members], name: str, epoch: int) -> int:
        """Windows of an epoch of a stream, with the rows that streams had before an edit.

        Args:
            eras: The edits before that.
            before: Members of all streams then.
            name: The stream.
            epoch: Its epoch.

        Raises:
            StateMismatch, StateError: As `enter`.
        """
        edited = Replay(self._versions, before, self._order).eras(eras) if eras.edits else {}
        of_epoch, windows = edited.get(name, (epoch, []))
        if windows and of_epoch == epoch:
            return windows[-1].start + windows[-1].num_windows
        rows = self.rows(name, before[name])
        return self._order(name, rows.space, rows.source, None).num_windows

    def take(self, orders: Sequence[StreamOrder]) -> None:
        """Let other orders of the same streams follow the edits, as those of longer samples."""
        self._orders = orders
        for order in orders:
            order.edit(*self._edited.get(order.name, (0, ())))

    def forget(self, eras: Eras) -> None:
        """Take the edits that are still needed of those that were entered: orders need nothing of the others."""
        self._entered = eras

    def _order(self, name: str, space: Space, source: str, era: int | None) -> StreamOrder:
        return order_of_space(self._part, name, space, source, era=era)
