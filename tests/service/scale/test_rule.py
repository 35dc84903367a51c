"""Scaling: decisions are a pure function of the coming load and the notes, keep the bounds, and come in time."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from tests.support.loads import GIB, load_of
from torchmix.errors import OptionError
from torchmix.reader.items import KEPT_BYTES
from torchmix.service.scale.partition import LOADER_BYTES, LoaderBudget, SourceLoad
from torchmix.service.scale.rule import EVERY_STEPS, RunNote, ScaleBounds, ScaleRule, matched, replay

BEGINNING = (RunNote(step=0),)
ROOMY = LoaderBudget(cpu=64, memory_bytes=1 << 44)


def steps_of(cost_of_step, *, others: int = 4):
    """Loads whose first source costs so much in each step, the others a million ns each; gone sources cost nothing."""

    def loads_of(start: int, stop: int, note: RunNote) -> list[SourceLoad]:
        mean = sum(cost_of_step(step) for step in range(start, stop)) // (stop - start)
        costs = {"slow": mean, **{f"o{k}": 1_000_000 for k in range(others)}}
        return [load_of(name, 0 if name in note.gone else cost) for name, cost in costs.items()]

    return loads_of


def ramp(step: int) -> int:
    """A share that rises tenfold from step 100 to step 150, and falls again at step 400."""
    rise = max(0, min(50, step - 100)) if step < 400 else 0
    return 4_000_000 + 36_000_000 * rise // 50


def decided(loads_of, bounds, notes=BEGINNING, stop=600):
    return [(one.step, one.reason, len(one.loaders)) for one in replay(loads_of, bounds, list(notes), stop)]


def test_loaders_come_before_the_load_and_end_after_it():
    bounds = ScaleBounds(least=1, most=8, budget=ROOMY)
    found = decided(steps_of(ramp), bounds)
    assert found[0] == (0, "begin", 1)
    more = [one for one in found if one[1] == "more"]
    assert more and more[0][0] <= 110 and max(count for *_, count in found) == 6  # 44 ms, where 8 ms are one loader's
    assert found[-1][2] == 1 and 400 - 3 * EVERY_STEPS < found[-1][0] <= 440


def test_each_node_has_as_many_loaders_and_reads_first_as_much_as_one():
    budget = LoaderBudget(cpu=64, memory_bytes=1 << 44)
    even = decided(steps_of(ramp), ScaleBounds(least=3, most=21, budget=budget, nodes=3))
    assert even[0][2] == 3 and max(count for *_, count in even) == 18, "44 ms, where 8 ms are three loaders'"
    assert all(count % 3 == 0 for *_, count in even) and even[-1][2] == 3
    first = decided(steps_of(ramp), ScaleBounds(least=3, most=21, budget=budget, nodes=3, beside=3))
    assert max(count for *_, count in first) == 21 and first[-1][2] == 3
    first = decided(steps_of(ramp), ScaleBounds(least=3, most=99, budget=budget, nodes=3, beside=3))
    assert max(count for *_, count in first) == 30, "8 ms are six readers', and 44 ms those of 33"
    tight = LoaderBudget(cpu=64, memory_bytes=420 << 20)
    one, two = (decided(steps_of(ramp), ScaleBounds(least=n, most=16, budget=tight, nodes=n)) for n in (1, 2))
    assert max(count for *_, count in one) == 5 and max(count for *_, count in two) == 4
    few = ScaleBounds(least=3, most=99, budget=replace(budget, cpu=16, node_cpu=3), nodes=3)
    assert max(count for *_, count in decided(steps_of(ramp), few)) == 12 == few.ceiling


def test_a_fleet_that_memory_does_not_hold_is_made_smaller():
    bounds = ScaleBounds(least=1, most=8, budget=LoaderBudget(cpu=64, memory_bytes=340 << 20))
    counts = [count for *_, count in decided(steps_of(ramp), bounds)]
    assert max(counts) == 4 and counts[-1] == 1, "six would have the work"
    assert decided(steps_of(ramp), bounds, [RunNote(step=203)])[0] == (200, "begin", 4)


def test_windows_are_as_long_as_the_blocks_that_are_asked_for_at_once():
    peak = steps_of(lambda step: 40_000_000 if 1000 <= step < 1500 else 4_000_000)
    small, large = (
        decided(peak, ScaleBounds(least=1, most=8, budget=ROOMY, block_steps=steps), stop=2400) for steps in (1, 400)
    )
    for found, begins, ends in ((small, (920, 1000), (1500, 1600)), (large, (300, 500), (1700, 2000))):
        assert found[1][1] == "more" and found[1][2] >= 5, "at once, as many as the costliest window needs"
        assert begins[0] < found[1][0] < begins[1], "a window before, though a long one has less of the peak"
        assert found[-1][1:] == ("fewer", 1) and ends[0] < found[-1][0] < ends[1], "once the last window has been read"


def test_a_run_whose_first_blocks_are_short_has_short_windows():
    early = steps_of(lambda step: 40_000_000 if 20 <= step < 60 else 4_000_000)
    bounds = ScaleBounds(least=1, most=8, budget=ROOMY, block_steps=4096)
    found = decided(early, bounds, stop=400)
    assert found[0][2] > 1 and found[-1][1:] == ("fewer", 1) and found[-1][0] < 200


def test_loaders_with_little_to_do_keep_their_sources():
    def loads_of(start, stop, note):
        least = start >= 200
        return [load_of("a", 500_000 if least else 30_000_000), load_of("b", 5_000_000 if least else 1_000_000)]

    found = replay(loads_of, ScaleBounds(least=4, most=4, budget=ROOMY), [RunNote(step=0)], 400)
    assert [one.reason for one in found] == ["begin"], "nobody waits for the slowest, and pages would move"


def test_a_short_peak_starts_nothing():
    bounds = ScaleBounds(least=1, most=8, budget=ROOMY)
    peak = steps_of(lambda step: 30_000_000 if step == 203 else 4_000_000)
    assert decided(peak, bounds) == [(0, "begin", 1)]


@pytest.mark.parametrize("seed", range(20))
def test_a_replay_in_any_number_of_turns_decides_the_same_and_bounds_hold(seed):
    chance = random.Random(seed)
    levels = [chance.randint(0, 200_000_000) for _ in range(40)]
    loads_of = steps_of(lambda step: levels[min(step // 25, 39)])
    budget = LoaderBudget(cpu=chance.randint(3, 20), memory_bytes=chance.randint(2, 40) * GIB, node_cpu=1)
    bounds = ScaleBounds(least=chance.randint(1, 2), most=chance.randint(2, 30), budget=budget)
    notes = [RunNote(step=0)]
    notes += [RunNote(step=step, gone=frozenset({"o1"})) for step in sorted(chance.sample(range(1, 1000), 3))]
    whole = replay(loads_of, bounds, notes, 1000)
    rule = ScaleRule(loads_of, bounds, notes[0])
    while rule.next_step < 1000:  # as one who follows: the notes by then, and no others
        rule.advance([note for note in notes if note.step <= rule.next_step][-1])
    assert rule.decisions == whole
    assert replay(loads_of, bounds, notes, 500) == [one for one in whole if one.step < 500]
    for one in whole:
        assert bounds.least <= len(one.loaders) <= min(bounds.most, budget.most_processes)
        loads = {load.name: load for load in loads_of(one.step, one.step + 1, notes[0])}
        parts = {name: sum(place.get(name, 0) for place in one.loaders) for name in loads}
        assert all(parts.values()), "every source has a loader"
        total = 0
        for place in one.loaders:
            held = [
                loads[name].state_bytes + loads[name].window_bytes * count // parts[name]
                for name, count in place.items()
            ]
            total += sum(held) + LOADER_BYTES
        assert total <= budget.memory_bytes


def test_units_that_a_loader_keeps_are_of_its_memory():
    plain, bounds = steps_of(ramp), ScaleBounds(least=1, most=8, budget=ROOMY)

    def with_units(start: int, stop: int, note: RunNote) -> list[SourceLoad]:
        return [replace(load, unit_bytes=30 << 20) for load in plain(start, stop, note)]

    kept = min(KEPT_BYTES, (30 << 20) * len(plain(0, 1, RunNote(step=0))))
    bare, found = (replay(loads, bounds, list(BEGINNING), 200) for loads in (plain, with_units))
    for one, other in zip(bare, found, strict=True):
        assert min(one.memory_bytes) > LOADER_BYTES
        assert other.memory_bytes == tuple(held + kept for held in one.memory_bytes)


def test_a_stream_that_runs_out_ends_loaders():
    loads_of = steps_of(lambda step: 40_000_000)
    bounds = ScaleBounds(least=2, most=8, budget=ROOMY)
    more = steps_of(lambda step: 40_000_000 if step >= 100 else 4_000_000)
    found = decided(more, bounds, [RunNote(step=0), RunNote(step=305, gone=frozenset({"slow"}))])
    assert max(count for *_, count in found) == 8 and found[-1][1:] == ("fewer", 2) and found[-1][0] == 350, (
        "once the steps before it are read, too"
    )
    assert decided(loads_of, bounds)[-1][2] == 2


def test_a_shift_between_sources_gives_loaders_other_sources():
    def loads_of(start, stop, note):
        swapped = start >= 200
        return [load_of("a", 1_000_000 if swapped else 30_000_000), load_of("b", 30_000_000 if swapped else 1_000_000)]

    found = replay(loads_of, ScaleBounds(least=4, most=4, budget=ROOMY), [RunNote(step=0)], 400)
    assert [one.reason for one in found] == ["begin", "uneven"] and 170 <= found[1].step <= 220
    assert sum("b" in place for place in found[1].loaders) >= 3


def test_a_run_that_goes_on_begins_with_what_it_needs_there():
    bounds = ScaleBounds(least=1, most=8, budget=ROOMY)
    found = decided(steps_of(ramp), bounds, [RunNote(step=203)])
    assert found[0] == (200, "begin", 6)


def test_too_few_processors_for_the_fewest_are_an_error():
    with pytest.raises(OptionError, match="need a processor each"):
        replay(
            steps_of(ramp),
            ScaleBounds(least=4, most=8, budget=LoaderBudget(cpu=2, memory_bytes=1 << 40)),
            [RunNote(step=0)],
            10,
        )


def test_new_places_stay_where_most_of_their_sources_are():
    from torchmix.service.scale.partition import LoaderPlace

    places = [LoaderPlace(parts={"b": 4}), LoaderPlace(parts={"a": 4}), LoaderPlace(parts={"c": 1})]
    assert matched([{"a": 8}, {"b": 2, "c": 1}], places) == ({"a": 4}, {"b": 4}, {"c": 1})
