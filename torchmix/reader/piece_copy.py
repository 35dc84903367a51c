"""Pieces of documents -> their places in one array, with the rests of open documents."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import MOST_ID
from torchmix.catalog.settings import ITEM_BYTES
from torchmix.catalog.sizes import TokenRuns
from torchmix.catalog.store import IdLimit, SourceCatalog
from torchmix.errors import PlanError, SourceUnreadable, where_of
from torchmix.formats.documents import NO_LOSS
from torchmix.formats.table import READ_AS, row_of
from torchmix.native.calls import Gather, dtype_of, type_number
from torchmix.native.load import address_of, array_of, contiguous, is_native
from torchmix.native.load import run as run_native
from torchmix.reader.locate import Located
from torchmix.reader.mapped_files import MappedTokens
from torchmix.reader.open_documents import OpenDocuments, Run
from torchmix.reader.page_cache import DecodedPage, RunNumbers, run_numbers
from torchmix.reader.protocol import NO_LABEL, BlankPiece, Filling, Tokens, WantedPieces

# --- Tokens that no model is trained to predict: those that stand for items, and those without loss.
#
# A place lies inside its piece; the last token of a piece counts if the token behind the piece does. Cost: a few array
# operations over the items of the rows.


def tables_without_labels(sources: Sequence[SourceCatalog]) -> list[tuple[int, TokenRuns]]:
    """Items of sources, and marks, whose tokens are no labels, each with the number of its source."""
    return [
        (number, table)
        for number, source in enumerate(sources)
        if source.tokenizer != ITEM_BYTES
        for table in (*map(source.sizes.items.get, source.items), source.sizes.marks.get(NO_LOSS))
        if table is not None
    ]


def unlabelled_places(tables: Sequence[tuple[int, TokenRuns]], pieces: WantedPieces) -> Int64Array | None:
    """Places without a label, each once, in no order; None where there is no table.

    Args:
        tables: From `tables_without_labels`.
        pieces: All of one call.
    """
    if not tables:
        return None
    begin, width = _runs_without_label(tables, pieces.source, pieces.row, pieces.start, pieces.tokens, pieces.places)
    joined: Int64Array = np.arange(width.sum()) + np.repeat(begin - (np.cumsum(width) - width), width)
    if len({number for number, _ in tables}) == len(tables) or not len(joined):
        return joined  # runs of one table never overlap
    is_without = np.zeros(int(joined.max()) + 1, np.bool_)
    is_without[joined] = True
    return np.flatnonzero(is_without)


def num_unlabelled(
    tables: Sequence[tuple[int, TokenRuns]],
    *,
    source: Int64Array,
    row: Int64Array,
    start: Int64Array,
    tokens: Int64Array,
    ends_document: NDArray[np.bool_],
) -> int:
    """How many tokens of some pieces lose their label, read or not; the last one of a document has none to lose.

    Args:
        tables: From `tables_without_labels`.
        source, row, start, tokens, ends_document: [n] of the pieces.
    """
    begin, width = _runs_without_label(tables, source, row, start, tokens - ends_document, np.cumsum(tokens) - tokens)
    order = np.argsort(begin, kind="stable")
    begin, stop = begin[order], (begin + width)[order]
    seen = np.maximum.accumulate(np.concatenate([np.zeros(1, np.int64), stop]))[:-1]  # runs of two tables may overlap
    return int(np.maximum(stop - np.maximum(begin, seen), 0).sum())


def _runs_without_label(
    tables: Sequence[tuple[int, TokenRuns]],
    source: NDArray[np.signedinteger[Any]],
    rows: Int64Array,
    starts: Int64Array,
    tokens: Int64Array,
    places: Int64Array,
) -> tuple[Int64Array, Int64Array]:
    """Where runs of tokens without a label begin among the places of pieces, and how long they are; some are of 0."""
    begins, widths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for number, table in tables:
        piece = np.flatnonzero(source == number)
        first = np.asarray(table.first_run_of_row[rows[piece]], np.int64)
        count = np.asarray(table.first_run_of_row[rows[piece] + 1], np.int64) - first
        item = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
        piece = np.repeat(piece, count)
        offset = np.asarray(table.offset[item], np.int64)
        begin = np.maximum(offset - 1, starts[piece])
        stop = np.minimum(offset - 1 + np.asarray(table.tokens[item], np.int64), starts[piece] + tokens[piece])
        begins.append(places[piece] + begin - starts[piece])
        widths.append(np.maximum(stop - begin, 0))
    return np.concatenate(begins), np.concatenate(widths)


# --- Ids of files that the index does not decode, checked as they are read.
#
# No id outside the vocabulary reaches a trainer. Native calls look at each id that they copy; this is their reference.

NO_LIMIT = np.iinfo(np.int64).max


class IdCheck:
    """Compares ids with the vocabulary, for sources whose files hold only tokens."""

    def __init__(self, catalogs: Sequence[SourceCatalog], limit: IdLimit) -> None:
        """`catalogs`: all sources, in the order of their numbers."""
        self._catalogs = catalogs
        self._limit = limit
        is_unseen = [
            catalog.map is not None or (catalog.format in READ_AS and not row_of(catalog.format).scan_reads_tokens)
            for catalog in catalogs
        ]
        self._is_unseen = np.array(is_unseen, np.bool_)
        self._limits = np.where(self._is_unseen, limit.size, NO_LIMIT)

    def limits(self, at: Located) -> Int64Array | None:
        """[n] the bound that the ids of each piece must be below; None where there is none."""
        return self._limits[at.source] if self._is_unseen.any() else None

    def check(
        self,
        at: Located,
        places: NDArray[np.int64],
        values: NDArray[np.integer[Any]],
        successors: NDArray[np.int64],
    ) -> None:
        """Check all tokens that one call has read.

        Args:
            at: [n] pieces.
            places: [n] where each begins in `values`.
            values: What was read, with anything between the pieces.
            successors: [n] the token that follows each piece, or 0.

        Raises:
            SourceUnreadable: A piece has an id outside the vocabulary; names the first one.
        """
        for i in np.flatnonzero(self._is_unseen[at.source]).tolist():
            piece = [*values[places[i] : places[i] + at.tokens[i]].tolist(), int(successors[i])]
            for place, token in enumerate(piece):
                if not 0 <= token < self._limit.size:
                    raise self.outside(at, i, place, token)

    def outside(self, at: Located, i: int, place: int, token: int) -> SourceUnreadable:
        """The error of the i-th piece, which has such a token at such a place."""
        catalog, row = self._catalogs[int(at.source[i])], int(at.row[i])
        file = next(file for file in reversed(catalog.files) if file.first_row <= row)
        return SourceUnreadable(
            f"row {row - file.first_row} holds the token {token} at place {int(at.start[i]) + place}, but "
            f"{self._limit.reason}; the dataset is of another vocabulary, or damaged",
            where_of(catalog.name, file.path),
            row=row - file.first_row,
        )


# --- Pieces of documents -> their places in one array.
#
# Values between the places are undefined. Cost: moving the memory, and half a microsecond a piece. Tokens are copied
# as they are. Only where arrays differ in type, the tokens copied so far are widened, all at once. Widening piece by
# piece costs more: numpy releases the interpreter's lock for each converting copy, and has to wait for the lock each
# time while other threads run.


class Scratch:
    """Memory that every call reuses."""

    def __init__(self) -> None:
        self._arrays: dict[np.dtype[Any], NDArray[Any]] = {}

    def array(self, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
        """[length] of a dtype: zeros, or values of an earlier call."""
        held = self._arrays.get(dtype)
        if held is None or len(held) < length:
            held = self._arrays[dtype] = np.zeros(length, dtype)
        return held[:length]


class PieceCopy:
    """Copies the pieces of one call to their places."""

    def __init__(
        self, *, sizes: Int64Array, places: Int64Array, goes_on: NDArray[np.bool_], num_places: int, scratch: Scratch
    ) -> None:
        """Nothing is copied yet.

        Args:
            sizes: [n] tokens of each piece.
            places: [n] where its first token belongs.
            goes_on: [n] whether its document has more tokens.
            num_places: Length of the result.
            scratch: Holds the result.
        """
        self._sizes = sizes.tolist()
        self._places = places.tolist()
        self._stops = (places + sizes).tolist()
        self._going_on = np.flatnonzero(goes_on).tolist()
        self._scratch = scratch
        self._is_begun = False
        self.successors = [0] * len(sizes)
        """[n] the token that follows each piece in its document; 0 where none does."""
        self.out: NDArray[np.integer[Any]] = scratch.array(np.dtype(np.int32), num_places)
        """[num_places] of the narrowest type that holds all copied tokens."""
        self.num_bytes = 0
        """Bytes copied, in the types of their pages."""
        self._waiting: list[Run] = []

    def add_mapped(self, at: Located, mapped: MappedTokens) -> None:
        """Have the pieces of mapped files copied with the next `copy_added`."""
        begins, files = at.begin_in_file.tolist(), at.file.tolist()
        first = 0
        for file, pieces in groupby(files):
            stop = first + len(list(pieces))
            if file >= 0 and (values := mapped.arrays[file]) is not None:
                self._waiting.append((values, first, begins[first:stop]))
            first = stop

    def add(self, run: Run) -> None:
        """Have consecutive pieces copied with the next `copy_added`."""
        self._waiting.append(run)

    def add_page(self, runs: PageRuns, k: int, page: DecodedPage) -> None:
        """Have the pieces of the k-th page copied with the next `copy_added`."""
        self._waiting.append(runs.run(k, page))

    def copy_added(self) -> None:
        """Copy what was added."""
        waiting, self._waiting = self._waiting, []
        self.copy_all(waiting)

    def copy_from(self, values: NDArray[np.integer[Any]], piece: Int64Array, begins: Int64Array) -> None:
        """Copy some pieces, ascending, from one array; `begins` says where each begins in it."""
        borders = [0, *(np.flatnonzero(np.diff(piece) != 1) + 1).tolist(), len(piece)]
        for start, stop in pairwise(borders):
            if start < stop:
                self.copy(values, int(piece[start]), begins[start:stop].tolist())

    def copy_all(self, runs: Sequence[Run]) -> None:
        """Copy several runs of pieces, narrow types first, so that they are widened together, if at all."""
        if len({values.dtype.char for values, _, _ in runs}) > 1:
            runs = sorted(runs, key=lambda run: (run[0].itemsize, run[0].dtype.char))
        for values, first, begins in runs:
            self.copy(values, first, begins)

    def copy(self, values: NDArray[np.integer[Any]], first: int, begins: Sequence[int]) -> None:
        """Copy consecutive pieces, from number `first` on, from one array; `begins` says where each begins in it."""
        dtype = values.dtype
        if not self._is_begun or (dtype != self.out.dtype and not np.can_cast(dtype, self.out.dtype)):
            self._make_room(dtype)
        # memoryviews of one dtype, whose slices cost half of numpy's, or else numpy arrays, which convert
        same = dtype == self.out.dtype
        cells: Any = values.data if same else values
        target: Any = self.out.data if same else self.out
        last = first + len(begins)
        sizes = self._sizes[first:last]
        for place, stop, begin, size in zip(
            self._places[first:last], self._stops[first:last], begins, sizes, strict=True
        ):
            target[place:stop] = cells[begin : begin + size]
        going_on = self._going_on
        for i in going_on[bisect_left(going_on, first) : bisect_left(going_on, last)]:
            self.successors[i] = int(cells[begins[i - first] + sizes[i - first]])
        self.num_bytes += sum(sizes) * dtype.itemsize

    def _make_room(self, dtype: np.dtype[np.integer[Any]]) -> None:
        """Widen the result to hold ids of a dtype; keep its tokens."""
        before = self.out
        if self._is_begun:
            dtype = np.promote_types(before.dtype, dtype)
        self.out = self._scratch.array(dtype, len(before))
        if self._is_begun:
            self.out[:] = before
        self._is_begun = True


# --- The same by native calls: each copies pieces out of any number of arrays, to their places.
#
# Equal to the reference bit for bit. With labels the places are memory of steps, in int32; without, they are one array
# of the narrowest type, as above. An array must live until the call that copies from it.


class NativeCopy:
    """Copies the pieces of one call."""

    def __init__(
        self,
        at: Located,
        places: Int64Array,
        *,
        num_places: int,
        outs: Sequence[Filling] | None = None,
        scratch: Scratch | None = None,
        limits: Int64Array | None = None,
    ) -> None:
        """Nothing is copied yet.

        Args:
            at: [n] the pieces.
            places: [n] where the first token of each belongs.
            outs: Where tokens and labels go; None: `out` has the values.
            num_places: Length of the result.
            scratch: Holds the result where there are no `outs`.
            limits: [n] the bound that ids must be below; None: there is none.
        """
        self._at, self._places, self._limits = at, places, limits
        self._outs, self._num_places, self._scratch = outs, num_places, scratch or Scratch()
        self._begin = at.begin_in_file
        self._is_begin_own = False
        self._waiting: list[tuple[object, RunNumbers, int, int]] = []
        """What holds the tokens, their numbers, and the half-open range of the pieces in them."""
        self._dtype: np.dtype[Any] | None = None
        self.out: NDArray[np.integer[Any]] = self._scratch.array(np.dtype(np.int32), 0 if outs else num_places)
        """[num_places] of the narrowest type that holds all copied tokens; not used where there are `outs`."""
        self.successors = np.zeros(len(places), np.int64)
        """[n] the token that follows each piece in its document; 0 where none does."""
        self.num_bytes = 0
        """Bytes copied, in the types of their arrays."""
        self.odd: list[list[int]] = []
        """Pieces with a value that is outside the limit, or no id: number, kind, place and value."""

    def add_mapped(self, at: Located, mapped: MappedTokens) -> None:
        """Copy the pieces of mapped files."""
        piece = np.flatnonzero(at.file >= 0)
        self._copy(mapped.runs, piece, at.file[piece])

    def add(self, run: Run) -> None:
        """Have consecutive pieces copied with the next `copy_added`."""
        values, first, begins = run
        values, stop = np.ascontiguousarray(values), first + len(begins)
        self._own_begins()[first:stop] = begins
        self._waiting.append((values, run_numbers(values), first, stop))

    def add_page(self, runs: PageRuns, k: int, page: DecodedPage) -> None:
        """Have the pieces of the k-th page copied with the next `copy_added`."""
        self._waiting.append((page, page.run, *runs.pieces(k, page)))

    def copy_added(self) -> None:
        """Copy what was added."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        first, stop = np.array([one[2:] for one in waiting], np.int64).T
        count = stop - first
        piece = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
        self._copy(np.array([one[1] for one in waiting], np.int64), piece, np.repeat(np.arange(len(waiting)), count))

    def copy_from(self, values: NDArray[np.integer[Any]], piece: Int64Array, begins: Int64Array) -> None:
        """Copy some pieces from one array; `begins` says where each begins in it."""
        values = np.ascontiguousarray(values)
        self._own_begins()[piece] = begins
        self._copy(np.array([run_numbers(values)], np.int64), piece, np.zeros_like(piece))

    def _own_begins(self) -> Int64Array:
        if not self._is_begin_own:
            self._begin, self._is_begin_own = self._begin.copy(), True
        return self._begin

    def _copy(self, runs: Int64Array, piece: Int64Array, run_of: Int64Array) -> None:
        """Copy pieces.

        Args:
            runs: [R, 5] see `RunNumbers`.
            piece: [m] which.
            run_of: [m] the run of each.

        Raises:
            PlanError: A page was not kept for the row of a piece.
        """
        if not len(piece):
            return
        at, types = self._at, runs[run_of, 2]
        self.num_bytes += int((np.abs(types) * at.tokens[piece]).sum())
        if self._outs is None:
            self._make_room(set(types.tolist()))
        odd = np.empty((len(piece), 4), np.int64)
        outs = _numbers_of(self._outs) if self._outs else np.array([(address_of(self.out), 0, 0, len(self.out))])
        call = Gather(
            runs=array_of(runs, np.int64),
            outs=array_of(outs, np.int64),
            piece=array_of(piece, np.int64),
            run=array_of(run_of, np.int64),
            begin=array_of(self._begin, np.int64),
            row=array_of(at.row_in_page, np.int64),
            start=array_of(at.start, np.int64),
            length=array_of(at.tokens, np.int64),
            place=array_of(self._places, np.int64),
            goes_on=array_of(at.goes_on, np.bool_),
            successor=array_of(self.successors, np.int64),
            odd=array_of(odd, np.int64),
            type=type_number(self.out.dtype),
            no_loss=NO_LABEL,
        )
        if self._limits is not None:
            call.limit = array_of(self._limits, np.int64)
        if run_native(call):
            raise other_rows(at, call.fault_at)
        self.odd += odd[: call.num_odd].tolist()

    def check_limits(self, ids: IdCheck | None) -> None:
        """Raise a SourceUnreadable for the first piece with an id outside the vocabulary."""
        if ids is not None and (found := sorted(one for one in self.odd if one[1] == Gather.ODD_LIMIT)):
            piece, _, place, value = found[0]
            raise ids.outside(self._at, piece, place, value)

    def blank(self) -> tuple[BlankPiece, ...]:
        """The blank pieces, in the order of the request."""
        found = [one for one in self.odd if one[1] == Gather.ODD_NO_ID]
        order = self._at.order
        return tuple(sorted(BlankPiece(int(order[piece]), place, value) for piece, _, place, value in found))

    def _make_room(self, types: set[int]) -> None:
        """Widen the result to hold values of more types; keep its tokens."""
        dtypes = [dtype_of(number) for number in types]
        dtype = np.result_type(*dtypes, *([] if self._dtype is None else [self._dtype]))
        before, is_begun = self.out, self._dtype is not None
        if dtype != self._dtype:
            self.out, self._dtype = self._scratch.array(dtype, self._num_places), dtype
            if is_begun:
                self.out[:] = before


