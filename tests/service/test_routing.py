"""Owners of pages: the same for every client, even over loaders, and moved only by who comes or goes."""

from __future__ import annotations

import numpy as np

from torchmix.service.routing import loader_keys, owners, ranking, run_keys, run_pages, source_keys

NAMES = [f"tcp://cpu-{number}:7700" for number in range(16)]


def runs_of(count: int):
    return run_keys(np.repeat(source_keys(["web"]), count), np.arange(count))


def test_all_loaders_own_about_as_many_runs():
    counts = np.bincount(owners(runs_of(64_000), loader_keys(NAMES)), minlength=16)
    assert counts.min() > 3600 and counts.max() < 4400


def test_a_loader_that_leaves_moves_its_own_pages_alone():
    runs = runs_of(5000)
    before = np.array(NAMES)[owners(runs, loader_keys(NAMES))]
    fewer = [*NAMES[:3], *NAMES[4:]]
    after = np.array(fewer)[owners(runs, loader_keys(fewer))]
    moved = before != after
    assert (moved == (before == NAMES[3])).all() and len(set(after[moved])) == 15


def test_the_order_of_names_does_not_matter():
    runs = runs_of(100)
    assert [NAMES[m] for m in owners(runs, loader_keys(NAMES))] == [
        NAMES[::-1][m] for m in owners(runs, loader_keys(NAMES[::-1]))
    ]


def test_the_owner_is_the_first_that_is_asked():
    runs, keys = runs_of(200), loader_keys(NAMES)
    for run, owner in zip(runs.tolist(), owners(runs, keys).tolist(), strict=True):
        order = ranking(run, keys)
        assert order[0] == owner and sorted(order) == list(range(16))


def test_sources_of_few_pages_are_cut_into_single_pages():
    assert [run_pages(pages, 8) for pages in (1, 10, 127, 128, 640, 10_000)] == [1, 1, 1, 2, 8, 8]
    assert run_pages(10_000, 1000) == 16
