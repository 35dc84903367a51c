"""Pieces of documents -> their places in one array, with the rests of open documents."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.settings import ITEM_BYTES
from torchmix.catalog.sizes import ItemTable
from torchmix.catalog.store import IdLimit, SourceCatalog
from torchmix.errors import PlanError, SourceUnreadable, where_of
from torchmix.formats.documents import NO_LOSS
from torchmix.formats.table import READ_AS
from torchmix.reader.locate import Located, row_keys
from torchmix.reader.mapped_files import MappedFiles
from torchmix.reader.page_cache import DecodedPage
from torchmix.reader.protocol import WantedPieces

# --- Tokens that no model is trained to predict: those that stand for items, and those without loss.
#
# A place lies inside its piece; the last token of a piece counts if the token behind the piece does. Cost: a few array
# operations over the items of the rows.


def tables_without_labels(sources: Sequence[SourceCatalog]) -> list[tuple[int, ItemTable]]:
    """Items of sources, and marks, whose tokens are no labels, each with the number of its source."""
    return [
        (number, table)
        for number, source in enumerate(sources)
        if source.tokenizer != ITEM_BYTES
        for table in (*map(source.sizes.items.get, source.items), source.sizes.marks.get(NO_LOSS))
        if table is not None
    ]


def unlabelled_places(tables: Sequence[tuple[int, ItemTable]], pieces: WantedPieces) -> Int64Array | None:
    """Places without a label, each once, in no order; None where there is no table.

    Args:
        tables: From `tables_without_labels`.
        pieces: All of one call.
    """
    if not tables:
        return None
    source, rows, starts, tokens, places = pieces.source, pieces.row, pieces.start, pieces.tokens, pieces.places
    found = [np.zeros(0, np.int64)]
    for number, table in tables:
        piece = np.flatnonzero(source == number)
        first = np.asarray(table.first_item_of_row[rows[piece]], np.int64)
        count = np.asarray(table.first_item_of_row[rows[piece] + 1], np.int64) - first
        item = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
        piece = np.repeat(piece, count)
        offset = np.asarray(table.offset[item], np.int64)
        begin = np.maximum(offset - 1, starts[piece])
        stop = np.minimum(offset - 1 + np.asarray(table.tokens[item], np.int64), starts[piece] + tokens[piece])
        width = np.maximum(stop - begin, 0)
        target = places[piece] + begin - starts[piece]
        found.append(np.arange(width.sum()) + np.repeat(target - (np.cumsum(width) - width), width))
    joined = np.concatenate(found)
    if len({number for number, _ in tables}) == len(tables) or not len(joined):
        return joined  # runs of one table never overlap
    is_without = np.zeros(int(joined.max()) + 1, np.bool_)
    is_without[joined] = True
    return np.flatnonzero(is_without)


# --- Ids of files that the index does not decode, checked as they are read.
#
# No id outside the vocabulary reaches a trainer. Cost: one pass over all tokens of the call for the largest id, 0.03
# to 0.3 ns a token. The pieces are checked one by one only where that id is too large; it may also lie between the
# pieces.


class IdCheck:
    """Compares ids with the vocabulary, for sources whose files hold only tokens."""

    def __init__(self, catalogs: Sequence[SourceCatalog], limit: IdLimit) -> None:
        """`catalogs`: all sources, in the order of their numbers."""
        self._catalogs = catalogs
        self._limit = limit
        self._is_unseen = [
            catalog.map is not None or (catalog.format in READ_AS and not READ_AS[catalog.format].scan_reads_tokens)
            for catalog in catalogs
        ]

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
        unseen = [one for one in at.ranges if self._is_unseen[one[0]]]
        if not unseen or (self._are_below(values) and self._are_below(successors)):
            return
        for s, start, stop in unseen:
            for i in range(start, stop):
                piece = values[places[i] : places[i] + at.tokens[i]]
                if not (self._are_below(piece) and self._are_below(successors[i : i + 1])):
                    raise self._outside(s, at, i, [*piece.tolist(), int(successors[i])])

    def _are_below(self, values: NDArray[np.integer[Any]]) -> bool:
        """Whether ids are at least 0 and below the limit."""
        if not len(values):
            return True
        if values.dtype.kind == "u" or values.dtype.itemsize < 4:
            return bool(values.max() < self._limit.size and (values.dtype.kind == "u" or values.min() >= 0))
        # A negative one, read without its sign, is larger than any limit.
        return bool(values.view(f"u{values.dtype.itemsize}").max() < self._limit.size)

    def _outside(self, s: int, at: Located, i: int, tokens: list[int]) -> SourceUnreadable:
        catalog, row = self._catalogs[s], int(at.row[i])
        place = next(place for place, token in enumerate(tokens) if not 0 <= token < self._limit.size)
        file = next(file for file in reversed(catalog.files) if file.first_row <= row)
        return SourceUnreadable(
            f"row {row - file.first_row} holds the token {tokens[place]} at place {int(at.start[i]) + place}, but "
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

Run = tuple[NDArray[np.integer[Any]], int, Sequence[int]]
"""Tokens, the number of the first of consecutive pieces, and where in the tokens each of these pieces begins."""


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

    __slots__ = ("_going_on", "_is_begun", "_places", "_scratch", "_sizes", "_stops", "num_bytes", "out", "successors")

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


# --- The rests of documents that steps draw piece by piece, kept outside the page cache.
#
# The tokens are those of the page. Each source may have one document open for hundreds of steps, so without this file
# the cache would have to hold a page of each source. Cost: one copy of the rest of each open document; a few array
# operations a call, and nothing where no document is open.


class _Rest(NamedTuple):
    """The last tokens of a document."""

    begin: int
    """Number of the first of these tokens in the document."""
    values: NDArray[np.integer[Any]]


class OpenDocuments:
    """The documents that are open now, and the rests of those whose page was read."""

    def __init__(self) -> None:
        self._begin_of: dict[int, int] = {}
        self._rests: dict[int, _Rest] = {}
        self._wanted: dict[int, dict[int, int]] = {}
        """Rows of open documents in each page of the present call, by the page's first piece."""

    @property
    def num_bytes(self) -> int:
        """Memory of the rests."""
        return sum(rest.values.nbytes for rest in self._rests.values())

    def follow(self, source: NDArray[np.integer[Any]], rows: Int64Array, starts: Int64Array) -> None:
        """Name the documents that are open after the next call; drop the rests of those not open before it.

        Args:
            source: [n] index of the source.
            rows: [n] row of the source; each (source, row) once.
            starts: [n] the first token that a call after the next one may ask for.
        """
        self._rests = {key: self._cut(key, rest) for key, rest in self._rests.items() if key in self._begin_of}
        self._begin_of = dict(zip(row_keys(source, rows).tolist(), starts.tolist(), strict=True))

    def clear(self) -> None:
        """Drop all rests."""
        self._begin_of, self._rests = {}, {}

    def _cut(self, key: int, rest: _Rest) -> _Rest:
        """The rest without tokens that were already given, where the saving is worth a copy."""
        gone = self._begin_of[key] - rest.begin
        return _Rest(rest.begin + gone, rest.values[gone:].copy()) if 2 * gone > len(rest.values) else rest

    def begin(self, at: Located) -> tuple[NDArray[np.bool_], list[Run]]:
        """Begin a call: find the pieces at hand, and the pages whose rests are to be kept.

        Args:
            at: The pieces of the call.

        Returns:
            [Q] which pages are not needed because all their pieces are at hand; and the runs of these pieces.
        """
        is_served, runs = np.zeros(len(at.first_piece), np.bool_), list[Run]()
        self._wanted = {}
        known = np.array(sorted({*self._begin_of, *self._rests}), np.int64)
        if not len(known):
            return is_served, runs
        keys = row_keys(at.source, at.row)
        pieces = np.flatnonzero(known[np.minimum(known.searchsorted(keys), len(known) - 1)] == keys)
        num_pieces = np.diff(np.append(at.first_piece, len(keys))).tolist()
        pages = (at.first_piece.searchsorted(pieces, side="right") - 1).tolist()
        for page, of_page in groupby(zip(pages, pieces.tolist(), strict=True), key=itemgetter(0)):
            several = [piece for _, piece in of_page]
            at_hand = [self._run(int(keys[piece]), piece, int(at.start[piece])) for piece in several]
            found = [run for run in at_hand if run is not None]
            if len(found) == num_pieces[page]:
                is_served[page] = True
                runs += found
            else:
                wanted = {int(keys[piece]): int(at.row_in_page[piece]) for piece in several}
                self._wanted[int(at.first_piece[page])] = wanted
        return is_served, runs

    def keep(self, first_piece: int, page: DecodedPage) -> None:
        """Keep the rests of the open documents of a page; the page is named by its first piece in the call."""
        for key, row in self._wanted.get(first_piece, {}).items():
            start, stop = page.offsets[row : row + 2].tolist()
            begin = self._begin_of.get(key, stop)  # a document that ends in this call has no rest
            is_new = key not in self._rests or self._rests[key].begin > begin  # or the document begins again
            if is_new and start + begin < stop and not page.is_view:
                self._rests[key] = _Rest(begin, page.values[start + begin : stop].copy())

    def _run(self, key: int, piece: int, start: int) -> Run | None:
        """The run of a piece, if the rest of its document is kept."""
        rest = self._rests.get(key)
        return None if rest is None or start < rest.begin else (rest.values, piece, [start - rest.begin])