def _numbers_of(outs: Sequence[Filling]) -> Int64Array:
    """[K, 4] as the struct out in native/gather.c."""
    first, rows = 0, []
    for tokens, labels in outs:
        rows.append((address_of(tokens), address_of(labels), first, len(tokens)))
        first += len(tokens)
    return np.array(rows, np.int64).reshape(-1, 4)


def write_padding(pieces: WantedPieces, outs: Sequence[Filling]) -> None:
    """Write what lies between pieces, whose places ascend: tokens of 0, without labels."""
    if is_native():
        numbers = _numbers_of(outs)
        places, counts = (contiguous(column, np.int64) for column in (pieces.places, pieces.tokens))
        run_native(
            Gather(
                outs=array_of(numbers, np.int64),
                gap_place=array_of(places, np.int64),
                gap_length=array_of(counts, np.int64),
                blanks=1,
                type=type_number(np.dtype(np.int32)),
                no_loss=NO_LABEL,
            )
        )
        return
    is_padding = np.ones(pieces.num_places, np.bool_)
    for place, count in zip(pieces.places.tolist(), pieces.tokens.tolist(), strict=True):
        is_padding[place : place + count] = False
    first = 0
    for tokens, labels in outs:
        here = is_padding[first : first + len(tokens)]
        tokens[here], labels[here] = 0, NO_LABEL
        first += len(tokens)


