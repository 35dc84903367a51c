"""The ways to place a step without a plan: next-fit, hash order, rank sums, against slow and plain versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.catalogs import open_catalog
from tests.support.loaders import write_job
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import CostModel
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner, open_planner
from torchmix.planner.simulation import ORDERS, Simulation, by_rank_sums, in_arrival_order, next_fit, ways_of
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of

LAYOUT = Layout(dp=4, micro_batch_size=2, pp=2)
UNEVEN = Layout(dp=3, micro_batch_size=2, pp=2, elastic=True)
"""16 samples on 3 ranks: two masked ones."""


def planner_of(folder: Path, layout: Layout = LAYOUT, **options: str) -> Planner:
    recipe = load_recipe(write_job(folder, samples=16, length=128, **options))
    return open_planner(part_of(recipe, "train"), open_catalog(recipe, folder), layout)


def plans(planner: Planner, count: int) -> list[StepPlan]:
    cursor, found = planner.start(), []
    for _ in range(count):
        plan, cursor = planner.step(cursor)
        found.append(plan)
    return found


def test_next_fit_begins_a_sample_where_a_piece_does_not_fit() -> None:
    assert next_fit(np.array([5, 4, 2, 8, 9, 1]), 10).tolist() == [0, 0, 1, 1, 2, 2]
    random = np.random.default_rng(1)
    tokens = random.integers(1, 50, 500)
    sample, held, expected = 0, 0, []
    for one in tokens.tolist():
        if held + one > 64:
            sample, held = sample + 1, 0
        held += one
        expected.append(sample)
    assert next_fit(tokens, 64).tolist() == expected


def test_rank_sums_are_alike_and_every_bin_has_its_samples() -> None:
    cost = np.random.default_rng(2).integers(1, 1000, 16)
    placed = by_rank_sums(cost, LAYOUT)
    sums = np.bincount(placed.dp_rank_of_sample, weights=cost)
    plain = np.bincount(np.arange(16) // 2 % 4, weights=cost)
    assert sums.max() - sums.min() < plain.max() - plain.min()
    bins = placed.dp_rank_of_sample * 2 + placed.microbatch_of_sample
    assert np.bincount(bins).tolist() == [2] * 8


@pytest.mark.parametrize("method", ["best_fit", "concat"])
def test_all_ways_have_the_documents_of_the_step(method: str, tmp_path: Path) -> None:
    planner = planner_of(tmp_path, method=method)
    for plan in plans(planner, 3):
        ways = ways_of(plan, backbone_cost(planner.part), planner.part.packing, planner.part.seed)
        assert list(ways) == list(ORDERS)
        total = int(plan.pieces.tokens.sum())
        assert {name: way.tokens for name, way in ways.items() if name != "arrival order"} == {
            "hash order": total,
            "rank sums": total,
            "this plan": total,
        }
        assert 0.6 * total < ways["arrival order"].tokens <= total
        assert {way.cost.shape for way in ways.values()} == {(4, 2)}
        costs = {name: way.cost for name, way in ways.items()}
        assert costs["hash order"].sum() == costs["rank sums"].sum() == costs["this plan"].sum()
        assert costs["this plan"].max(axis=0).sum() == plan.balance.cost
        assert costs["hash order"].max(axis=0).sum() == plan.balance.hash_order_cost


def test_equal_samples_take_the_ideal_and_the_bubble(tmp_path: Path) -> None:
    planner = planner_of(tmp_path)
    same = CostModel(per_token=3, per_pair=0, whole_sample=False)
    simulation = Simulation(cost=same, packing=planner.part.packing, seed=planner.part.seed)
    for plan in plans(planner, 2):
        simulation.add(plan)
    # 16 samples of 128 tokens on 4 ranks, forward and backward three times that, half of it on each of two stages.
    assert simulation.ideal == 2 * 3 * 128 * 3 * 4 / 2
    assert simulation.even == simulation.ideal * 3 / 2
    for name in ("hash order", "rank sums", "this plan"):
        times = simulation.times[name]
        assert times.at_end == times.each_microbatch == simulation.even
    late = simulation.times["arrival order"]
    assert late.at_end == late.each_microbatch > simulation.even


def test_masked_samples_are_no_part_of_the_ideal_and_take_what_padding_takes(tmp_path: Path) -> None:
    planner = planner_of(tmp_path, UNEVEN)
    same = CostModel(per_token=3, per_pair=0, whole_sample=False)
    simulation = Simulation(cost=same, packing=planner.part.packing, seed=planner.part.seed)
    for plan in plans(planner, 2):
        assert plan.num_samples == 18 and plan.sample.max() < 16
        simulation.add(plan)
        assert in_arrival_order(plan, planner.part.packing, planner.part.seed)[1].max() < 16
    assert simulation.ideal == pytest.approx(2 * 3 * 128 * 3 * 16 / 3 / 2)
    # Three microbatches of two samples on each rank, and two stages.
    assert simulation.times["this plan"].at_end == pytest.approx(simulation.ideal * 18 / 16 * (3 + 1) / 3)
    assert simulation.even == pytest.approx(simulation.ideal * (3 + 1) / 3)


def test_the_plan_is_no_slower_than_its_rivals(tmp_path: Path) -> None:
    planner = planner_of(tmp_path)
    steep = CostModel(per_token=1, per_pair=1, whole_sample=False)
    simulation = Simulation(cost=steep, packing=planner.part.packing, seed=planner.part.seed)
    for plan in plans(planner, 20):
        simulation.add(plan)
    found = {name: times.each_microbatch for name, times in simulation.times.items()}
    assert simulation.ideal < found["this plan"] < min(found["hash order"], found["rank sums"], found["arrival order"])
