"""Small steps are planned in blocks: the same plans, and no block reaches over what must end one."""

from __future__ import annotations

from itertools import islice

import pytest
from msgspec.structs import replace

from tests.support.mixtures import SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from torchmix.errors import PlanError, SourceExhausted
from torchmix.planner.cursor import Cursor
from torchmix.planner.planner import Planner
from torchmix.reader.protocol import StoppedWaiting
from torchmix.recipe import parts
from torchmix.recipe.structs import Module
from torchmix.steps.blocks import PlannedStep, plan_blocks


def numbers(found: list[list[PlannedStep]]) -> list[list[int]]:
    return [[step.plan.step for step in block] for block in found]


def test_blocks_double_up_to_their_tokens_and_have_the_plans_of_single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "BLOCK_TOKENS", 6 * 16 * 256 + 1)
    recipe = make_recipe(SHARES)
    found = list(islice(plan_blocks(make_planner(recipe, SIZES), make_planner(recipe, SIZES).start(), 21), 10))
    assert numbers(found) == [[0], [1, 2], [3, 4, 5, 6], [*range(7, 13)], [*range(13, 19)], [19, 20]]
    plans, cursors = plan_steps(make_planner(recipe, SIZES), 21)
    steps = [step for block in found for step in block]
    assert [step.plan.plan_digest for step in steps] == [plan.plan_digest for plan in plans]
    assert [step.after.order_digest for step in steps] == [cursor.order_digest for cursor in cursors[1:]]


def test_a_step_larger_than_a_block_is_a_block() -> None:
    planner = make_planner(make_recipe(SHARES, samples=8192), SIZES)
    assert numbers(list(plan_blocks(planner, planner.start(), 3))) == [[0], [1], [2]]


def test_a_step_with_items_is_a_block() -> None:
    recipe = make_recipe(SHARES)
    for module, wanted in ((Module(items="document"), [[0], [1, 2]]), (Module(items="image"), [[0], [1], [2]])):
        planner = make_planner(replace(recipe, modules={"vision": module}), SIZES)
        assert numbers(list(plan_blocks(planner, planner.start(), 3))) == wanted


def test_a_block_ends_at_a_change_of_the_batch() -> None:
    planner = make_planner(make_recipe(SHARES, samples=[(0, 4), (5, 8)]), SIZES)
    assert numbers(list(plan_blocks(planner, planner.start(), 9))) == [[0], [1, 2], [3, 4], [5, 6, 7, 8]]


def test_a_block_ends_before_a_step_whose_decision_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = make_planner(make_recipe(SHARES), SIZES)
    monkeypatch.setattr(Planner, "is_decided", lambda self, cursor: cursor.step not in (1, 5))
    assert numbers(list(plan_blocks(planner, planner.start(), 8))) == [[0], [1, 2], [3, 4], [5, 6, 7]]


@pytest.mark.parametrize("error", [PlanError("no"), SourceExhausted("none"), StoppedWaiting()])
def test_what_fails_comes_in_the_place_of_its_step(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    planner = make_planner(make_recipe(SHARES), SIZES)
    step = planner.step

    def step_or_fail(cursor: Cursor) -> object:
        if cursor.step == 5:
            raise error
        return step(cursor)

    monkeypatch.setattr(planner, "step", step_or_fail)
    found = plan_blocks(planner, planner.start(), None)
    assert numbers([next(found), next(found), next(found)]) == [[0], [1, 2], [3, 4]]
    if isinstance(error, StoppedWaiting):
        assert next(found, None) is None
        return
    with pytest.raises(type(error)):
        next(found)