def fill_from(
    pieces: WantedPieces, found: Tokens, goes_on: NDArray[np.bool_], outs: Sequence[Filling]
) -> tuple[BlankPiece, ...]:
    """Write tokens and labels of pieces whose values are in one array, at their places; returns the blank ones.

    Args:
        pieces: [n] of the call.
        found: Their tokens.
        goes_on: [n] whether their documents have more tokens.
        outs: Where tokens and labels go.
    """
    if not is_native():
        return fill_plainly(pieces, found, goes_on, outs)
    number, none = np.arange(len(pieces)), np.zeros(len(pieces), np.int64)
    at = Located(
        order=number,
        source=pieces.source,
        row=pieces.row,
        start=pieces.start,
        tokens=pieces.tokens,
        # The last token of a piece may be the last of the array: what follows it is not looked for there.
        goes_on=np.zeros(len(pieces), np.bool_),
        page=none,
        row_in_page=none,
        first_piece=none,
        begin_in_file=pieces.places,
        file=none,
    )
    copy = NativeCopy(at, pieces.places, outs=outs, num_places=pieces.num_places)
    copy.copy_from(found.values, number, pieces.places)
    blank = copy.blank()
    is_labelled = goes_on & (pieces.tokens > 0)
    is_labelled[[one.piece for one in blank]] = False
    ends, first = pieces.places + pieces.tokens - 1, 0
    for tokens, labels in outs:
        here = is_labelled & (ends >= first) & (ends < first + len(tokens))
        labels[ends[here] - first] = found.successors[here]
        first += len(tokens)
    return blank