# --- Pieces -> the runs to copy from mapped files, and from each page once it is decoded.
#
# Pieces keep their order; rests of open documents are kept when their page is at hand. Cost: Python's lists of all
# pieces are made once, and cut.


def mapped_runs(at: Located, mapped_of_source: Sequence[MappedFiles], token_bytes: Int64Array) -> list[Run]:
    """Runs of pieces in mapped files.

    Args:
        at: The pieces.
        mapped_of_source: The files of each source.
        token_bytes: [S] bytes of a token in sources whose files are mapped, 0 for all others; set to 0 where files
            cannot be mapped.
    """
    found: list[tuple[NDArray[np.integer[Any]], int, int]] = []
    for s, start, stop in at.ranges if token_bytes.any() else ():
        mapped = mapped_of_source[s]
        if mapped.whole is not None:
            found.append((mapped.whole, start, stop))
            mapped.verify(at.page[start:stop])
        elif (files := mapped.files_of_pages(at.page[start:stop])) is not None:
            mapped.verify(at.page[start:stop])
            borders = [*(start + first for first, _ in files), stop]
            found += [(values, *span) for (_, values), span in zip(files, pairwise(borders), strict=True)]
        else:
            token_bytes[s] = mapped.token_bytes  # 0 from now on, if the files could not be mapped
    begins = at.begin_in_file.tolist() if found else []
    return [(values, start, begins[start:stop]) for values, start, stop in found]


