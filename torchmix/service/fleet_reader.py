"""Pieces -> their tokens, asked of a fleet: the same as a `Reader` gives.

The result is that of the reader in this process, whichever loaders answer; no data file is opened here. Cost: locating
the pieces, a request for each 2 MiB and owner, and one copy of the ids from the message to their places.

A piece that continues is asked for with one token more, its successor. A piece longer than a request is asked for in
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.settings import source_of_items
from torchmix.catalog.store import Catalog, IdLimit
from torchmix.errors import LoaderClosed
from torchmix.mixture.keys import U64
from torchmix.native.load import is_native
from torchmix.reader.locate import Located, Locator
from torchmix.reader.piece_copy import (
    IdCheck,
    NativeCopy,
    PieceCopy,
    Scratch,
    fill_from,
    tables_without_labels,
    unlabelled_places,
    write_padding,
)
from torchmix.reader.protocol import Filled, Filling, OtherRows, Tokens, WantedPieces
from torchmix.reader.source_pages import BATCH_BYTES
from torchmix.service.fleet import Asked, LoaderFleet
from torchmix.service.messages import (
    MOST_TOKENS,
    TARGET_BYTES,
    Arrays,
    columns_of,
    others_of,
    planned_bytes,
    rows_of,
)
from torchmix.service.routing import owners, run_keys, run_pages, source_keys


class FleetReader:
    """Asks loaders; it belongs to one thread at a time. They keep what they were asked for in part."""

    def __init__(
        self, catalog: Catalog, fleet: LoaderFleet, *, ids: IdLimit | None = None, is_joined: bool = True
    ) -> None:
        """Wait for the loaders.

        Args:
            catalog: Its sources are numbered in its order, by sorted name.
            fleet: Its hello names this catalog; closed by `close`.
            ids: The bound that all ids must be below; by default ids of a .bin may be any.
            is_joined: Whether loaders are waited for; else `look` says when there are some.

        Raises:
            LoaderLost: No loader answers.
        """
        sources = list(catalog.sources.values())
        self._fleet = fleet
        self._without_labels = tables_without_labels(sources)
        self._locator = Locator(sources)
        self._no_files = np.zeros(len(sources), np.int64)
        self._ids = None if ids is None else IdCheck(sources, ids)
        self._source_keys = source_keys([source.name for source in sources])
        tables = [source.pages for source in sources]
        self._at_once = [
            max(1, BATCH_BYTES * table.num_pages // max(1, int(table.chunk_bytes.sum()))) for table in tables
        ]
        runs = [run_pages(table.num_pages, k) for table, k in zip(tables, self._at_once, strict=True)]
        self._run_pages = np.array(runs, np.int64)
        self._scratch = Scratch()
        self._is_closed = False
        self._bytes_served = self._bytes_received = 0
        fleet.members.name_sources([source_of_items(source.name) for source in sources])
        if is_joined:
            fleet.members.join()

    def look(self) -> int:
        """How many loaders answer now; between two calls of `read`."""
        return self._fleet.look()

    @property
    def is_coming(self) -> bool:
        """As `FleetMembers.is_coming`."""
        return self._fleet.members.is_coming

    def why_none(self) -> str:
        """That no loader answers, with what became of each."""
        return self._fleet.members.why_none()

    def runs_of_pieces(self, pieces: WantedPieces) -> U64:
        """[n] the hash of the run of pages that each piece lies in.

        Raises:
            PlanError: A piece lies outside its document or source.
        """
        at = self._locator.locate(pieces, token_bytes=self._no_files)
        found = np.empty(len(pieces), np.uint64)
        found[at.order] = run_keys(self._source_keys[at.source], at.page // self._run_pages[at.source])
        return found

    def pages_of_pieces(self, pieces: WantedPieces) -> list[tuple[int, Int64Array]]:
        """The first pages of pieces, each once, by source; errors as those of `runs_of_pieces`."""
        at = self._locator.locate(pieces, token_bytes=self._no_files)
        is_first = np.append(True, (at.page[1:] != at.page[:-1]) | (at.source[1:] != at.source[:-1]))
        return [(source, at.page[start:stop][is_first[start:stop]]) for source, start, stop in at.ranges]

    def runs_of_pages(self, source: int, page_ids: Int64Array) -> U64:
        """[k] the hash of the run that each page of a source lies in."""
        return run_keys(np.repeat(self._source_keys[source], len(page_ids)), page_ids // self._run_pages[source])

    def read(self, pieces: WantedPieces, *, scratch: Scratch | None = None) -> Tokens:
        """Tokens of n pieces, and the successor of each; arguments and errors as those of `Reader.read`.

        Raises:
            LoaderLost: No loader answers.
        """
        at = self._located(pieces)
        return self._tokens(pieces, at, _parts_of(pieces.take(at.order), at.goes_on), scratch or self._scratch)

    def fill(self, pieces: WantedPieces, outs: Sequence[Filling], *, pads: bool = True) -> Filled:
        """Write tokens and labels of n pieces to their places; arguments and errors as those of `Reader.fill`.

        Raises:
            LoaderLost: No loader answers.
        """
        at = self._located(pieces)
        if pads:
            write_padding(pieces, outs)
        parts = _parts_of(pieces.take(at.order), at.goes_on)
        if is_native() and len(parts.piece) == len(pieces):
            limits = None if self._ids is None else self._ids.limits(at)
            copy = NativeCopy(at, parts.pieces.places, outs=outs, num_places=pieces.num_places, limits=limits)
            others, blank = self._fetch(at, parts, copy), copy.blank()
            copy.check_limits(self._ids)
        else:  # the label between two parts is in the second one
            tokens = self._tokens(pieces, at, parts, self._scratch)
            goes_on = np.empty(len(pieces), np.bool_)
            goes_on[at.order] = at.goes_on
            others, blank = tokens.others, fill_from(pieces, tokens, goes_on, outs)
        unlabelled = unlabelled_places(self._without_labels, pieces)
        return Filled(blank=blank, others=others, unlabelled=unlabelled)

    def _located(self, pieces: WantedPieces) -> Located:
        if self._is_closed:
            raise LoaderClosed("the reader was used after close(); make a new one")
        pieces.check_places()
        return self._locator.locate(pieces, token_bytes=self._no_files)

    def _tokens(self, pieces: WantedPieces, at: Located, parts: _Parts, scratch: Scratch) -> Tokens:
        copy = PieceCopy(
            sizes=parts.pieces.tokens,
            places=parts.pieces.places,
            goes_on=parts.goes_on,
            num_places=pieces.num_places,
            scratch=scratch,
        )
        others = self._fetch(at, parts, copy)
        behind = np.array(copy.successors, np.int64)[parts.last]
        if self._ids is not None:
            self._ids.check(at, pieces.places[at.order], copy.out, behind)
        successors = np.empty(len(at.order), np.int64)
        successors[at.order] = behind
        unlabelled = unlabelled_places(self._without_labels, pieces)
        return Tokens(values=copy.out, successors=successors, others=others, unlabelled=unlabelled)

    def _fetch(self, at: Located, parts: _Parts, copy: PieceCopy | NativeCopy) -> tuple[OtherRows, ...]:
        """Ask for parts of pieces, and copy what comes."""
        self._fleet.look(greets=True)  # loaders may have come since the last call, and these pieces may be many steps'
        wanted = parts.pieces.tokens + parts.goes_on
        wanted_bytes = planned_bytes(1, 0) + 4 * wanted
        columns = columns_of(replace(parts.pieces, tokens=wanted))
        source, piece = parts.pieces.source, parts.piece
        runs = run_keys(self._source_keys[source], at.page[piece] // self._run_pages[source])
        requests = self._requests(runs, source, wanted_bytes, np.flatnonzero(wanted > 0))
        asked = [
            Asked(
                run=int(runs[some[0]]),
                source=int(source[some[0]]),
                arrays={name: column[some] for name, column in columns.items()},
                num_bytes=int(wanted_bytes[some].sum()),
            )
            for some in requests
        ]
        others: list[OtherRows] = []

        def take(k: int, arrays: Arrays) -> None:
            some = requests[k]
            values = rows_of(arrays, "ids", wanted[some])
            found = others_of(arrays, at.order[piece[some]])  # both are looked at before any is used
            self._bytes_received += values.nbytes
            copy.copy_from(values, some, np.cumsum(wanted[some]) - wanted[some])
            others.extend(found)

        self._fleet.fetch(asked, take)
        self._bytes_served += copy.num_bytes
        return tuple(others)

    def pages_at_once(self, source: int) -> int:
        """How many pages of a source, 1 or more, are worth one call of `warm`."""
        return self._at_once[source]

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """Let the owners of pages decode them ahead of need."""
        self._tell(source, page_ids, is_over=False)

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """Let the owners of pages drop them, once no client needs them."""
        self._tell(source, page_ids, is_over=True)

    def stats(self) -> dict[str, int | float]:
        """Figures since the reader was made: bytes that came and that were used, and those of `LoaderFleet.stats`."""
        return {
            "bytes_received": self._bytes_received,
            "bytes_served": self._bytes_served,
            **self._fleet.stats(),
        }

    def close(self) -> None:
        """End the connections; may be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._fleet.close()

    def _requests(
        self, runs: NDArray[np.uint64], source: NDArray[np.integer[Any]], num_bytes: Int64Array, some: Int64Array
    ) -> list[Int64Array]:
        """Parts of pieces, cut into requests: those of one owner, in order, in equal parts of at most 2 MiB."""
        names, keys, routes = self._fleet.members.names, self._fleet.members.keys, self._fleet.members.routes
        owner = np.zeros(len(some), np.int64)
        if len(keys):
            owner = owners(runs[some], keys, routes.of_sources(source[some]))
        found: list[Int64Array] = []
        for m in np.flatnonzero(np.bincount(owner)).tolist():
            mine = some[owner == m]
            most = min(TARGET_BYTES, self._fleet.request_bytes(names[m])) if names else TARGET_BYTES
            found += [mine[start:stop] for start, stop in pairwise(_borders(num_bytes[mine], most))]
        return found

    def _tell(self, source: int, pages: Int64Array, *, is_over: bool) -> None:
        names, keys = self._fleet.members.names, self._fleet.members.keys
        if not len(pages) or not names:
            return
        owner = owners(
            self.runs_of_pages(source, pages), keys, self._fleet.members.routes.of_sources(np.array([source]))
        )
        for m in np.flatnonzero(np.bincount(owner)).tolist():
            self._fleet.tell(names[m], source, pages[owner == m], is_over=is_over)


