"""Ways to balance: which are tried, what their times are, and which comes first."""

from __future__ import annotations

import numpy as np
import pytest

from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import in_hash_order, in_rows
from torchmix.planner.simulation import bins_of, pipeline_time
from torchmix.planner.tuning import Tuning, Way, ways_to_try

COSTS = np.random.default_rng(5).lognormal(10, 1.5, 64).astype(np.int64)
TODAY = Way(method="none")


def test_every_way_is_tried_once_and_todays_first() -> None:
    ways = ways_to_try(Way(method="lpt", level="bin"), Layout(dp=4), "step", num_samples=[64], micro_batch_sizes=[1, 2])
    assert ways[0] == Way(method="lpt", level="bin") and len(ways) == len(set(ways))
    assert {way.micro_batch_size for way in ways} == {1, 2}
    assert {way.method for way in ways} == {"none", "rows", "lpt", "karmarkar_karp", "zigzag"}
    assert len([way for way in ways if way.method == "rows" and way.micro_batch_size == 2]) == 9


def test_a_size_that_does_not_divide_a_stage_of_the_batch_is_left_out() -> None:
    ways = ways_to_try(TODAY, Layout(dp=4), "step", num_samples=[64, 68], micro_batch_sizes=[1, 2])
    assert {way.micro_batch_size for way in ways} == {1}


@pytest.mark.parametrize("stages", [1, 4])
def test_times_are_those_of_the_placements(stages: int) -> None:
    layout = Layout(dp=4, pp=stages)
    for meet in ("step", "microbatch"):
        tuning = Tuning([TODAY, Way(method="rows")], layout, meet)  # type: ignore[arg-type]
        tuning.add(COSTS, 32)
        for one, placement in zip(tuning.tried, (in_hash_order(64, layout), in_rows(COSTS, layout)), strict=True):
            bins = bins_of(COSTS, placement, layout).astype(float)
            bins = bins.max(axis=0)[None] if meet == "microbatch" else bins
            assert one.time == float(pipeline_time(bins, stages).max())
        assert tuning.ideal == 3 * COSTS.sum() / 4 / stages


def test_a_way_that_is_worse_by_its_objective_is_timed_in_hash_order() -> None:
    ways = ways_to_try(TODAY, Layout(dp=4), "step", num_samples=[64], micro_batch_sizes=[1])
    assert {way.objective for way in ways[2:]} == {"rank"}
    tuning = Tuning(ways, Layout(dp=4), "step")
    tuning.add(COSTS, 32)
    plain, kept = tuning.tried[0], [one for one in tuning.tried if one.hash_order_steps]
    assert kept and all(one.time == plain.time for one in kept)
    assert all(one.time <= plain.time for one in tuning.tried)


def test_the_best_is_the_fastest_and_of_like_ones_the_one_that_changes_least() -> None:
    ways = ways_to_try(TODAY, Layout(dp=4), "step", num_samples=[64], micro_batch_sizes=[1, 2])
    tuning = Tuning(ways, Layout(dp=4), "step")
    tuning.add(COSTS, 32)
    best = tuning.best()
    times = [one.time for one in best]
    assert times == sorted(times) and times[0] < 1.001 * min(one.time for one in tuning.tried)
    even = Tuning(ways, Layout(dp=4), "step")
    even.add(np.full(64, 7), 32)
    assert [one.way for one in even.best()] == [TODAY], "all ways take the same time, so nothing is worth a change"


def test_memory_follows_the_microbatch() -> None:
    tuning = Tuning([TODAY, Way(method="rows", micro_batch_size=2)], Layout(dp=4), "step")
    tuning.add(COSTS, 32)
    assert [one.most_bin_tokens for one in tuning.tried] == [32, 64]
