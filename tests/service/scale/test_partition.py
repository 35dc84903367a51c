"""Loaders and their sources: budgets hold, every source is read, the work is even, and nothing else decides."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from msgspec.structs import replace

from tests.support.loads import GIB, PLENTY, load_of, random_loads
from torchmix.errors import OptionError
from torchmix.reader.items import KEPT_BYTES
from torchmix.service.scale.partition import (
    LOADER_BYTES,
    LoaderBudget,
    Partition,
    SourceLoad,
    partition,
)

SEEDS = range(120)


def memory_of(found: Partition, number: int, loads: list[SourceLoad]) -> int:
    """Memory of a loader, counted again: states whole, pages by parts."""
    total = 0
    for load in loads:
        parts = [one.parts.get(load.name, 0) for one in found.loaders]
        if parts[number]:
            total += load.state_bytes + load.window_bytes * parts[number] // sum(parts)
    return total


@pytest.mark.parametrize("seed", SEEDS)
def test_every_source_has_loaders_within_its_bound_and_budgets_hold(seed):
    loads, chance = random_loads(seed), random.Random(seed)
    budget = LoaderBudget(
        cpu=chance.randint(2, 80), memory_bytes=chance.randint(2, 400) * GIB, node_cpu=1, node_bytes=GIB
    )
    try:
        found = partition(loads, budget)
    except OptionError as error:
        assert "of memory" in str(error)
        return
    count = len(found.loaders)
    assert 1 <= count <= budget.cpu - 1
    held = sum(one.memory_bytes + LOADER_BYTES for one in found.loaders)
    assert held <= budget.memory_bytes - budget.node_bytes
    for number, one in enumerate(found.loaders):
        assert one.memory_bytes + LOADER_BYTES <= budget.bytes_of_loader(count)
        assert abs(one.memory_bytes - memory_of(found, number, loads)) <= len(loads) * 512
    for load in loads:
        assert 1 <= len(found.loaders_of(load.name)) <= load.most_loaders
    assert sum(one.cost for one in found.loaders) == sum(load.cost for load in loads)


@pytest.mark.parametrize("seed", SEEDS)
def test_sources_that_can_be_shared_make_even_work(seed):
    loads = random_loads(seed, most_loaders=4096)
    processes = random.Random(seed).randint(1, 40)
    found = partition(loads, PLENTY, processes=processes)
    assert len(found.loaders) == processes and found.ratio <= Fraction(6, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_sources_does_not_matter(seed):
    loads = random_loads(seed)
    budget = LoaderBudget(cpu=24, memory_bytes=1 << 44)
    shuffled = random.Random(seed).sample(loads, len(loads))
    assert partition(loads, budget) == partition(shuffled, budget)


def test_sources_of_one_cost_are_told_apart_by_name():
    loads = [load_of(name, 5_000_000) for name in "dbca"]
    found = partition(loads, PLENTY, processes=2)
    assert found.clusters == (("a", "b", "c", "d"),)
    assert found.ratio == 1
    assert [sorted(one.parts) for one in found.loaders] == [["a", "c"], ["b", "d"]]


def test_the_three_stages_on_the_example_of_the_page():
    # docs/scale.md works this out by hand.
    loads = [load_of("text", 2_000_000), load_of("code", 2_000_000), load_of("speech", 8_000_000)]
    loads += [load_of("images", 24_000_000), load_of("video", 60_000_000, most_loaders=16)]
    found = partition(loads, LoaderBudget(cpu=13, memory_bytes=64 * GIB, node_cpu=1, node_bytes=GIB))
    assert found.clusters == (("video",), ("images",), ("speech",), ("code", "text"))
    assert found.workers == {"video": 16, "images": 12, "speech": 4, "code": 1, "text": 1}
    assert len(found.loaders) == 12, "34 workers, and 13 processors less the node worker's"
    assert len(found.loaders_of("video")) == 8 and len(found.loaders_of("text")) == 1
    assert found.ratio <= Fraction(6, 5)


def test_a_large_source_lies_on_few_loaders():
    loads = [load_of("web", 80_000_000), *(load_of(f"small-{k}", 1_000_000) for k in range(20))]
    found = partition(loads, PLENTY, processes=10)
    assert len(found.loaders_of("web")) == 8, "as many as it keeps busy"
    assert all(len(found.loaders_of(f"small-{k}")) == 1 for k in range(20))


def test_where_memory_lacks_a_source_has_more_loaders_than_its_work_asks_for():
    wide = load_of("wide", 1_000_000, window=12 * GIB)
    loads = [wide, load_of("web", 100_000_000)]
    roomy = partition(loads, PLENTY, processes=8)
    assert len(roomy.loaders_of("wide")) == 1
    tight = partition(loads, LoaderBudget(cpu=8, memory_bytes=1 << 50, loader_bytes=4 * GIB), processes=8)
    assert len(tight.loaders_of("wide")) >= 4
    assert max(one.memory_bytes for one in tight.loaders) <= 4 * GIB - LOADER_BYTES


def test_more_loaders_are_started_where_each_holds_too_little():
    loads = [load_of("a", 1000, window=6 * GIB), load_of("b", 1000, window=6 * GIB)]
    found = partition(loads, LoaderBudget(cpu=16, memory_bytes=1 << 50, loader_bytes=2 * GIB))
    assert sum(found.workers.values()) == 2 and len(found.loaders) == 8


def test_fewer_loaders_are_started_where_states_fill_the_memory():
    loads = [load_of("web", 20 * 10**8), load_of("wide", 10**8, state=3 * GIB)]
    assert len(partition(loads, LoaderBudget(cpu=64, memory_bytes=80 * GIB)).loaders) == 21
    assert len(partition(loads, LoaderBudget(cpu=64, memory_bytes=20 * GIB)).loaders) == 5


def test_units_that_a_loader_keeps_take_room_in_each():
    """Any of them may be asked for those of a source whose loader is lost."""
    kept = 30 << 20
    loads = [replace(load_of("talk", 1000), unit_bytes=kept), load_of("web", 10**6)]
    room = LoaderBudget(cpu=64, memory_bytes=1 << 50, loader_bytes=LOADER_BYTES + (24 << 20))
    assert len(partition([load_of("talk", 1000), load_of("web", 10**6)], room, processes=2).loaders) == 2
    with pytest.raises(OptionError, match=r"a process is 94\.0 MiB"):
        partition(loads, room, processes=2)
    partition(loads, replace(room, loader_bytes=room.loader_bytes + kept), processes=2)
    many = [replace(load, unit_bytes=1 << 50) for load in loads]
    partition(many, replace(room, loader_bytes=room.loader_bytes + KEPT_BYTES), processes=2)


@pytest.mark.parametrize(
    ("budget", "processes", "says"),
    [
        (LoaderBudget(cpu=4, memory_bytes=1 << 40, node_cpu=1), 4, r"4 loader\(s\) need a processor each beside 1"),
        (LoaderBudget(cpu=1, memory_bytes=1 << 40, node_cpu=1), None, "the budget has 1"),
        (LoaderBudget(cpu=4, memory_bytes=1 << 28), None, "256.0 MiB of memory do not hold .* those of 'wide'"),
    ],
)
def test_a_budget_that_cannot_hold_is_refused_with_its_numbers(budget, processes, says):
    loads = [load_of("wide", 1000, window=GIB), load_of("web", 1000)]
    with pytest.raises(OptionError, match=says):
        partition(loads, budget, processes=processes)


def test_sources_that_cost_nothing_are_read_too():
    found = partition([load_of("a", 0), load_of("b", 0)], PLENTY, processes=3)
    assert found.ratio == 1 and all(found.loaders_of(name) for name in "ab")
