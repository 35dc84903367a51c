"""The documents of one window: which rows it has, in what order, and the pieces that they are drawn by."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.mixture.keys import keyed_order, keyed_order_at, named_key, pages_at, permute, places_of, unpermute
from torchmix.mixture.spaces import Space

# --- Documents that are not given, wherever they come in the order.
#
# A denied document keeps its place and its pieces in the order and counts for nothing, so denying one moves no other.
# Cost: a binary search a row, in sources that have some.

Denied = Mapping[int, Int64Array]
"""Source, by sorted name -> its denied rows, ascending, each once; sources without are left out."""


def are_denied(denied: Denied, source: Int64Array, row: Int64Array) -> NDArray[np.bool_]:
    """[n] whether rows of sources are denied."""
    found = np.zeros(len(row), np.bool_)
    for number, rows in denied.items():
        mine = np.flatnonzero(source == number)
        at = np.minimum(rows.searchsorted(row[mine]), len(rows) - 1)
        found[mine] = rows[at] == row[mine]
    return found


def denied_fingerprint(denied: Mapping[str, Int64Array]) -> str:
    """16 hex digits over the denied rows of sources, by name; empty where there are none."""
    if not denied:
        return ""
    digest = hashlib.sha256()
    for name, rows in sorted(denied.items()):
        digest.update(f"{name} {len(rows)}\n".encode())
        digest.update(np.ascontiguousarray(rows, "<i8").data)
    return digest.hexdigest()[:16]


# --- Which rows each window of an epoch has, and in what order: one protocol, three ways to shuffle.
#
# Within an epoch every row is in exactly one window; a window can be asked alone.
#
# `page`: each window takes pages from all over the source, and permutes their rows. Two rows of a
# batch share a page with odds about r/W (r rows a page, W rows a window), so a window of 2B rows keeps rows of a page
# as well apart as a buffer of B rows filled from permuted pages (Youmu's aggressive buffer); what the windows hold
# differs less. `row`: an epoch permutes all rows. Nothing brings rows of a page together, so a page is decoded for
# nearly every row. `none`: rows as they lie in the files.

Key = Callable[..., int]
"""A word and a place (integers) -> the 64-bit key of one choice of a stream."""

Method = Literal["page", "row", "none"]

SPARSE = 8
"""If at most one unit in SPARSE has used rows, windows without used rows are skipped and never made."""


class WindowRows(Protocol):
    """The rows of each window of each epoch of one stream, numbered as in its space.

    Windows count from 0 to `num_windows`.
    """

    @property
    def num_windows(self) -> int:
        """Windows of an epoch, 1 or more."""

    @property
    def is_sparse(self) -> bool:
        """Whether few windows have used rows; `used_windows` lists them."""

    def rows(self, epoch: int, window: int) -> Int64Array:
        """[n] kept rows of a window, used or not, in the order in which they are drawn."""

    def num_rows(self, epoch: int, window: int) -> int:
        """Kept rows of a window, used or not."""

    def pages(self, epoch: int, window: int) -> list[tuple[int, Int64Array]]:
        """Pages of a window that may hold used rows: by source, ascending, each once."""

    def used_windows(self, epoch: int) -> Int64Array:
        """Windows of an epoch that may have used rows, ascending; costs as much as their number."""


def key_of_stream(name: str, seed: int, era: int | None) -> Key:
    """The keys of a stream's choices; `era`: the window that an era of an edited epoch begins with."""
    of_era: tuple[str | int, ...] = () if era is None else ("era", era)

    def key(word: str, *place: int) -> int:
        return named_key(seed, word, name, *place, *of_era)

    return key


# --- `shuffle: page`: a window is pages from all over a stream, with their rows permuted.

KEPT_WINDOWS = 3
"""Windows whose pages are remembered: the previous, the current and the next one."""
PERMUTED_WINDOWS = 1 << 10
"""An epoch of at most this many windows is permuted in one call: one window costs as much as hundreds."""


