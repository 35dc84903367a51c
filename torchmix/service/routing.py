"""Which loader owns a page: rendezvous hashing, so that all clients come to the same without a word.

In: loaders by name, sources by name, pages. Out: for each page, its owner; for one page, all loaders in the order in
which they are asked. Must hold: the order of two loaders for a page does not depend on the others, so a loader that
joins or leaves moves only its own pages. Routing is never needed for correctness: any loader answers any request. Cost:
one hash for each page and loader, some 20 ns.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998 (highest random weight).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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


def owners(runs: U64, loaders: U64) -> Int64Array:
    """[q] the loader, in [0, m), that owns each run; m is at least 1."""
    found: Int64Array = mix64(runs[:, None] ^ loaders[None, :]).argmax(axis=1)
    return found


def ranking(run: int, loaders: U64) -> list[int]:
    """The loaders, in [0, m), in the order in which they are asked for a run: its owner first."""
    scores = mix64(np.uint64(run) ^ loaders)
    order: list[int] = np.argsort(scores, kind="stable")[::-1].tolist()
    return order
