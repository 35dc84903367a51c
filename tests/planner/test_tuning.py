"""Ways to place steps: which are tried, what their times, memory and traffic are, and which comes first."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.mixtures import make_planner
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.parallel.place_tree import Layout
from torchmix.planner.graph.dgraph import DrawnStep
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.planner.simulation import bins_of, pipeline_time
from torchmix.planner.tuning import Job, Tuning, unbeaten, ways_of_balance, ways_of_layout, ways_of_module
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Balance, EncoderModel, FittedCost, Model, Module

MODEL = Model(layers=4, hidden=64, ffn=96, heads=8, kv_heads=4, vocab=100)
TOWER = EncoderModel(layers=2, hidden=32, ffn=64, heads=4)
ELASTIC = (Layout(dp=4, elastic=True), Layout(dp=3, elastic=True))
"""16 samples: as they are, and with two masked ones."""
SIZES = {"a": synthetic_sizes(400, shortest=3, longest=250), "b": synthetic_sizes(400, shortest=3, longest=60, salt=2)}


def job_of(samples: Any = 16, *, modules: dict[str, Module] | None = None, **keys: Any) -> Job:
    recipe = make_recipe({"a": "60%", "b": "40%"}, samples=samples)
    part = replace(part_of(recipe, "train"), balance=Balance(**{"model": MODEL, **keys}), modules=modules or {})
    return Job(part=part, layout=Layout(dp=4))


def steps_of(job: Job, count: int = 2) -> list[DrawnStep]:
    layout = job.layout
    sizes = {name: getattr(layout, name) for name in ("dp", "tp", "cp", "pp", "micro_batch_size")}
    planner, found = make_planner(job.part, SIZES, **sizes), []
    cursor = planner.start()
    for _ in range(count):
        drawn, cursor = planner.drawn(cursor)
        found.append(drawn)
    return found


def test_every_way_is_tried_and_sizes_that_divide_no_batch_are_left_out() -> None:
    ways = ways_of_balance(job_of(method="lpt"), "step", [1, 2])
    assert {way["job.micro_batch_size"] for way in ways} == {1, 2}
    assert {way.get("balance.method") for way in ways} == {None, "none", "rows", "lpt", "karmarkar_karp", "zigzag"}
    assert len([way for way in ways if (way.get("balance.method"), way["job.micro_batch_size"]) == ("rows", 2)]) == 9
    ways = ways_of_balance(job_of(((0, 16), (5, 20)), method="rows"), "step", [1, 2])
    assert {way["job.micro_batch_size"] for way in ways} == {1}
    job = job_of(group_size=2)
    grouped = {way["balance.group_size"] for way in ways_of_balance(job, "step", [1]) if "balance.group_size" in way}
    assert grouped == {None, 2}


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("meet", ["step", "microbatch"])
def test_times_are_those_of_the_placements(stages: int, meet: Literal["step", "microbatch"]) -> None:
    job = Job(part=job_of().part, layout=Layout(dp=4, pp=stages, tp=2, cp=3))
    steps, cost = steps_of(job), backbone_cost(job.part)
    tuning = Tuning(job, meet, steps)
    for changes in ({}, {"balance.method": "rows", "job.micro_batch_size": 2}):
        of_job, expected, work = job.changed(changes), 0.0, 0
        size = of_job.layout.micro_batch_size
        planner = make_planner(of_job.part, SIZES, dp=4, pp=stages, micro_batch_size=size)
        for step in steps:
            plan = planner.placed(replace(step, layout=of_job.layout))
            each = cost.of_samples(plan.pieces.tokens, plan.sample, num_samples=16, length=256)
            bins = bins_of(each, plan.placement, of_job.layout).astype(float)
            expected += pipeline_time(bins.max(axis=0)[None] if meet == "microbatch" else bins, stages).max()
            work += int(each.sum())
        tried = tuning.tried(changes)
        assert tried.time == pytest.approx(expected * 2 * MODEL.hidden / 6)
        assert tried.ideal == pytest.approx(3 * work / 4 / stages * 2 * MODEL.hidden / 6)


def test_masked_samples_take_time_and_are_no_part_of_the_ideal() -> None:
    steps = steps_of(job_of())
    full, masked = (Tuning(Job(part=job_of().part, layout=layout), "step", steps).today for layout in ELASTIC)
    assert full.ideal * 4 == pytest.approx(masked.ideal * 3)  # of ranks
    assert masked.time > full.time


def test_what_a_recipe_has_already_is_no_change_and_the_best_changes_least() -> None:
    job = job_of(method="rows")
    tuning = Tuning(job, "step", steps_of(job))
    assert tuning.tried({"balance.method": "rows", "job.micro_batch_size": 1}) is tuning.today
    for way in ways_of_balance(job, "step", [1, 2]):
        tuning.tried(way)
    times = [one.time for one in tuning.best()]
    assert times == sorted(times) and times[0] < 1.001 * min(one.time for one in tuning.all_tried())
    assert len({round(1000 * time / tuning.today.ideal) for time in times}) == len(times)
    plain = tuning.tried({"balance.method": "none"})
    judged = [one for one in tuning.all_tried() if one.changes.get("balance.objective") == "rank"]
    assert judged and all(one.time <= plain.time for one in judged if one.job.layout.micro_batch_size == 1)


def test_modules_are_placed_otherwise_and_count_where_they_have_the_backbones_unit() -> None:
    modules = {"tower": Module(items="document", axis="DP", method="none", model=TOWER)}
    job = Job(part=job_of(modules=modules).part, layout=Layout(dp=2, tp=2, cp=2))
    steps = steps_of(job)
    tuning = Tuning(job, "step", steps)
    ways = ways_of_module(job, "tower")
    assert {way["modules.tower.axis"] for way in ways} == {"DP", "CP", "WORLD"}
    found = [tuning.tried(way) for way in ways]
    today, best = tuning.today, tuning.best()[0]
    assert best.time < 1.001 * min(one.time for one in found) and best.time < 0.99 * today.time
    assert best.backbone == today.backbone and best.modules["tower"] < today.modules["tower"]
    assert today.time == today.backbone + today.modules["tower"]
    near = tuning.tried({"modules.tower.method": "lpt", "modules.tower.near_text": "5%"})
    far = tuning.tried({"modules.tower.method": "lpt"})
    assert near.traffic_bytes is not None and far.traffic_bytes is not None and near.traffic_bytes < far.traffic_bytes
    fitted = Job(part=replace(job.part, balance=Balance(cost=FittedCost(per_token=3, per_pair=1))), layout=job.layout)
    tuning = Tuning(fitted, "step", steps)
    other = tuning.tried(best.changes)
    assert not other.are_comparable and other.time == other.backbone == tuning.today.time
    assert tuning.best()[0] is other, "its module is faster, in a unit of its own"
    assert other.memory_bytes is other.traffic_bytes is None


def test_layouts_have_whole_heads_and_layers_and_their_memory_and_traffic() -> None:
    job = job_of()
    ways = ways_of_layout(job, ranks_per_node=2)
    sizes = [tuple(way[f"job.{name}"] for name in ("dp", "tp", "cp", "pp")) for way in ways]
    assert all(np.prod(each) == 4 and each[1] <= 2 for each in sizes) and len(set(sizes)) == len(sizes) == 8
    tuning = Tuning(job, "step", steps_of(job, 1))
    found = [tuning.tried(way) for way in ways]
    halves = [one for one in found if one.job.layout.dp == 2]
    tp, pp, cp = (next(one for one in halves if getattr(one.job.layout, name) == 2) for name in ("tp", "pp", "cp"))
    weights = 64 * (4 * (2 * 64 + 2 * 32 + 3 * 96) + 2 * 100)
    of_token = 2 * 4 * (6 * 64 + 2 * 32 + 3 * 96)
    assert tuning.today.memory_bytes == 18 * weights + of_token * 256
    assert tp.memory_bytes == (18 * weights + of_token * 256) // 2
    assert pp.memory_bytes == (18 * weights + of_token * 256 * 2) // 2, "the first stage has two microbatches under way"
    tokens = 16 * 256
    assert tuning.today.traffic_bytes == pytest.approx(6 * weights * 3 / 4)
    assert tp.traffic_bytes == pytest.approx(2 * 8 * 4 * tokens / 2 * 64 / 2 + 6 * weights / 2 / 2)
    assert pp.traffic_bytes == pytest.approx(2 * 2 * tokens / 2 * 64 / 2 + 6 * weights / 2 / 2)
    assert cp.traffic_bytes == pytest.approx(2 * 3 * 4 * tokens / 4 * 2 * 32 + 6 * weights * 3 / 4)
    assert cp.most_tokens == 128
    left = unbeaten([tuning.today, *found])
    assert left[0].time < 1.001 * min(one.time for one in found)
    assert tuning.today in left, "its traffic is the least"
    traffic = [one.traffic_bytes for one in left]
    assert len(left) > 1 and traffic == sorted(traffic, reverse=True)  # type: ignore[type-var]
    assert unbeaten([]) == []