def fill_plainly(
    pieces: WantedPieces, found: Tokens, goes_on: NDArray[np.bool_], outs: Sequence[Filling]
) -> tuple[BlankPiece, ...]:
    """The reference of a native copy with labels: from values to tokens and labels of all pieces.

    Args:
        pieces: [n] of the call.
        found: Their tokens.
        goes_on: [n] whether their documents have more tokens.
        outs: Where tokens and labels go.

    Returns:
        The blank pieces.
    """
    borders, blank = np.cumsum([0, *(len(tokens) for tokens, _ in outs)]), []
    columns = (pieces.places, pieces.tokens, goes_on, found.successors)
    for i, (place, count, is_more, successor) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        values = found.values[place : place + count]
        out = int(borders.searchsorted(place, side="right")) - 1
        start = place - int(borders[out])
        tokens, labels = (field[start : start + count] for field in outs[out])
        odd = [(at, value) for at, value in enumerate(values.tolist()) if not 0 <= value <= MOST_ID]
        if odd:
            tokens[:], labels[:] = 0, NO_LABEL
            blank.append(BlankPiece(i, *odd[0]))
        elif count:
            tokens[:] = values
            labels[:-1] = values[1:]
            labels[-1] = np.int64(successor).astype(np.int32) if is_more else NO_LABEL
    return tuple(blank)


