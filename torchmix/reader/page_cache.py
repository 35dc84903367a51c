"""Decoded pages that are kept, with the memory that they take, and how often they were decoded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from math import inf
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec.structs import force_setattr
from numpy.typing import NDArray

from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.formats.source import Documents
from torchmix.native.calls import type_number
from torchmix.native.load import address_of
from torchmix.recipe.parts import Part
from torchmix.recipe.streams import row_sets_of

# --- How much is decoded, and how often: once in each window that needs a page, or again.
#
# A page that two windows need, and that the cache dropped between, counts for each of them. Cost: a byte a page of all
# sources; only touched bytes take memory.


class DecodeCount:
    """Counts over the pages of all sources."""

    def __init__(self, first_key: Sequence[int] | NDArray[np.int64]) -> None:
        """`first_key`: [S + 1] the first page of each source, counted over all sources; then the number of pages."""
        self._first_key = np.asarray(first_key, np.int64)
        self._is_decoded = np.zeros(int(self._first_key[-1]), np.bool_)
        """[P] whether each page was decoded for the current or the next window of its source."""
        self._num_decoded = self._num_distinct = 0

    def add(self, key: int) -> None:
        """Count a page that was decoded."""
        self._num_decoded += 1
        self._num_distinct += not self._is_decoded[key]
        self._is_decoded[key] = True

    def end_window(self, source: int, pages: NDArray[np.int64] | None) -> None:
        """End a window of a source with these pages; None: a window with all of its pages."""
        first, stop = self._first_key[source : source + 2]
        self._is_decoded[slice(first, stop) if pages is None else pages + first] = False

    @property
    def amplification(self) -> float:
        """Pages decoded over distinct pages of their window; 1 where nothing had to be decoded."""
        return self._num_decoded / self._num_distinct if self._num_distinct else 1.0


class DecodeFigures(msgspec.Struct):
    """Sums over all sources of a reader since it was made; each adds what it does, so asking costs nothing."""

    pages_decoded: int = 0
    bytes_decoded: int = 0
    bytes_read: int = 0
    """Bytes of pages and companions that were read from files."""
    bad_pages: int = 0
    """Pages that became blank, each once."""
    read_s: float = 0.0
    decode_s: float = 0.0


# --- A decoded page, and a companion: what the reader keeps, with the memory that it takes.
#
# A page holds no memory but its own, so that the bytes counted are the bytes kept. Cost: a copy at 0.3 ns a token
# where several pages were one run or ids become narrower, else none.

PAGE_OVERHEAD_BYTES = 512
"""Bytes of the Python objects around a decoded page."""

NO_ID = -1
"""Stands for each token of a page that could not be read: no file holds it as an id."""
INT32 = np.iinfo(np.int32)


RunNumbers = tuple[int, int, int, int, int]
"""An array of tokens, as the struct run in native/gather.c: address, length, type, address and length of offsets."""


def run_numbers(values: NDArray[np.integer[Any]]) -> RunNumbers:
    """An array of tokens without documents; it must be contiguous."""
    assert values.flags.c_contiguous and values.flags.aligned, "an array of tokens as a native call takes it"
    return address_of(values), len(values), type_number(values.dtype), 0, 0


class DecodedPage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The documents of one page."""

    values: NDArray[np.integer[Any]]
    """[tokens] its documents end to end: the file's integers if those are narrower than 32 bits, else uint16 where the
    index has seen no larger id in the source, else int32, or int64 where an id needs it. Rows that are yet to be
    encoded have bytes of texts, or ids."""
    offsets: memoryview
    """[rows + 1] int64, where each document begins in `values`."""
    is_view: bool = False
    """Whether `values` is the kernel's memory, and not this process's."""
    is_blank: bool = False
    """Whether it replaces a page that could not be read."""
    run: RunNumbers = (0, 0, 0, 0, 0)
    """The page as a native call takes it."""

    def __post_init__(self) -> None:
        offsets = np.asarray(self.offsets)
        force_setattr(self, "run", (*run_numbers(self.values)[:3], address_of(offsets), len(offsets)))

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return (0 if self.is_view else self.values.nbytes) + self.offsets.nbytes + PAGE_OVERHEAD_BYTES


