"""Pages whose bytes are on their way from a store, until they are decoded.

In: pages of a source, and the requests for their bytes. Out: the same pages, when they are due. Must hold: a page is
requested once at a time; requests that are dropped are closed. Cost: a set of the pages' keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torchmix.array_types import Int64Array
from torchmix.reader.range_requests import RangeFetch

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
