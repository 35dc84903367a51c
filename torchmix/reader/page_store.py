"""Pages of all sources by one number: kept, on their way from a store, or decoded now.

In: numbers of pages over all sources. Out: the pages. Must hold: kept pages never take more than the budget; what is
kept or on its way decides only how often a page is decoded. Cost: that of decoding, and a dictionary's access a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.errors import CatalogError
from torchmix.reader.coming_pages import Coming, ComingPages
from torchmix.reader.decode_count import DecodeCount
from torchmix.reader.decoded_page import DecodedPage
from torchmix.reader.page_cache import CacheRoom, PageCache
from torchmix.reader.range_requests import RangeFetch, RequestPool
from torchmix.reader.source_pages import SourcePages
from torchmix.reader.used_rows import UsedRows


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

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """Decode pages ahead of need, or request them; see `Reader.warm`."""
        first_key = int(self.first_key[source])
        planned_bytes, coming_bytes = 0, self._coming.planned_bytes
        needed = [key for key in (page_ids + first_key).tolist() if key not in self.kept and key not in self._coming]
        chosen = np.array(list(dict.fromkeys(needed)), np.int64)
        num_chosen = 0
        planned = self._used[source] if source in self._used else self._sources[source]
        for page_bytes in planned.planned_bytes(chosen - first_key):
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