# --- Pieces -> the runs to copy from mapped files, and from each page once it is decoded.
#
# Pieces keep their order; rests of open documents are kept when their page is at hand. Cost: Python's lists of all
# pieces are made once, and cut.


class PageRuns:
    """Pieces of pages that must be decoded."""

    def __init__(self, at: Located, chosen: NDArray[np.bool_], documents: OpenDocuments) -> None:
        """`chosen`: [Q] the pages to decode, as a mask; `documents` have begun this call."""
        first = at.first_piece[chosen]
        self._first: list[int] = first.tolist()
        self._stop: list[int] = np.append(at.first_piece, len(at.order))[1:][chosen].tolist()
        self._at, self._documents = at, documents
        self.source = at.source[first]
        """Source of each page."""
        self.page = at.page[first]
        """Number of each page in its source."""

    def pieces(self, k: int, page: DecodedPage) -> tuple[int, int]:
        """The half-open range of the pieces of the k-th page, which is at hand."""
        self._documents.keep_page(self._first[k], page)
        return self._first[k], self._stop[k]

    def run(self, k: int, page: DecodedPage) -> Run:
        """The pieces of the k-th page."""
        first, stop = self.pieces(k, page)
        here = slice(first, stop)
        rows, starts, sizes = self._at.row_in_page[here], self._at.start[here], self._at.tokens[here]
        offsets = np.asarray(page.offsets)
        if (outside := starts + sizes + self._at.goes_on[here] > offsets[rows + 1] - offsets[rows]).any():
            raise other_rows(self._at, first + int(np.argmax(outside)))
        return page.values, first, (offsets[rows] + starts).tolist()


def other_rows(at: Located, piece: int) -> PlanError:
    """The error of a piece whose row the page was not kept for."""
    return PlanError(
        f"row {at.row_in_page[piece]} of page {at.page[piece]} of source {at.source[piece]} is asked for, and no "
        "stream of the part has it; the plan belongs to another catalog"
    )
