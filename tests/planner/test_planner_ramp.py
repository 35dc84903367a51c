"""Batches of changing size: nothing is lost at a border, and layouts and resumes meet at any step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.given import given_tokens
from tests.support.mixtures import PACKINGS, SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.errors import RecipeError, TopologyError
from torchmix.mixture.order import SourceOrder
from torchmix.recipe.structs import Recipe

RAMPS = {
    "up": [(0, 4), (3, 8), (6, 16)],
    "down": [(0, 32), (4, 8), (5, 4)],
    "wild": [(0, 64), (1, 4), (2, 128), (4, 4), (9, 32)],
}
STEPS = 12


def recipe_of(ramp: str, packing: str = "best_fit") -> Recipe:
    return make_recipe(SHARES, samples=RAMPS[ramp], length=256, packing=PACKINGS[packing])


def samples_of(ramp: str, step: int) -> int:
    return next(samples for from_step, samples in reversed(RAMPS[ramp]) if from_step <= step)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ramp", RAMPS)
def test_each_step_has_its_samples_and_is_full(ramp: str, packing: str) -> None:
    plans, _ = plan_steps(make_planner(recipe_of(ramp, packing), SIZES, dp=2, micro_batch_size=2), STEPS)
    for plan in plans:
        samples = samples_of(ramp, plan.step)
        assert (plan.num_samples, plan.num_microbatches, plan.capacity_tokens) == (samples, samples // 4, samples * 256)
        assert np.array_equal(np.unique(plan.sample), np.arange(samples)), "no sample is empty"
        microbatches = plan.placement.dp_rank_of_sample * 1000 + plan.placement.microbatch_of_sample
        assert np.unique(microbatches, return_counts=True)[1].tolist() == [2] * (samples // 2)
        assert packing.startswith("best_fit") or plan.fill == 1


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
@pytest.mark.parametrize("ramp", RAMPS)
def test_nothing_is_lost_or_repeated_at_a_border(ramp: str, packing: str) -> None:
    planner = make_planner(recipe_of(ramp, packing), SIZES)
    plans, cursors = plan_steps(planner, STEPS)
    for s, name in enumerate(planner.sources):
        tokens: dict[tuple[int, int], int] = {}
        for pieces in [*(plan.pieces for plan in plans), cursors[-1].pool]:
            mine = pieces.source == s
            columns = (column[mine].tolist() for column in (pieces.epoch, pieces.row, pieces.tokens))
            for epoch, row, count in zip(*columns, strict=True):
                tokens[epoch, row] = tokens.get((epoch, row), 0) + count
        order = SourceOrder(name, SIZES[name], seed=7)
        at = tuple(int(getattr(cursors[-1].position, which)[s]) for which in ("epoch", "window", "offset"))
        assert tokens == given_tokens(order, SIZES[name].tokens.tolist(), 256, at)


@pytest.mark.parametrize("ramp", RAMPS)
def test_the_order_is_equal_at_every_layout(ramp: str) -> None:
    planners = [
        make_planner(recipe_of(ramp), SIZES, dp=dp, micro_batch_size=size) for dp, size in ((1, 1), (4, 1), (2, 2))
    ]
    digests = {tuple(plan.order_digest for plan in plan_steps(planner, STEPS)[0]) for planner in planners}
    assert len(digests) == 1


@pytest.mark.parametrize("ramp", RAMPS)
def test_any_cursor_goes_on_at_another_layout_and_skipping_leads_to_it(ramp: str) -> None:
    whole, cursors = plan_steps(make_planner(recipe_of(ramp), SIZES), STEPS)
    other = make_planner(recipe_of(ramp), SIZES, dp=4)
    skipped = other.start()
    for step in range(STEPS):
        plan, _ = other.step(cursors[step])
        assert plan.order_digest == whole[step].order_digest
        again, _ = other.step(skipped)
        assert (again.plan_digest, again.asked_tokens.tolist()) == (plan.plan_digest, plan.asked_tokens.tolist())
        skipped = other.skip(skipped)
        assert skipped.order_digest == cursors[step + 1].order_digest
        assert skipped.pool.row.tolist() == cursors[step + 1].pool.row.tolist()


def test_up_to_its_first_border_a_ramp_is_the_constant_size() -> None:
    ramped, _ = plan_steps(make_planner(recipe_of("up"), SIZES), 5)
    constant, _ = plan_steps(make_planner(make_recipe(SHARES, samples=4, length=256), SIZES), 5)
    same = [one.order_digest == other.order_digest for one, other in zip(ramped, constant, strict=True)]
    assert same == [True, True, True, False, False]


def test_a_pool_that_fills_a_smaller_batch_is_delivered_before_anything_is_drawn() -> None:
    # A sample holds one document and no second one: the pool of a large batch exceeds a small one.
    sizes = {"web": synthetic_sizes(600, shortest=140, longest=160)}
    planner = make_planner(make_recipe({"web": "100%"}, samples=[(0, 64), (2, 1)], length=256), sizes)
    plans, cursors = plan_steps(planner, 70)
    pools = [int(cursor.pool.tokens.sum()) for cursor in cursors]
    assert pools[2] > 8 * 256
    for plan, (before, after) in zip(plans[2:], list(pairwise(pools))[2:], strict=True):
        assert before < 256 or (plan.drawn_tokens.sum() == 0 and after < before)
    assert min(pools[3:]) < 256


def test_every_stage_must_divide_by_the_layout() -> None:
    with pytest.raises(TopologyError, match="global batch of 4 samples does not divide by dp 8"):
        make_planner(recipe_of("up"), SIZES, dp=8)


def test_the_largest_stage_bounds_the_cost() -> None:
    recipe = make_recipe({"web": "100%"}, samples=[(0, 1), (9, 2**14)], length=2**16)
    huge = {"layers": 2**15, "hidden": 2**20, "ffn": 2**20, "heads": 4}
    model = replace(recipe.balance.model, **huge)
    with pytest.raises(RecipeError, match="a batch of 16384 samples"):
        make_planner(replace(recipe, balance=replace(recipe.balance, model=model)), SIZES)