def _borders(num_bytes: Int64Array, most_bytes: int) -> list[int]:
    """Where to cut [n] parts into stretches that are about equal, of at most `most_bytes`, or of two of the largest.

    A first part that is larger than an equal stretch has no border before it.
    """
    ends, largest = np.cumsum(num_bytes), int(num_bytes.max())
    count = -(-int(ends[-1]) // max(1, largest, most_bytes - largest))
    if count == 1:
        return [0, len(num_bytes)]
    inner = np.searchsorted(ends, ends[-1] * np.arange(1, count) // count, side="right")
    return [*np.unique([0, *inner.tolist()]).tolist(), len(num_bytes)]


class _Parts(NamedTuple):
    """Pieces, each in parts that fit a request; nearly all have one."""

    pieces: WantedPieces
    """The parts."""
    piece: Int64Array
    """Which piece each part is of; ascending."""
    goes_on: NDArray[np.bool_]
    """Whether a part ends a piece whose document has more tokens: only then is its successor asked for."""
    last: Int64Array
    """[n] the last part of each piece."""


def _parts_of(pieces: WantedPieces, goes_on: NDArray[np.bool_]) -> _Parts:
    """Cut n pieces."""
    tokens = pieces.tokens
    count = np.maximum(1, -(-tokens // MOST_TOKENS))
    last = np.cumsum(count) - 1
    piece = np.repeat(np.arange(len(tokens)), count)
    number = np.arange(len(piece)) - (last - count + 1)[piece]
    before = number * MOST_TOKENS
    whole = pieces.take(piece)
    parts = replace(
        whole,
        start=whole.start + before,
        tokens=np.minimum(whole.tokens - before, MOST_TOKENS),
        places=whole.places + before,
    )
    return _Parts(parts, piece, goes_on[piece] & (number == (count - 1)[piece]), last)
