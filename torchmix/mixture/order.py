"""A stream's endless order: epochs, cut into windows of documents.

Within an epoch every row comes exactly once; the order depends on no other stream; a window can be made alone, from
(epoch, window). Cost of a window: making its rows, and one read of the lengths for each row, which is random access
wherever rows are shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.spaces import SourceSpace, Space
from torchmix.mixture.windows import (
    Denied,
    EditedWindows,
    EraWindows,
    FileWindows,
    Method,
    PageWindows,
    RowWindows,
    Window,
    WindowRows,
    are_denied,
    key_of_stream,
)

_Windows = PageWindows | RowWindows | FileWindows
_WINDOWS: dict[Method, type[_Windows]] = {"page": PageWindows, "row": RowWindows, "none": FileWindows}


class StreamOrder:
    """The order of one stream; keeps the window last asked for, and one that was made ahead.

    Rows have the numbers of the stream's space.
    """

    def __init__(
        self,
        name: str,
        space: Space,
        *,
        seed: int,
        method: Method = "page",
        counted: Callable[[NDArray[np.int32]], NDArray[np.int32]] | None = None,
        piece_tokens: int | None = None,
        unit_pieces: int = 1,
        charge: int | None = None,
        denied: Denied | None = None,
        era: int | None = None,
    ) -> None:
        """Take a stream's place in the mixture.

        Args:
            name: The stream's name. The name and the seed alone key its order.
            space: Its rows.
            seed: The recipe's seed.
            method: How its rows are shuffled.
            counted: Tokens of documents -> tokens that they count for. A document that counts for 0 is skipped, and
                keeps its place in the order. None: all tokens count.
            piece_tokens: Longer documents are drawn in pieces of this many tokens. None: every document is drawn as a
                whole.
            unit_pieces: Pieces of one document that are drawn together; see `Window`.
            charge: What a document costs, however long; it is then drawn as a whole. None: its tokens.
            denied: Documents that are not given; they keep their places and their pieces.
            era: The window that the rows' era begins with, in an epoch that was edited.
        """
        self.name = name
        self.space = space
        self.method = method
        self._counted = counted
        self._denied = denied
        self.has_long_documents = counted is None and piece_tokens is not None and space.longest_tokens > piece_tokens
        """Whether some documents may have several pieces."""
        self._piece_tokens = piece_tokens if self.has_long_documents else None
        self._unit_pieces, self._charge = unit_pieces, charge
        self.windows: WindowRows = _WINDOWS[method](space, key_of_stream(name, seed, era))
        """The windows of epochs that were not edited."""
        self._windows: WindowRows = self.windows
        self._edited: EditedWindows | None = None
        self.num_windows = self._windows.num_windows
        """Windows of an epoch that was not edited."""
        self.is_sparse = self._windows.is_sparse
        """Whether few windows have used rows."""
        self._last: tuple[tuple[int, int], Window] | None = None
        self._ahead: tuple[tuple[int, int], Window] | None = None
        self._alive: WeakValueDictionary[tuple[int, int], Window] = WeakValueDictionary()
        """Those that anybody holds: a fold runs ahead of those who read."""
        self._last_used_windows: tuple[int, NDArray[np.int64]] | None = None

    def edit(self, epoch: int, eras: Sequence[EraWindows]) -> None:
        """Let an epoch have eras; none: no epoch was edited."""
        self._edited = EditedWindows(self.windows, epoch, eras) if eras else None
        self._windows = self._edited or self.windows
        self._last = self._ahead = None
        self._alive.clear()

    def num_windows_of(self, epoch: int) -> int:
        """Windows of an epoch."""
        return self.num_windows if self._edited is None else self._edited.num_windows_of(epoch)

    def pages_by_source(self, epoch: int, window: int) -> list[tuple[int, NDArray[np.int64]]]:
        """Pages of a window that may hold used rows: by source, ascending; `window` in [0, num_windows)."""
        return self._windows.pages(epoch, window)

    def num_rows(self, epoch: int, window: int) -> int:
        """Kept rows of a window, used or not."""
        return self._windows.num_rows(epoch, window)

    def counted(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens that documents of so many tokens count for in a draw; 0 for those that are dropped."""
        return tokens if self._counted is None else self._counted(tokens)

    def gives(self, source: int, rows: Int64Array) -> NDArray[np.bool_]:
        """[n] whether rows of a source can be drawn, are used, and are not denied."""
        held = self.space.holds(source, rows)
        return held & ~are_denied(self._denied, np.full_like(rows, source), rows) if self._denied else held

    def num_pieces(self, epoch: int, window: int) -> int:
        """Pieces of a window, used or not: the unit of `offset`. Makes the window if it has long documents."""
        return self.window(epoch, window).num_pieces if self.has_long_documents else self.num_rows(epoch, window)

    def open_document(self, epoch: int, window: int, offset: int) -> tuple[int, int, int] | None:
        """Source, row there, and next token of the document that the stream has given in part.

        None if it stands between two documents.
        """
        found = self.window(epoch, window).open_document(offset) if self.has_long_documents else None
        if found is None:
            return None
        source, row = self.space.places(np.array([found[0]]))
        return int(source[0]), int(row[0]), found[1]

    def next_used(self, epoch: int, window: int) -> tuple[int, int]:
        """The first (epoch, window) from here on that may have used rows.

        Windows known to have none are skipped and never made. Where most windows have used rows, they are tried one by
        one. Where few have, they are found from the used rows, and the cost follows the number of these.
        """
        if not self.is_sparse or (self._edited is not None and self._edited.is_edited(epoch)):
            return epoch, window
        # Every window of an edited epoch is tried: its eras hold the rows that are left, which are rarely few.
        if self._last_used_windows is None or self._last_used_windows[0] != epoch:
            self._last_used_windows = epoch, self._windows.used_windows(epoch)
        windows = self._last_used_windows[1]
        at = int(np.searchsorted(windows, window))
        return (epoch, int(windows[at])) if at < len(windows) else (epoch + 1, 0)

    def following(self, epoch: int, window: int) -> tuple[int, int]:
        """The next (epoch, window) after this one that may have used rows."""
        place = (epoch, window + 1) if window + 1 < self.num_windows_of(epoch) else (epoch + 1, 0)
        while (used := self.next_used(*place)) != place:
            place = used
        return place

    def window(self, epoch: int, window: int) -> Window:
        """The documents of a window of an epoch, in order."""
        if self._last is None or self._last[0] != (epoch, window):
            if self._ahead is None or self._ahead[0] != (epoch, window):  # not made ahead, or another one was
                self._ahead = (epoch, window), self._alive.get((epoch, window)) or self._make(epoch, window)
            self._last, self._ahead = self._ahead, None
        return self._last[1]

    def make_ahead(self, epoch: int, window: int) -> None:
        """Make a window now that will be asked for later, and keep it beside the last one."""
        if all(kept is None or kept[0] != (epoch, window) for kept in (self._last, self._ahead)):
            self._ahead = (epoch, window), self._make(epoch, window)

    def left_tokens(self, epoch: int, window: int, offset: int) -> int | None:
        """Tokens of the window last asked for, from piece `offset` on; None for any other window."""
        if self._last is None or self._last[0] != (epoch, window):
            return None
        window_made = self._last[1]
        return window_made.tokens_before(window_made.num_pieces) - window_made.tokens_before(offset)

    def epochs_before(self, epoch: int, window: int, offset: int) -> float:
        """How often the stream was gone through at a place: windows count alike, the present one, made, by tokens."""
        if not window and not offset:  # also the place of a stream that has run out, which has no window
            return float(epoch)
        within = self.window(epoch, window)
        done = within.tokens_before(offset) / max(1, within.tokens_before(within.num_pieces))
        return epoch + (window + done) / self.num_windows_of(epoch)

    def _make(self, epoch: int, window: int) -> Window:
        made = self._alive[epoch, window] = self._of_rows(epoch, window)
        return made

    def _of_rows(self, epoch: int, window: int) -> Window:
        rows = self._windows.rows(epoch, window)
        ends = np.zeros(len(rows) + 1, np.int64)
        tokens = self.space.tokens(rows)
        counted = tokens if self._counted is None else self._counted(tokens)
        np.cumsum(counted, out=ends[1:])
        whole = None if self._counted is None else tokens  # None: `ends` has the whole lengths already
        hidden = self._hidden(epoch, window, rows)
        if hidden is not None:
            np.cumsum(np.where(hidden, 0, counted), out=ends[1:])  # `counted` still says how many pieces they have
            whole = tokens
        if self._charge is not None:
            charges = np.zeros(len(rows) + 1, np.int64)
            # A document that gives no tokens costs nothing, else shares would pay for what nobody trains on.
            np.cumsum(np.where(np.diff(ends) > 0, self._charge, 0), out=charges[1:])
            return Window(rows=rows, ends=ends, document_tokens=whole, charges=charges)
        size = self._piece_tokens
        if size is None or counted.max(initial=0) <= size:
            return Window(rows=rows, ends=ends, document_tokens=whole)
        first_piece = np.zeros(len(rows) + 1, np.int64)
        # At least one piece a document, also of no tokens: `offset` counts pieces, and each row has its place.
        np.cumsum(np.maximum((counted + (size - 1)) // size, 1), out=first_piece[1:])
        return Window(
            rows=rows,
            ends=ends,
            document_tokens=whole,
            first_piece=first_piece,
            piece_tokens=size,
            unit_pieces=self._unit_pieces,
        )

    def _hidden(self, epoch: int, window: int, rows: Int64Array) -> NDArray[np.bool_] | None:
        """Rows of a window that are denied, or gone since an edit; None: no row is."""
        hidden = np.zeros(len(rows), np.bool_)
        if self._denied:
            hidden |= are_denied(self._denied, *self.space.places(rows))
        gone = None if self._edited is None else self._edited.hidden(epoch, window)
        if gone is not None:
            hidden |= np.isin(rows, gone)
        return hidden if hidden.any() else None


class SourceOrder(StreamOrder):
    """The order of a source that is a stream of its own."""

    def __init__(
        self,
        name: str,
        sizes: SourceSizes,
        *,
        seed: int,
        method: Method = "page",
        counted: Callable[[NDArray[np.int32]], NDArray[np.int32]] | None = None,
        rows: tuple[int, int] | None = None,
        piece_tokens: int | None = None,
        source: int = 0,
    ) -> None:
        """Take a source's place in the mixture; see `StreamOrder`.

        Args:
            name: The source's name, which is the stream's.
            sizes: Rows of each page and tokens of each document.
            seed, method, counted, piece_tokens: As `StreamOrder`.
            rows: The rows used, as (start, stop); others count for 0. None: all are used.
            source: Number of the source, by sorted name.
        """
        space = SourceSpace(source, sizes, rows=rows)
        super().__init__(name, space, seed=seed, method=method, counted=counted, piece_tokens=piece_tokens)
        self.sizes = sizes

    def pages(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Pages of a window that may hold used rows, ascending; `window` in [0, num_windows)."""
        found = self.pages_by_source(epoch, window)
        return found[0][1] if found else np.zeros(0, np.int64)