class PageWindows:
    """Windows of permuted pages."""

    def __init__(self, space: Space, key: Key) -> None:
        self._space = space
        self._key = key
        self.num_windows = max(1, -(-space.num_units // space.window_units))
        start, stop = space.used_units()
        self.is_sparse = stop - start <= space.num_units // SPARSE
        self._last_units: dict[tuple[int, int], Int64Array] = {}
        self._last_places: tuple[int, list[int]] | None = None

    def rows(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        key = self._key("rows", epoch, window)
        if self.num_windows == 1 and self._space.num_kept == self._space.num_rows:
            return keyed_order(key, self._space.num_rows)  # a start makes it for hundreds of small sources
        members = self._space.members(self._units(epoch, window))
        if members.positions is None:
            return members.rows[keyed_order(key, len(members.rows))]
        # Each kept row is sorted by the key of its position among all rows: rows that are not kept move no other.
        return members.rows[keyed_order_at(key, members.positions, members.num_rows)]

    def num_rows(self, epoch: int, window: int) -> int:
        """See `WindowRows`."""
        return len(self._space.members(self._units(epoch, window)).rows)

    def pages(self, epoch: int, window: int) -> list[tuple[int, Int64Array]]:
        """See `WindowRows`."""
        return self._space.pages(self._units(epoch, window))

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        # The way of `_units` backwards: a unit lies in one place of the strata, and a place belongs to one window.
        used = np.arange(*self._space.used_units())
        places = places_of(used, num_windows=self.num_windows, key=self._key("strata", epoch))
        return np.unique(unpermute(places, self.num_windows, self._key("pages", epoch)))

    def _units(self, epoch: int, window: int) -> Int64Array:
        """Units of a window; recent answers are kept, since planning and reading ahead ask for the same windows."""
        units = self._last_units.get((epoch, window))
        if units is None:
            if len(self._last_units) == KEPT_WINDOWS:
                del self._last_units[next(iter(self._last_units))]
            units = pages_at(
                self._place(epoch, window),
                num_pages=self._space.num_units,
                num_windows=self.num_windows,
                key=self._key("strata", epoch),
            )
            units.setflags(write=False)
            self._last_units[epoch, window] = units
        return units

    def _place(self, epoch: int, window: int) -> int:
        """Place of a window in the strata: permuted, so that neighbours on disk are not neighbours in time."""
        if self.num_windows > PERMUTED_WINDOWS:
            return int(permute(np.array([window]), self.num_windows, self._key("pages", epoch))[0])
        if self._last_places is None or self._last_places[0] != epoch:
            places = permute(np.arange(self.num_windows), self.num_windows, self._key("pages", epoch))
            self._last_places = epoch, places.tolist()
        return self._last_places[1][window]


# --- `shuffle: row` and `shuffle: none`: a window is a stretch of an epoch's rows, permuted or as they lie in the
# files.

WINDOW_ROWS = 1 << 14
"""Rows of a window; part of the order's format, since a state counts windows."""
MOST_POSITIONS = 1 << 20
"""Most positions of a window of a space that keeps few of its rows."""


class _Stretches(ABC):
    """Windows of equally many rows. Where only some rows are kept, of about as many kept ones."""

    def __init__(self, space: Space, key: Key) -> None:
        self._space = space
        self._key = key
        # So many positions that about WINDOW_ROWS of them are kept, evenly as the kept rows lie.
        positions = -(-WINDOW_ROWS * space.num_rows // max(1, space.num_kept))
        self._window_rows = max(WINDOW_ROWS, min(positions, MOST_POSITIONS))
        self.num_windows = max(1, -(-space.num_rows // self._window_rows))

    @abstractmethod
    def _all_rows(self, epoch: int, window: int) -> Int64Array:
        """Rows of a window, kept or not."""

    def rows(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        rows = self._all_rows(epoch, window)
        if self._space.num_kept < self._space.num_rows:
            return rows[self._space.keeps(rows)]
        return rows

    def num_rows(self, epoch: int, window: int) -> int:
        """See `WindowRows`."""
        if self._space.num_kept < self._space.num_rows:
            return len(self.rows(epoch, window))
        return len(self._positions(window))

    def pages(self, epoch: int, window: int) -> list[tuple[int, Int64Array]]:
        """See `WindowRows`."""
        return self._space.pages_of(self.rows(epoch, window))

    def _positions(self, window: int) -> Int64Array:
        start = window * self._window_rows
        return np.arange(start, min(start + self._window_rows, self._space.num_rows), dtype=np.int64)


class RowWindows(_Stretches):
    """Windows of an epoch that permutes all rows."""

    def __init__(self, space: Space, key: Key) -> None:
        super().__init__(space, key)
        start, stop = space.used_rows()
        self.is_sparse = stop - start <= self.num_windows  # a few used rows spread over all windows

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        used = np.arange(*self._space.used_rows())
        places = unpermute(used, self._space.num_rows, self._key("row", epoch))
        return np.unique(places // self._window_rows)

    def _all_rows(self, epoch: int, window: int) -> Int64Array:
        return permute(self._positions(window), self._space.num_rows, self._key("row", epoch))


class FileWindows(_Stretches):
    """Windows of rows as they lie in the files."""

    def __init__(self, space: Space, key: Key) -> None:
        super().__init__(space, key)
        start, stop = space.used_rows()
        self.is_sparse = stop - start <= space.num_rows // SPARSE

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        start, stop = self._space.used_rows()
        return np.arange(start // self._window_rows, -(-stop // self._window_rows), dtype=np.int64)

    def _all_rows(self, epoch: int, window: int) -> Int64Array:
        return self._positions(window)


# --- The windows of an epoch in which a stream's rows were changed.
#
# Within the epoch a row that stays comes once, whatever was changed how often; all other epochs are those of a stream
# that always had these rows. Cost: a look at the window's number.
#
# An era begins with a window. The windows before it are those of the era before, with the rows that it had. From there
# on, the rows that the epoch has not given yet, and those that are new, share one permutation: a space of their own
# (spaces.py), shared out among strata as any other. Rows that are gone keep their places in the window that was
# open, and count for nothing.


class EraWindows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One era of an epoch."""

    start: int
    """The window of the epoch that it begins with."""
    num_windows: int
    """Its windows; the next era may begin before they are all given."""
    windows: WindowRows
    """Its windows, from 0 on."""
    numbers: Callable[[Int64Array], Int64Array]
    """Rows of its space -> their numbers in the stream's space."""
    hidden: Mapping[int, Int64Array]
    """Window of the epoch -> rows of the stream's space, ascending, that it gives no more."""


class EditedWindows:
    """The windows of a stream that was edited."""

    def __init__(self, windows: WindowRows, epoch: int, eras: Sequence[EraWindows]) -> None:
        """Take the parts of an epoch.

        Args:
            windows: The windows of all other epochs.
            epoch: The epoch that was edited.
            eras: Its parts, by `start`, from 0 on.
        """
        self._windows, self._epoch, self._eras = windows, epoch, tuple(eras)
        self.num_windows, self.is_sparse = windows.num_windows, windows.is_sparse

    def num_windows_of(self, epoch: int) -> int:
        """Windows of an epoch."""
        last = self._eras[-1]  # eras before it end where the next one begins, whatever windows they had left
        return last.start + last.num_windows if epoch == self._epoch else self.num_windows

    def is_edited(self, epoch: int) -> bool:
        """Whether an epoch has parts."""
        return epoch == self._epoch

    def hidden(self, epoch: int, window: int) -> Int64Array | None:
        """Rows of a window that are not given, ascending."""
        return self._era(window).hidden.get(window) if epoch == self._epoch else None

    def rows(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        if epoch != self._epoch:
            return self._windows.rows(epoch, window)
        era = self._era(window)
        # An era counts its own windows from 0, and its keys are its own, so its order does not depend on eras before.
        return era.numbers(era.windows.rows(epoch, window - era.start))

    def num_rows(self, epoch: int, window: int) -> int:
        """See `WindowRows`."""
        if epoch != self._epoch:
            return self._windows.num_rows(epoch, window)
        era = self._era(window)
        return era.windows.num_rows(epoch, window - era.start)

    def pages(self, epoch: int, window: int) -> list[tuple[int, Int64Array]]:
        """See `WindowRows`."""
        if epoch != self._epoch:
            return self._windows.pages(epoch, window)
        era = self._era(window)
        return era.windows.pages(epoch, window - era.start)

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        return np.arange(self.num_windows_of(epoch)) if epoch == self._epoch else self._windows.used_windows(epoch)

    def _era(self, window: int) -> EraWindows:
        # The latest edit wins: windows that an earlier era had from `start` on are not given.
        return next(era for era in reversed(self._eras) if era.start <= window)


# --- The documents of one window, in the order in which they are drawn, and the pieces that they are drawn by.
#
# A document of n tokens has max(1, ceil(n / sample)) pieces, each a sample long except the last; pieces are taken
# while the midpoint of the next one lies below the debt. Cost: a few binary searches a draw. There is no table of
# pieces: a row may have thousands.


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


class Window(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
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
        target = owed_tokens + before  # the debt, as a place in the window
        behind = bisect_left(ends, target)  # documents that begin below the target
        if behind > len(self.rows):  # the whole window lies below it
            return Taken(start, self.num_pieces, before, ends[-1])
        # Documents before number `behind - 1` end below the target, and so do their midpoints. Those after it begin at
        # the target or beyond. It alone is to be decided.
        first_token, last_token = ends[behind - 1], ends[behind]
        if self.first_piece is None:
            if first_token + last_token < 2 * target:
                return Taken(start, behind, before, last_token)
            return Taken(start, behind - 1, before, first_token)
        inside, size = target - first_token, self.piece_tokens * self.unit_pieces
        whole = (inside - 1) // size  # units of the last document that end below the target
        begin = max(whole * size, before - first_token)  # some of the next unit may have been given
        end = min((whole + 1) * size, last_token - first_token)
        if begin + end < 2 * inside:  # its midpoint lies below the target: it is taken too
            begin = end
        stop = self.first_piece.data[behind - 1] + -(-begin // self.piece_tokens)
        return Taken(start, stop, before, first_token + begin)

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
        begins[0] = before - edges[0]  # only the first document may continue, and only the last may be cut short
        edges[0], edges[-1] = before, after
        return self._documents(first, last, begins, edges)

    def pieces(self, start: int, stop: int) -> WindowPieces:
        """Pieces `start` to `stop`, one by one."""
        if self.first_piece is None:
            return self._documents(start, stop, np.zeros(stop - start, np.int64), self.ends[start : stop + 1])
        number = np.arange(start, stop)
        document = self.first_piece.searchsorted(number, side="right") - 1
        counted = self.ends[document + 1] - self.ends[document]
        # A document that was hidden keeps its pieces and counts 0 tokens: the bound makes them all empty.
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
