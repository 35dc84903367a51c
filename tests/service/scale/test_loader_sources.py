"""What of the sources and of the cache each loader has."""

from __future__ import annotations

from tests.support.loads import load_of
from torchmix.service.scale.loads import LEAST_PART, shared_cache, sources_of_nodes
from torchmix.service.scale.partition import LoaderBudget, partition, partition_of_nodes

BUDGET = LoaderBudget(cpu=12, memory_bytes=1 << 40)


def test_caches_are_in_proportion_to_pages_and_within_the_budget() -> None:
    found = shared_cache(8000, [300, 100, 0, 0])
    assert sum(found) <= 8000 and found == [250 + 7000 * 3 // 4, 250 + 7000 // 4, 250, 250]
    assert min(found) == 8000 // (LEAST_PART * 4)
    assert shared_cache(1001, [0, 0, 0]) == [333] * 3


def test_each_node_has_as_many_loaders_and_all_sources_have_one() -> None:
    loads = [load_of(f"s{number}", 1000 * (number + 1)) for number in range(9)]
    for nodes in (1, 2, 3, 5):
        found = partition_of_nodes(loads, BUDGET, nodes=nodes)
        assert len(found.loaders) % nodes == 0 and len(found.loaders) <= BUDGET.cpu
        shares = sources_of_nodes(found.loaders, nodes)
        assert len({len(one) for one in shares}) == 1
        assert {name for one in shares for each in one for name in each.sources} == {one.name for one in loads}
        assert sum(each.page_bytes for one in shares for each in one) == sum(one.window_bytes for one in loads)


def test_loaders_behind_nodes_are_sized_for_what_is_left_to_them() -> None:
    loads = [load_of("a", 8_100_000), load_of("b", 900_000)]

    def made(nodes: int, *first: str) -> tuple[int, int]:
        found = partition_of_nodes(loads, BUDGET, nodes=nodes, read_first=first)
        return len(found.loaders), sum(place.cost for place in found.loaders)

    assert made(1) == (10, 9_000_000), "nine workers and one"
    assert made(1, "a", "b") == (9, 8_100_000), "a node reads as much as a loader"
    assert made(3) == (12, 9_000_000) and made(3, "a", "b") == (9, 6_300_000), "seven, and as many on each node"
    assert made(3, "b") == (9, 8_100_000), "no more than it may read"
    assert made(12, "a", "b") == (12, 0), "there is a loader for what memory does not hold"


def test_pages_of_a_loader_are_its_memory_without_states() -> None:
    loads = [load_of("a", 9000), load_of("b", 10)]
    of_state = {one.name: one.state_bytes for one in loads}
    for place in partition(loads, BUDGET, processes=3).loaders:
        assert place.memory_bytes - place.page_bytes == sum(of_state[name] for name in place.parts)
