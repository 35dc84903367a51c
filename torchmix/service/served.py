"""What a loader process reads: the catalogs of a recipe, one reader for each, and the thread that reads."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog
from torchmix.errors import PlanError, TorchmixError, WireError
from torchmix.parallel.wire import ErrorForm
from torchmix.reader.items import UnitReader
from torchmix.reader.piece_copy import Scratch
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.service.messages import (
    ALIGNED_BYTES,
    MOST_PAGES,
    MOST_REASON,
    MOST_TOKENS,
    Arrays,
    FailureReply,
    LoaderHello,
    PieceReply,
    arrays_of_others,
    encode,
    forms_of,
    one_line,
    pieces_of,
)

# --- What a loader process reads: the catalogs of a recipe, and one reader for each that clients ask for.
#
# An answer is a pure function of the request, whoever asked what before; a client of another version, catalog or
# transform is refused with a sentence that names the difference.

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Between two looks for the same unknown catalog."""
MOST_CATALOGS = 16
"""Catalogs that one loader serves, at most, before it is started again."""
MOST_OPEN = 4096
"""Documents that are kept because others may ask for the rest of them; those asked last."""
OPEN_BYTES = 256 << 20
"""Open documents have as many bytes as the cache of pages, at least so many, with ids of 8 bytes."""
_NO_TOKENS = np.zeros(0, np.int32)


def transforms_digest(catalog: Catalog, seed: int) -> bytes:
    """8 bytes over the seed and the transform of each source: who agrees on it makes the same tokens of a row."""
    lines = [str(seed), *(f"{name}\t{source.transform_id}" for name, source in catalog.sources.items())]
    text = "\n".join(lines)
    return hashlib.sha256(text.encode()).digest()[:8]