class Companion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The companion of a chunk, as Parquet's dictionary."""

    content: bytes
    """The dictionary page as it lies in the file."""
    memo: dict[str, bytes] = msgspec.field(default_factory=dict)
    """What the source keeps of the dictionary, see `PageRun.memo`."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return len(self.content) + sum(map(len, self.memo.values()))


def blank_page(offsets: NDArray[np.int64]) -> DecodedPage:
    """The page that replaces one that could not be read; `offsets` [rows + 1] as the catalog has them."""
    return DecodedPage(values=np.full(offsets[-1], NO_ID, np.int32), offsets=offsets.data, is_blank=True)


def cut_documents(documents: Documents, rows_of_page: Sequence[int], *, is_narrow: bool = False) -> list[DecodedPage]:
    """The pages of a run, each in memory of its own.

    Args:
        documents: The documents of the run.
        rows_of_page: Rows of each page.
        is_narrow: Whether all ids are known to be at least 0 and below 65,536.
    """
    if len(rows_of_page) == 1:
        return [_page(documents.values, documents.offsets, is_narrow=is_narrow)]
    pages, start = [], 0
    for num_rows in rows_of_page:
        offsets = documents.offsets[start : start + num_rows + 1]
        values = documents.values[offsets[0] : offsets[-1]]
        pages.append(_page(values, offsets - offsets[0], is_narrow=is_narrow, copy=True))
        start += num_rows
    return pages


def _page(
    values: NDArray[np.integer[Any]], offsets: NDArray[np.int64], *, is_narrow: bool, copy: bool = False
) -> DecodedPage:
    return DecodedPage(values=values.astype(_width(values, is_narrow=is_narrow), copy=copy), offsets=offsets.data)


def _width(values: NDArray[np.integer[Any]], *, is_narrow: bool) -> np.dtype[np.integer[Any]]:
    """The dtype that keeps ids of a page: one width for nearly all pages of a source, so that most are copied by plain
    memory."""
    if values.dtype.itemsize <= 2:
        return values.dtype
    if is_narrow:
        return np.dtype(np.uint16)
    if values.dtype.itemsize < 4 or values.dtype == np.int32:
        return values.dtype
    if not len(values) or (values.min() >= INT32.min and values.max() <= INT32.max):
        return np.dtype(np.int32)
    return np.dtype(np.int64)


# --- The rows of a source that a part uses at all: of a decoded page, no others are kept.
#
# A used row is what it was. Cost: a binary search and a copy of the used rows for each page.
#
# A window of a selection has many more pages than one of its source, so that it holds as many rows. Their other rows
# would push each other out of the cache, and a page would be decoded for nearly each of its rows.

MOST_USED = 0.5
"""Part of a source's rows: where more are used, pages are kept whole, since a copy saves little."""


def used_rows(part: Part, catalog: Catalog) -> dict[str, NDArray[np.integer]]:
    """The used rows, ascending, of each source of which all streams are views with few rows.

    Args:
        part: What is planned.
        catalog: Its catalog, with views.
    """
    by_source: dict[str, list[str]] = {}
    for name, one in row_sets_of(part).items():
        by_source.setdefault(one.source, []).append(name)
    found: dict[str, NDArray[np.integer]] = {}
    for source, names in by_source.items():
        if not all(name in catalog.views for name in names):
            continue
        kept = [catalog.views[name].kept for name in names]
        if sum(map(len, kept)) <= MOST_USED * catalog.sources[source].num_documents:
            found[source] = kept[0] if len(kept) == 1 else np.unique(np.concatenate(kept))
    return found


class UsedRows:
    """The used rows of one source."""

    def __init__(self, rows: NDArray[np.integer], source: SourceCatalog) -> None:
        """`rows`: ascending, each once."""
        self._rows, self._sizes = rows, source.sizes

    def only(self, page: int, decoded: DecodedPage) -> DecodedPage:
        """A decoded page with its used rows alone."""
        if decoded.is_view or decoded.is_blank:
            return decoded
        rows, offsets = self._of_page(page), np.asarray(decoded.offsets)
        if 2 * len(rows) > len(offsets):
            return decoded
        starts, stops = offsets[rows], offsets[rows + 1]
        counts = np.zeros(len(offsets), np.int64)
        counts[rows + 1] = stops - starts
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        values = [decoded.values[start:stop] for start, stop in spans] or [decoded.values[:0].copy()]
        return DecodedPage(values=np.concatenate(values), offsets=counts.cumsum().data)

    def planned_bytes(self, pages: NDArray[np.int64]) -> list[int]:
        """Memory that each page will take; see `SourcePages.planned_bytes`."""
        first_row = self._sizes.first_row_of_page
        num_rows = (np.asarray(first_row[pages + 1]) - np.asarray(first_row[pages])).tolist()
        tokens = [
            int(self._sizes.tokens[first + self._of_page(page)].sum(dtype=np.int64))
            for page, first in zip(pages.tolist(), np.asarray(first_row[pages]).tolist(), strict=True)
        ]
        return [4 * n + 8 * (rows + 1) + PAGE_OVERHEAD_BYTES for n, rows in zip(tokens, num_rows, strict=True)]

    def _of_page(self, page: int) -> NDArray[np.int64]:
        """The used rows of a page, counted from its first row."""
        start, stop = (int(row) for row in self._sizes.first_row_of_page[page : page + 2])
        begin, end = np.searchsorted(self._rows, (start, stop))
        return np.asarray(self._rows[begin:end], np.int64) - start


