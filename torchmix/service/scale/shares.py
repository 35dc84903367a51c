"""What of the sources, and of the cache, each loader has.

In: the loaders of a partition. Out: the loaders of each node; the cache of each. Must hold: integers alone; nodes have
loaders one by one in turn, so that each has its part of the work; a loader's cache is in proportion to the pages that
it is to keep, and all caches together are not more than there is. Cost: some operations a loader.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from torchmix.service.scale.partition import LoaderPlace

LEAST_PART = 8
"""A loader has at least this part of an even share of the cache: pages of other sources are asked of it, too, where
their loaders are lost."""


class LoaderShare(msgspec.Struct, frozen=True, kw_only=True):
    """One loader's part."""

    sources: dict[str, int]
    """Parts of each source, by name."""
    page_bytes: int
    """Decoded pages of these."""


def shares_of_nodes(places: Sequence[LoaderPlace], nodes: int) -> list[list[LoaderShare]]:
    """The loaders of each node."""
    assert len(places) % nodes == 0
    shares = [LoaderShare(sources=dict(sorted(one.parts.items())), page_bytes=one.page_bytes) for one in places]
    return [shares[node::nodes] for node in range(nodes)]


def shared_cache(cache_bytes: int, page_bytes: Sequence[int]) -> list[int]:
    """The cache of each loader."""
    count, total = len(page_bytes), sum(page_bytes)
    if not total:
        return [cache_bytes // count] * count
    least = cache_bytes // (LEAST_PART * count)
    left = cache_bytes - least * count
    return [least + left * one // total for one in page_bytes]
