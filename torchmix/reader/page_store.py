"""Pages of all sources by one number: kept, on their way from a store, or decoded now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import CatalogError
from torchmix.reader.open_files import RangeFetch, RequestPool
from torchmix.reader.page_cache import CacheRoom, DecodeCount, DecodedPage, PageCache, UsedRows
from torchmix.reader.source_pages import SourcePages

# --- Pages whose bytes are on their way from a store, until they are decoded.
#
# A page is requested once at a time; requests that are dropped are closed. Cost: a set of the pages' keys.

MOST_COMING = 8
"""Most calls of one source with pages on their way; several where steps take less time than a request."""


class Coming(NamedTuple):
    """Pages of one source that were asked for together."""

    keys: Int64Array
    """[k] ascending."""
    fetch: RangeFetch
    planned_bytes: int
    """Memory that they will take decoded."""


class ComingPages:
    """Pages on their way, for all sources of a reader."""

    def __init__(self) -> None:
        self._of_source: dict[int, list[Coming]] = {}
        self._source_of_key: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._source_of_key)

    def __contains__(self, key: int) -> bool:
        return key in self._source_of_key

    @property
    def planned_bytes(self) -> int:
        """Memory that all of them will take decoded."""
        return sum(one.planned_bytes for several in self._of_source.values() for one in several)

    def add(self, source: int, coming: Coming) -> None:
        """Keep requests that were begun."""
        self._of_source.setdefault(source, []).append(coming)
        self._source_of_key |= dict.fromkeys(coming.keys.tolist(), source)

    def take_here(self, source: int) -> list[Coming]:
        """Take pages of a source whose bytes have come, and the oldest ones where more than MOST_COMING would stay."""
        several = self._of_source.get(source, [])
        num_here = next((i for i, one in enumerate(several) if not one.fetch.is_here), len(several))
        return self._take(source, max(num_here, len(several) - MOST_COMING))

    def take(self, source: int) -> list[Coming]:
        """Take all pages of a source; the caller owns their requests from now on."""
        return self._take(source, len(self._of_source.get(source, [])))

    def _take(self, source: int, count: int) -> list[Coming]:
        several = self._of_source.pop(source, [])
        found, left = several[:count], several[count:]
        if left:
            self._of_source[source] = left
        for one in found:
            for key in one.keys.tolist():
                self._source_of_key.pop(key, None)
        return found

    def sources_of(self, keys: Iterable[int]) -> list[int]:
        """Sources with at least one of these pages on its way, ascending."""
        return sorted({self._source_of_key[key] for key in keys if key in self._source_of_key})

    def close(self) -> None:
        """Drop everything."""
        for source in list(self._of_source):
            for one in self.take(source):
                one.fetch.close()


# --- The store of pages: what is kept, and for how long.
#
# Kept pages never take more than the budget; what is kept or on its way decides only how often a page is decoded.


class PageStore:
    """The pages of all sources of a reader; not for several threads at once."""

    def __init__(
        self,
        sources: Sequence[SourcePages],
        *,
        cache_bytes: int,
        room: CacheRoom | None = None,
        used: Mapping[int, UsedRows] | None = None,
    ) -> None:
        """Keep at most `cache_bytes` of decoded pages, of all sources together, and of other readers in the same room;
        of those in `used` these rows alone."""
        self._sources = sources
        self._used = used or {}
        self.kept: PageCache[int, DecodedPage] = PageCache(cache_bytes, room=room)
        """Decoded pages by key."""
        pages_of_source = [source.catalog.pages.num_pages for source in sources]
        self.first_key = np.cumsum([0, *pages_of_source])
        """[S + 1] the key of the first page of each source."""
        self.count = DecodeCount(self.first_key)
        """How often pages are decoded."""
        self._requests = RequestPool()
        self._coming = ComingPages()

    def await_pages(self, keys: Int64Array | Sequence[int]) -> None:
        """Decode all pages on their way of every source that has one of these pages on its way."""
        for source in self._coming.sources_of(map(int, keys)) if self._coming else ():
            with suppress(CatalogError):  # the call that needs the page raises it
                self._finish(self._coming.take(source))

    def planned_bytes(self, source: int, page_ids: Int64Array) -> list[int]:
        """Memory that each page will take decoded; see `SourcePages.planned_bytes`."""
        planned = self._used[source] if source in self._used else self._sources[source]
        return planned.planned_bytes(page_ids)

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """Decode pages ahead of need, or request them; see `Reader.warm`."""
        first_key = int(self.first_key[source])
        planned_bytes, coming_bytes = 0, self._coming.planned_bytes
        needed = [key for key in (page_ids + first_key).tolist() if key not in self.kept and key not in self._coming]
        chosen = np.array(list(dict.fromkeys(needed)), np.int64)
        num_chosen = 0
        for page_bytes in self.planned_bytes(source, chosen - first_key):
            if not self.kept.has_room(coming_bytes + planned_bytes + page_bytes):
                break
            planned_bytes += page_bytes
            num_chosen += 1
        keys = np.sort(chosen[:num_chosen])
        earlier = self._coming.take_here(source)
        wanted = self._sources[source].wanted(keys - first_key)
        if wanted:
            self._coming.add(source, Coming(keys, RangeFetch(self._requests, wanted), planned_bytes))
        else:
            self._keep_all(self.decode(keys))
        self._finish(earlier)

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """Drop pages that are not needed soon."""
        for page in page_ids.tolist():
            self.kept.forget(int(self.first_key[source]) + page)

    def close(self) -> None:
        """Drop everything; may be called again."""
        self._coming.close()
        self._requests.close()
        self.kept.close()

    def decode(self, keys: Int64Array, fetch: RangeFetch | None = None) -> Iterator[DecodedPage]:
        """Decode pages by ascending key, and keep them. Requests to stores begin for all sources together."""
        pages_of_source: list[tuple[int, list[int]]] = []
        for s, of_source in groupby(zip(self._source_of(keys).tolist(), keys.tolist(), strict=True), key=itemgetter(0)):
            first_key = int(self.first_key[s])
            pages_of_source.append((s, [key - first_key for _, key in of_source]))
        if fetch is None:
            wanted = [one for s, pages in pages_of_source for one in self._sources[s].wanted(pages)]
            fetch = RangeFetch(self._requests, wanted) if wanted else None
        try:
            for s, pages in pages_of_source:
                first_key = int(self.first_key[s])
                for page, decoded in zip(pages, self._sources[s].decode(pages, fetch), strict=True):
                    kept = self._used[s].only(page, decoded) if s in self._used else decoded
                    if not kept.is_view:
                        self.count.add(first_key + page)
                        self.kept.keep(first_key + page, kept, kept.num_bytes)
                    yield kept
        finally:
            if fetch is not None:
                fetch.close()

    def _source_of(self, keys: Int64Array) -> Int64Array:
        return np.searchsorted(self.first_key, keys, side="right") - 1

    def _finish(self, coming: Sequence[Coming]) -> None:
        """Decode pages that were on their way."""
        try:
            for one in coming:
                self._keep_all(self.decode(one.keys, one.fetch))
        finally:
            for one in coming:
                one.fetch.close()

    def _keep_all(self, pages: Iterator[DecodedPage]) -> None:
        for _ in pages:
            pass