# --- LRU caches with one budget of bytes: the least recently used entry of all of them is dropped first.
#
# The sizes of kept values of the caches of a room never sum to more than its budget, which is the largest that one of
# them asks for; a value larger than it is never kept. Cost: under a microsecond a call. A cache is for one thread at a
# time, and each cache of a room may be for another: what one drops to make room, another finds gone.

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class CacheRoom:
    """What several caches share; by default a cache has one of its own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a collector may close another cache of the room meanwhile
        """Held to use, to keep and to drop."""
        self.clock = count()
        """The order of uses."""
        self.num_bytes = 0
        """Bytes kept now, by all."""
        self.budget_bytes = 0
        self._budgets: dict[PageCache[Any, Any], int] = {}

    def enter(self, cache: PageCache[Any, Any], budget_bytes: int) -> None:
        """A cache more."""
        with self.lock:
            self._budgets[cache] = budget_bytes
            self.budget_bytes = max(self._budgets.values())

    def leave(self, cache: PageCache[Any, Any]) -> None:
        """A cache less, which holds nothing any more."""
        with self.lock:
            self._budgets.pop(cache, None)
            self.budget_bytes = max(self._budgets.values(), default=0)
            self.make_room(0)

    def make_room(self, num_bytes: int) -> None:
        """Drop what was used longest ago until so many more can be kept; under the lock."""
        while self.num_bytes + num_bytes > self.budget_bytes:
            min(self._budgets, key=PageCache.oldest_use).drop_oldest()


class _Entry(msgspec.Struct, Generic[Value]):
    value: Value
    num_bytes: int
    used: int
    """By the clock of the room."""


class PageCache(Generic[Key, Value]):
    """Decoded pages, or companions, by any key."""

    def __init__(self, budget_bytes: int, *, room: CacheRoom | None = None) -> None:
        """Keep at most `budget_bytes`, 0 or more; with the other caches of a room, at most what the largest may."""
        self._room = CacheRoom() if room is None else room
        self._kept: OrderedDict[Key, _Entry[Value]] = OrderedDict()
        self._num_bytes = 0
        self._room.enter(self, budget_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes kept here now."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        """Whether a value is kept; does not count as a use."""
        return key in self._kept

    def use(self, key: Key) -> Value | None:
        """The value, now the most recently used one; None if it is not kept."""
        with self._room.lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            found.used = next(self._room.clock)
            return found.value

    def use_all(self, keys: Iterable[Key]) -> list[Value | None]:
        """As `use` of each, in their order."""
        with self._room.lock:
            return [self.use(key) for key in keys]

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` more can be kept without dropping anything."""
        return self._room.num_bytes + num_bytes <= self._room.budget_bytes

    def keep(self, key: Key, value: Value, num_bytes: int) -> None:
        """Keep a value as the most recently used one; drop the least recently used ones to make room."""
        room = self._room
        with room.lock:
            self._drop(key)
            if num_bytes > room.budget_bytes:
                return
            room.make_room(num_bytes)
            self._kept[key] = _Entry(value, num_bytes, next(room.clock))
            self._count(num_bytes)

    def forget(self, key: Key) -> None:
        """Drop a value, if it is kept."""
        with self._room.lock:
            self._drop(key)

    def clear(self) -> None:
        """Drop everything."""
        with self._room.lock:
            self._kept.clear()
            self._count(-self._num_bytes)

    def close(self) -> None:
        """Drop everything and leave the room; nothing is kept from now on."""
        self.clear()
        self._room.leave(self)

    def oldest_use(self) -> float:
        """When the entry was used that was used longest ago; under the lock of the room."""
        return next(iter(self._kept.values())).used if self._kept else inf

    def drop_oldest(self) -> None:
        """Drop that entry; under the lock of the room."""
        _, oldest = self._kept.popitem(last=False)
        self._count(-oldest.num_bytes)

    def _drop(self, key: Key) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._count(-found.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._room.num_bytes += num_bytes