class PartToServe(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a loader needs to know of a part of a recipe."""

    catalog: Catalog
    masked: frozenset[str] = frozenset()
    """Sources whose bad pages are masked."""
    seed: int = 0
    """The recipe's."""
    is_cut: bool = True
    """Whether documents are given in pieces."""
    maps: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The words of the map of each source that has one."""
    decodes: Catalog | None = None
    """The texts whose items are decoded here, where `catalog` is a `unit_catalog`."""


class ServedCatalogs:
    """The catalogs of a recipe, of each of its parts."""

    def __init__(
        self,
        parts: Mapping[str, PartToServe],
        directory: Path,
        *,
        cache_bytes: int,
        parts_with: Callable[[str], Mapping[str, PartToServe]] = lambda _: {},
    ) -> None:
        """Nothing is read yet, but tokenizers are opened, so that a loader that cannot serve does not start.

        Args:
            parts: By name; the catalogs of several may be equal.
            directory: The recipe's folder.
            cache_bytes: Bytes of decoded pages kept, of all parts together; as much again for each catalog that a
                part gets later.
            parts_with: Asked with the fingerprint of a catalog that a client has and that is not known: the parts with
                the catalogs that they have by now, or with that one, where it is an earlier one.

        Raises:
            CatalogStale: The catalog holds lengths of another transform than this process has.
            RecipeError, SourceUnreadable: A tokenizer cannot be opened here.
        """
        self._directory, self._cache_bytes, self._parts_with = directory, cache_bytes, parts_with
        self._part_of: dict[str, str] = {}
        self._parts: dict[str, _ServedPart] = {}
        self._looked_for, self._looked_s = "", -LOOK_S
        self._take(parts)

    def _take(self, parts: Mapping[str, PartToServe]) -> None:
        """Serve the catalogs of parts, too."""
        new = {part.catalog.fingerprint: part for part in parts.values()}
        new = {fingerprint: part for fingerprint, part in new.items() if fingerprint not in self._parts}
        cache_bytes = self._cache_bytes // max(1, len(new))
        opened = {name: _ServedPart(part, self._directory, cache_bytes) for name, part in new.items()}
        # The reading thread goes through the mappings meanwhile.
        self._parts = {**self._parts, **opened}
        self._part_of = {**self._part_of, **{part.catalog.fingerprint: name for name, part in parts.items()}}

    def _look_for(self, catalog: str) -> None:
        """Take the catalogs that were published since the loader started, or an earlier one that is wanted."""
        now = time.monotonic()
        if catalog == self._looked_for and now - self._looked_s < LOOK_S:
            return
        if len(self._parts) >= MOST_CATALOGS:
            return
        self._looked_for, self._looked_s = catalog, now
        try:
            self._take(self._parts_with(catalog))
        except TorchmixError as error:
            logger.warning("catalog %s cannot be served: %s", catalog, error)

    def refusal(self, hello: LoaderHello) -> str:
        """Why a client is not served; empty where it is."""
        if hello.catalog not in self._parts:
            self._look_for(hello.catalog)
        part = self._parts.get(hello.catalog)
        if part is None:
            ours = ", ".join(f"{fingerprint} ({name})" for fingerprint, name in self._part_of.items())
            return (
                f"the client has catalog {hello.catalog}, this loader serves {ours}, and no run that is known here had "
                "that one: their files, columns, tokenizers or windows differ. Give both the same recipe and the same "
                "catalog folder; a loader that was started before the recipe was edited is started again"
            )
        if hello.transforms != part.transforms:
            return (
                f"the client's transforms from rows to tokens are {hello.transforms.hex()}, this loader's are "
                f"{part.transforms.hex()}, with the same catalog; give both the same seed, and run one torchmix"
            )
        if frozenset(hello.masked) != part.masked:
            return (
                f"the client masks bad rows of {sorted(hello.masked)}, this loader of {sorted(part.masked)}; "
                "give both recipes the same bad_rows"
            )
        return ""

    def read(self, catalog: str, arrays: Arrays) -> Arrays:
        """The tokens of pieces, as the ragged array `ids`.

        Args:
            catalog: Fingerprint, of a hello that was not refused.
            arrays: The arrays of a `PieceRequest`.

        Raises:
            WireError: The request is none.
            PlanError: It asks for what the catalog does not have.
            CatalogError: As `Reader.read`.
        """
        return self._parts[catalog].read(arrays)

    def warm(self, catalog: str, source: int, pages: Int64Array) -> None:
        """Decode pages ahead of need."""
        self._parts[catalog].reader.warm(source, pages)

    def check_pages(self, catalog: str, source: int, pages: Int64Array) -> None:
        """Look whether there are such pages.

        Raises:
            WireError: There are not.
        """
        self._parts[catalog].check_pages(source, pages)

    def pages_at_once(self, catalog: str, source: int) -> int:
        """How many pages one `warm` should have at most, 1 or more."""
        return self._parts[catalog].reader.pages_at_once(source)

    def forget(self, catalog: str, source: int, pages: Int64Array, *, num_clients: int) -> None:
        """Note that one more client needs pages no more; drop those that none of `num_clients` does."""
        part = self._parts[catalog]
        over = part.over(source, pages, num_clients)
        if len(over):
            part.reader.forget(source, over)

    def stats(self) -> dict[str, int | float]:
        """Figures of all readers since they were made; ratios are those of the part that read most."""
        found: dict[str, int | float] = {}
        parts = sorted((part.reader.stats() for part in self._parts.values()), key=lambda one: one["bytes_served"])
        for one in parts:
            for name, value in one.items():
                is_sum = name != "decode_amplification"
                found[name] = found.get(name, 0) + value if is_sum else value
        return found

    def close(self) -> None:
        """Close all readers."""
        for part in self._parts.values():
            part.reader.close()


class OpenRows:
    """The documents that were asked for in part, of whichever client: they are kept for who asks for the rest."""

    def __init__(self, most_tokens: int) -> None:
        """Nothing is open yet; documents that are have at most `most_tokens` together, but for one."""
        self._most_tokens = most_tokens
        self._num_tokens = 0
        self._asked: dict[tuple[int, int], tuple[int, int]] = {}
        """By source and row: tokens that were asked for, and those of the document; who was asked last is last."""

    def follow(self, pieces: WantedPieces, totals: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Note a request that asks for what there is; which documents are open after it: source and row.

        Args:
            pieces: [n] what is asked for.
            totals: [n] tokens of the document of each.
        """
        in_part = np.flatnonzero((pieces.tokens > 0) & (pieces.tokens < totals))
        new = pieces.tokens - (pieces.start + pieces.tokens < totals)  # one that continues comes with its successor
        columns = (column[in_part].tolist() for column in (pieces.source, pieces.row, new, totals))
        for source, row, tokens, total in zip(*columns, strict=True):
            asked, known = self._asked.pop((source, row), (0, 0))
            self._num_tokens -= known
            # Where a piece is asked for in parts, some come without a successor. What is asked for twice may let a
            # document count as over early, which costs another look into its page.
            if asked + tokens + total // MOST_TOKENS < total:
                self._asked[source, row] = asked + tokens, total
                self._num_tokens += total
        while len(self._asked) > MOST_OPEN or (self._num_tokens > self._most_tokens and len(self._asked) > 1):
            self._num_tokens -= self._asked.pop(next(iter(self._asked)))[1]
        table = np.array([*self._asked], np.int64).reshape(-1, 2).T
        return table[0], table[1]


class _ServedPart:
    """One catalog, with its reader."""

    def __init__(self, part: PartToServe, directory: Path, cache_bytes: int) -> None:
        catalog = part.catalog
        self.reader: Reader | UnitReader
        if part.decodes is not None:
            self.reader = UnitReader(
                part.decodes, directory, masked=part.masked, cache_bytes=cache_bytes, seed=part.seed
            )
        else:
            self.reader = Reader(
                catalog, directory, cache_bytes=cache_bytes, masked=part.masked, seed=part.seed, maps=part.maps
            )
        self.transforms = transforms_digest(catalog, part.seed)
        self.masked = part.masked
        self._names = list(catalog.sources)
        self._pages = [source.pages.num_pages for source in catalog.sources.values()]
        self._tokens = [source.sizes.tokens for source in catalog.sources.values()]
        self._scratch = Scratch()
        self._over: dict[int, NDArray[np.int32]] = {}
        """By source: how many clients need each page no more."""
        self._is_cut = part.is_cut
        self._open = OpenRows(max(cache_bytes, OPEN_BYTES) // 8)

    def read(self, arrays: Arrays) -> Arrays:
        pieces = pieces_of(arrays)
        totals = self._totals(pieces)  # before anything is kept
        if self._is_cut:
            source, row = self._open.follow(pieces, totals)
            self.reader.hold(source, row, np.zeros_like(row))
        read = self.reader.read(pieces, scratch=self._scratch)
        ids = {"ids": read.values, "ids.lengths": pieces.tokens.astype(np.int32)}
        if not read.others:
            return ids
        num_bytes = sum(array.nbytes + ALIGNED_BYTES for array in ids.values())
        return ids | dict(arrays_of_others(read.others, len(pieces.row), ids_bytes=num_bytes))

    def _totals(self, pieces: WantedPieces) -> Int64Array:
        """[n] tokens of the document of each piece.

        Raises:
            PlanError: The catalog has no such source, row or tokens.
        """
        totals = np.empty(len(pieces.row), np.int64)
        for s in np.unique(pieces.source).tolist():
            chosen = np.flatnonzero(pieces.source == s)
            rows = pieces.row[chosen]
            known = self._tokens[s] if 0 <= s < len(self._tokens) else _NO_TOKENS
            if rows.min() < 0 or rows.max() >= len(known):
                name = self._names[s] if 0 <= s < len(self._names) else s
                raise PlanError(
                    f"source {name!r}: rows {rows.min()} to {rows.max()} are asked for, the catalog has {len(known)}"
                )
            totals[chosen] = known[rows]
        outside = (pieces.start < 0) | (pieces.start > totals) | (pieces.tokens > totals - pieces.start)
        if outside.any():
            k = int(outside.argmax())
            raise PlanError(
                f"source {self._names[pieces.source[k]]!r}: {pieces.tokens[k]} tokens from token {pieces.start[k]} of "
                f"row {pieces.row[k]} are asked for, which has {totals[k]}"
            )
        return totals

    def check_pages(self, source: int, pages: Int64Array) -> None:
        """Raise WireError where the catalog has no such pages."""
        if source >= len(self._pages):
            raise WireError(f"pages of source {source}, of {len(self._pages)}")
        if len(pages) and (pages.min() < 0 or pages.max() >= self._pages[source]):
            raise WireError(f"pages {pages.min()} to {pages.max()} of source {source}, which has {self._pages[source]}")

    def over(self, source: int, pages: Int64Array, num_clients: int) -> Int64Array:
        """Those of some pages that so many clients need no more; from now on they may be needed again."""
        if source not in self._over:
            self._over[source] = np.zeros(self._pages[source], np.int32)
        counts, pages = self._over[source], np.unique(pages)
        counts[pages] += 1
        found: Int64Array = pages[counts[pages] >= num_clients]
        counts[found] = 0
        return found


# --- A loader's reading thread: requests one after the other, and pages ahead of need where none waits.
#
# Clients take turns, so that one waits for a request of each other client at most; what a request fails with is its
# client's to raise; a request that nobody waits for any more is not read.

COUNT_S = 0.25
"""Between two sums of the readers' figures while requests wait."""
_LOOK_S = 1.0


class Asker(msgspec.Struct, eq=False):
    """A client of a loader."""

    sender: bytes
    """Its connection."""
    catalog: str
    heard_s: float
    num_owed: int = 0
    """Requests that were accepted, and are not done with."""
    owed_bytes: int = 0
    """Planned bytes of requests whose replies have not left."""
    leaving: deque[tuple[Any, int]] = msgspec.field(default_factory=deque)
    """Replies that were sent and may not have left: how to know, and their planned bytes."""


class Work(msgspec.Struct, kw_only=True, eq=False):
    """What is done next: a request, or pages to decode ahead or to drop."""

    asker: Asker
    catalog: str
    number: int = 0
    checksum: int = 0
    """What the request's frames carry."""
    arrays: Arrays = msgspec.field(default_factory=dict)
    num_bytes: int = 0
    """Planned."""
    until_s: float = 0.0
    source: int = 0
    pages: Int64Array | None = None
    num_clients: int = 0
    """Pages that so many clients must need no more are dropped; 0: pages are decoded."""


class ReadingThread:
    """Reads for all clients of a loader."""

    def __init__(self, served: ServedCatalogs, wake: Callable[[], None]) -> None:
        """Nothing runs yet.

        Args:
            served: What is read.
            wake: Called after each request, so that its reply is taken.
        """
        self._served, self._wake = served, wake
        self._asked, self._ahead = _Turns(), _Turns()
        self._came = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="torchmix-read", daemon=True)
        self.done: deque[tuple[Work, tuple[bytes, memoryview] | None]] = deque()
        """Requests that are done with, and their replies; None where nobody waits for one."""
        self._since_s = self._counted_s = 0.0
        self.figures: dict[str, int | float] = {}
        """The readers' figures, summed."""
        self.num_failures = self.num_late = 0
        self.num_taken = 0
        """Requests and pages that it has begun with."""

    @property
    def thread_number(self) -> int:
        """The kernel's number of the thread; 0 before it runs."""
        return self._thread.native_id or 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return self._asked.num

    @property
    def is_asked(self) -> bool:
        """Whether a request is not done yet."""
        return self._asked.num > 0 or self._since_s > 0

    @property
    def at_hand_s(self) -> float:
        """Since when the request at hand is being read; 0 if there is none."""
        since_s = self._since_s
        return max(0.0, time.monotonic() - since_s) if since_s else 0.0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the request at hand."""
        with self._came:
            self._is_stopping = True
            self._came.notify_all()
        self._thread.join()

    def add(self, work: Work) -> None:
        """Have something done. Pages ahead are left out where MOST_PAGES of the client wait."""
        with self._came:
            if work.pages is None:
                self._asked.add(work)
            elif self._ahead.num_pages(work.asker) + len(work.pages) <= MOST_PAGES:
                self._ahead.add(work)
            self._came.notify()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            self.num_taken += 1
            if work.pages is not None:
                self._prepare(work, work.pages)
                continue
            if time.monotonic() > work.until_s:
                self.num_late += 1
                self.done.append((work, None))
            else:
                self._since_s = time.monotonic()
                self.done.append((work, self._read(work)))
                self._since_s = 0.0
                self._count(is_now=not self._asked.num)
            self._wake()

    def _count(self, *, is_now: bool = True) -> None:
        """Sum the figures: at once where nothing waits, else four times a second."""
        now = time.monotonic()
        if is_now or now - self._counted_s > COUNT_S:
            self.figures, self._counted_s = self._served.stats(), now

    def _next(self) -> Work | None:
        with self._came:
            while not self._is_stopping and not self._asked.num and not self._ahead.num:
                self._came.wait(_LOOK_S)
            if self._is_stopping:
                return None
            return self._asked.take() if self._asked.num else self._ahead.take()

    def _read(self, work: Work) -> tuple[bytes, memoryview]:
        try:
            arrays = self._served.read(work.catalog, work.arrays)
            reply = PieceReply(number=work.number, request=work.checksum, forms=forms_of(arrays))
            return encode(reply, arrays)
        except Exception as error:  # the edge of a process: carried to the client
            self.num_failures += 1
            logger.warning("a request of a client failed: %s", one_line(str(error), MOST_REASON))
            return encode(FailureReply(number=work.number, error=ErrorForm.of(error)))

    def _prepare(self, work: Work, pages: Int64Array) -> None:
        try:
            if work.num_clients:
                self._served.forget(work.catalog, work.source, pages, num_clients=work.num_clients)
            else:
                at_once = self._served.pages_at_once(work.catalog, work.source)
                if len(pages) > at_once:  # requests come first
                    with self._came:
                        self._ahead.add(msgspec.structs.replace(work, pages=pages[at_once:]), is_first=True)
                self._served.warm(work.catalog, work.source, pages[:at_once])
            self._count()
        except Exception as error:  # the request that needs the page raises it
            logger.warning("met while reading ahead: %s", one_line(str(error), MOST_REASON))


class _Turns:
    """What clients wait for, one of each client in turn."""

    def __init__(self) -> None:
        self._of: dict[int, deque[Work]] = {}
        self.num = 0

    def add(self, work: Work, *, is_first: bool = False) -> None:
        """Behind all else of its client; or before it."""
        queue = self._of.setdefault(id(work.asker), deque())
        (queue.appendleft if is_first else queue.append)(work)
        self.num += 1

    def take(self) -> Work:
        """The next; its client comes last then."""
        asker = next(iter(self._of))
        queue = self._of.pop(asker)
        work = queue.popleft()
        if queue:
            self._of[asker] = queue
        self.num -= 1
        return work

    def num_pages(self, asker: Asker) -> int:
        """Pages that wait for a client."""
        return sum(1 + len(work.pages) for work in self._of.get(id(asker), ()) if work.pages is not None)
