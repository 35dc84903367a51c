"""Owners of pages: the same for every client, even over loaders, and moved only by who comes or goes."""

from __future__ import annotations

import numpy as np

from torchmix.service.routing import SourceRoutes, loader_keys, owners, ranking, run_keys, run_pages, source_keys

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


def test_a_loader_with_twice_the_parts_owns_twice_the_runs():
    parts = np.array([[1, 2, 4, 0, *[0] * 12]])
    counts = np.bincount(owners(runs_of(70_000), loader_keys(NAMES), parts), minlength=16)
    assert counts[3:].sum() == 0
    np.testing.assert_allclose(counts[:3], [10_000, 20_000, 40_000], rtol=0.04)


def test_more_parts_of_one_loader_move_pages_to_it_alone():
    runs, keys = runs_of(5000), loader_keys(NAMES[:4])
    before, after = owners(runs, keys, np.array([[2, 2, 2, 2]])), owners(runs, keys, np.array([[2, 2, 2, 5]]))
    assert set(after[before != after]) == {3} and (before != after).sum() > 500


def test_even_parts_are_as_no_parts():
    runs, keys = runs_of(5000), loader_keys(NAMES)
    np.testing.assert_array_equal(owners(runs, keys), owners(runs, keys, np.full((1, 16), 8)))


def test_loaders_without_a_part_are_asked_last_and_the_owner_first():
    parts = np.array([0, 3, 0, 1, 0, 0, 2, *[0] * 9])
    keys = loader_keys(NAMES)
    for run in runs_of(100).tolist():
        order = ranking(run, keys, parts)
        assert set(order[:3]) == {1, 3, 6} and sorted(order) == list(range(16))
        assert order[0] == owners(np.array([run], np.uint64), keys, parts[None])[0]


def test_a_source_that_no_loader_has_is_read_by_all_and_a_loader_without_parts_reads_all():
    routes = SourceRoutes(["a", "b", "c"], [{"a": 4}, {"a": 2, "b": 1}, None])
    assert routes.parts.tolist() == [[4, 2, 3], [0, 1, 1], [0, 0, 1]], "c is read by the one that reads all"
    assert routes.of_source(0).tolist() == [4, 2, 3]
    assert SourceRoutes(["a", "b"], [{"a": 1}, {}]).parts.tolist() == [[1, 0], [1, 1]]
    assert SourceRoutes(["a"], [None, None]).parts is None