class PageRuns:
    """Pieces of pages that must be decoded."""

    def __init__(self, at: Located, chosen: NDArray[np.bool_], documents: OpenDocuments) -> None:
        """`chosen`: [Q] the pages to decode, as a mask; `documents` have begun this call."""
        first = at.first_piece[chosen]
        self._first = first.tolist()
        self._stop = np.append(at.first_piece, len(at.order))[1:][chosen].tolist()
        self._rows: list[int] = at.row_in_page.tolist() if len(first) else []
        self._starts: list[int] = at.start.tolist() if len(first) else []
        self._documents, self._sizes = documents, at.tokens
        self.source = at.source[first]
        """Source of each page."""
        self.page = at.page[first]
        """Number of each page in its source."""

    def run(self, k: int, page: DecodedPage) -> Run:
        """The pieces of the k-th page."""
        first, stop, offsets = self._first[k], self._stop[k], page.offsets
        self._documents.keep(first, page)
        rows, starts = self._rows[first:stop], self._starts[first:stop]
        if page.is_part:
            self._check_used(k, page)
        return page.values, first, [offsets[row] + start for row, start in zip(rows, starts, strict=True)]

    def _check_used(self, k: int, page: DecodedPage) -> None:
        """Raise a PlanError where a piece is of a row that the page was not kept for."""
        first, stop = self._first[k], self._stop[k]
        for row, start, size in zip(
            self._rows[first:stop], self._starts[first:stop], self._sizes[first:stop].tolist(), strict=True
        ):
            if start + size > page.offsets[row + 1] - page.offsets[row]:
                raise PlanError(
                    f"row {row} of page {self.page[k]} of source {self.source[k]} is asked for, and no stream of the "
                    "part has it; the plan belongs to another catalog"
                )
