"""Which loader owns a page: rendezvous hashing, so that all clients come to the same without a word.

The order of two loaders for a page does not depend on the others, so a loader that joins or leaves moves only its own
pages. Routing is never needed for correctness: any loader answers any request. Cost: one hash for each page and loader,
some 20 ns.

Sources: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998 (highest random weight); with
parts, Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005 (logarithmic method).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.mixture.keys import U64, hash_columns, mix64, named_key

MOST_RUN_PAGES = 16
"""Pages of a run: neighbours that are read together have one owner."""
RUNS_OF_SOURCE = 64
"""Runs of a source, at least, so that no loader owns much more of it than another."""


def run_pages(num_pages: int, pages_at_once: int) -> int:
    """How many neighbouring pages of a source, 1 or more, have one owner."""
    return max(1, min(pages_at_once, num_pages // RUNS_OF_SOURCE, MOST_RUN_PAGES))


def source_keys(names: Sequence[str]) -> U64:
    """[S] the hash of each source's name."""
    return np.array([named_key(0, "loaders", name) for name in names], np.uint64)


def loader_keys(names: Sequence[str]) -> U64:
    """[m] the hash of each loader's name."""
    return np.array([named_key(0, "loader", name) for name in names], np.uint64)


def run_keys(source_key: U64, run: Int64Array) -> U64:
    """[q] the hash of runs of pages, given those of their sources."""
    return hash_columns(0, source_key, run)


def owners(runs: U64, loaders: U64, parts: Int64Array | None = None) -> Int64Array:
    """[q] the loader, in [0, m), that owns each run; m is at least 1.

    Args:
        runs: [q] hashes of runs of pages.
        loaders: [m] hashes of loaders.
        parts: [q, m] or [1, m] parts that each loader has of the run's source, some of them above 0; None: each has as
            much. A loader with twice the parts owns twice the runs.
    """
    found: Int64Array = _scores(mix64(runs[:, None] ^ loaders[None, :]), parts).argmax(axis=1)
    return found


def ranking(run: int, loaders: U64, parts: Int64Array | None = None) -> list[int]:
    """The loaders, in [0, m), in the order in which they are asked for a run: its owner first, and those that have no
    part of its source last; `parts`: [m]."""
    hashes = mix64(np.uint64(run) ^ loaders)
    scores = _scores(hashes, parts)
    # Those without a part are ordered among themselves as if all were even.
    order: list[int] = np.lexsort((hashes, scores))[::-1].tolist()
    return order


def _scores(hashes: U64, parts: Int64Array | None) -> U64 | NDArray[np.float64]:
    """The largest of a row wins, with a chance in proportion to its parts: log(u) / parts, u even in (0, 1)."""
    if parts is None:
        return hashes
    weights = np.asarray(parts, np.float64)
    logs = np.log((hashes.astype(np.float64) + 0.5) / 2.0**64)
    return np.where(weights > 0, logs / np.maximum(weights, 1), -np.inf)


class SourceRoutes:
    """Which loaders read which sources."""

    def __init__(self, sources: Sequence[str], loaders: Sequence[Mapping[str, int] | None]) -> None:
        """Take what loaders have registered.

        Args:
            sources: [S] names.
            loaders: [m] of each the parts that it has, by source; None: it reads all of them.
        """
        self.parts: Int64Array | None = None
        """[S, m] parts of each; a source that no loader has is read by all. None: every loader reads all sources."""
        if not loaders or all(one is None for one in loaders):
            return
        self.parts = np.zeros((len(sources), len(loaders)), np.int64)
        for m, one in enumerate(loaders):
            for s, name in enumerate(sources if one is not None else ()):
                self.parts[s, m] = max(0, one.get(name, 0)) if one is not None else 0
        for m in (m for m, one in enumerate(loaders) if one is None):  # as much as one that has the source
            count = np.maximum(1, np.count_nonzero(self.parts, axis=1))
            self.parts[:, m] = np.maximum(1, self.parts.sum(axis=1) // count)
        self.parts[~self.parts.any(axis=1)] = 1

    def of_sources(self, source: NDArray[np.integer[Any]]) -> Int64Array | None:
        """[n, m] the parts of some sources, as `owners` takes them."""
        return None if self.parts is None else self.parts[source]

    def of_source(self, source: int) -> Int64Array | None:
        """[m] the parts of a source, as `ranking` takes them."""
        return None if self.parts is None or source >= len(self.parts) else self.parts[source]
