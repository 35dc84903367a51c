"""The ramp: sizes of steps and consumed samples agree with counting step by step."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from tests.support.recipes import make_recipe
from torchmix.errors import RecipeError
from torchmix.recipe.ramp import (
    fixed_microbatches,
    last_samples,
    most_samples,
    samples_before,
    samples_of_step,
    stages_of,
    step_after_samples,
)
from torchmix.recipe.structs import Balance, Batch, Context, RampStage


def ramp(*stages: tuple[int, int]) -> Batch:
    return Batch(samples=tuple(RampStage(from_step=step, samples=samples) for step, samples in stages), length=8)


def test_a_constant_size_is_one_stage() -> None:
    batch = Batch(samples=32, length=8)
    assert [samples_of_step(batch, step) for step in (0, 1, 10**9)] == [32, 32, 32]
    assert samples_before(batch, 10**12) == 32 * 10**12
    assert (most_samples(batch), last_samples(batch)) == (32, 32)


def test_a_ramp_up_and_down() -> None:
    batch = ramp((0, 4), (3, 16), (5, 8))
    assert [samples_of_step(batch, step) for step in range(7)] == [4, 4, 4, 16, 16, 8, 8]
    assert [samples_before(batch, step) for step in range(7)] == [0, 4, 8, 12, 28, 44, 52]
    assert (most_samples(batch), last_samples(batch)) == (16, 8)


def test_stages_that_change_nothing_are_none() -> None:
    assert stages_of(ramp((0, 4), (3, 4), (5, 8), (6, 8))) == stages_of(ramp((0, 4), (5, 8)))
    assert len(stages_of(ramp((0, 4), (3, 4)))) == 1


@pytest.mark.parametrize("seed", range(20))
def test_counting_step_by_step_gives_the_same(seed: int) -> None:
    rng = random.Random(seed)
    borders = sorted(rng.sample(range(1, 40), rng.randint(0, 5)))
    batch = ramp((0, rng.randint(1, 9)), *((border, rng.randint(1, 9)) for border in borders))
    consumed, at_border = 0, {}
    for step in range(60):
        assert samples_before(batch, step) == consumed
        at_border[consumed] = step
        consumed += samples_of_step(batch, step)
    for count in range(consumed):
        if count in at_border:
            assert step_after_samples(batch, count) == at_border[count]
        else:
            with pytest.raises(RecipeError, match="inside step"):
                step_after_samples(batch, count)


def test_samples_inside_a_step_are_an_error_with_its_bounds() -> None:
    with pytest.raises(RecipeError, match="14 consumed samples end inside step 3, which is samples 12 to 28"):
        step_after_samples(ramp((0, 4), (3, 16)), 14)
    with pytest.raises(RecipeError, match="at least 0"):
        step_after_samples(ramp((0, 4)), -1)


def test_a_fixed_number_of_microbatches_or_a_refusal_by_name() -> None:
    recipe = make_recipe({"web": "100%"}, samples=24)
    assert fixed_microbatches(recipe, dp=3, micro_batch_size=2) == 4
    with pytest.raises(RecipeError, match=r"batch\.samples: ramps, and this trainer accumulates a fixed number"):
        fixed_microbatches(make_recipe({"web": "100%"}, samples=[(0, 8), (3, 16)]), dp=1)
    runs = replace(recipe, balance=Balance(context=Context(rank_tokens=8)))
    with pytest.raises(RecipeError, match=r"balance\.context: each step has as many microbatches as its plan says"):
        fixed_microbatches(runs, dp=1)
