"""Where rows are transformed: fewer bytes, less time, within what node workers can do, and by the user's word."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from torchmix.service.scale.loads import SourceTraffic, times_read, transform_places


def traffic(name: str, **values: int) -> SourceTraffic:
    given = {"read_bytes": 1000, "sent_bytes": 4000, "busy_ns": 1_000_000, "page_rows": 100, "is_by_row": True}
    return SourceTraffic(name=name, **{**given, **values})


def test_a_page_is_read_by_every_node_that_has_a_row_of_it() -> None:
    assert times_read(1, 1000) == 1 and times_read(512, 1) == 1
    assert times_read(2, 2) == Fraction(3, 2)
    assert 7.99 < times_read(8, 1000) <= 8
    assert times_read(4096, 1 << 30) == times_read(4096, 4096)


def test_one_node_reads_what_it_has_time_for_and_many_have_loaders_read() -> None:
    sources = [traffic("a"), traffic("b", read_bytes=3000), traffic("c", busy_ns=100_000_000)]
    one = transform_places(sources, nodes=1, loaders=3)
    assert [one[name].place for name in "abc"] == ["worker", "worker", "loader"], "c is more than a loader's work"
    many = transform_places(sources, nodes=64, loaders=64)
    assert [many[name].place for name in "abc"] == ["loader"] * 3, "every page would be read 47 times"
    assert many["a"].worker_bytes == int(1000 * times_read(64, 100)) and many["a"].loader_bytes == 5000


def test_pages_with_few_rows_are_read_by_nodes_where_ids_are_large() -> None:
    few = {"page_rows": 1, "read_bytes": 100}
    found = transform_places([traffic("a", **few), traffic("b")], nodes=64, loaders=8)
    assert (found["a"].place, found["b"].place) == ("worker", "loader")


def test_decoding_counts_each_time_that_a_page_is_read_and_rows_once() -> None:
    rows, pages = traffic("rows"), traffic("pages", is_by_row=False)
    found = transform_places([rows, pages], nodes=8, loaders=8)
    assert found["rows"].worker_ns == rows.busy_ns and found["pages"].worker_ns > 7 * pages.busy_ns


def test_the_user_s_word_comes_first_and_images_stay() -> None:
    said = {"a": "loader", "c": "worker", "b": "auto"}
    sources = [traffic("a"), traffic("b"), traffic("c", busy_ns=10**9)]
    found = transform_places(sources, nodes=1, loaders=1, said=said)
    assert [found[name].place for name in "abc"] == ["loader", "loader", "worker"], "c fills the node worker"
    images = transform_places([traffic("a", has_items=True), traffic("b")], nodes=1, loaders=1)
    assert (images["a"].place, images["b"].place) == ("loader", "worker")


@pytest.mark.parametrize("seed", range(40))
def test_workers_get_no_more_than_their_share_and_the_order_of_sources_does_not_matter(seed: int) -> None:
    chance = random.Random(seed)
    sources = [
        traffic(
            f"s{number}",
            read_bytes=chance.randrange(1, 10**6),
            sent_bytes=chance.randrange(1, 10**6),
            busy_ns=chance.randrange(10**7),
            page_rows=chance.randrange(1, 300),
            is_by_row=chance.random() < 0.5,
        )
        for number in range(30)
    ]
    nodes, loaders = chance.randrange(1, 20), chance.randrange(1, 20)
    found = transform_places(sources, nodes=nodes, loaders=loaders)
    chosen = [one for one in found.values() if one.place == "worker"]
    total = sum(one.loader_ns for one in found.values())
    assert sum(one.worker_ns for one in chosen) <= nodes * total // (nodes + loaders)
    assert all(one.worker_bytes < one.loader_bytes and one.worker_ns <= one.loader_ns for one in chosen)
    assert transform_places(chance.sample(sources, len(sources)), nodes=nodes, loaders=loaders) == found
