"""Plans that code of the user's makes: each broken rule is a PlanError with the function's name; right ones pass."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.planner.test_place_items import with_images
from tests.support import wrong_strategies
from tests.support.mixtures import SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from torchmix.errors import PlanError
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.planner.planner import Planner
from torchmix.planner.plans import plan_raw, summary_buffer
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import EncoderModel, Module

IMAGES = {name: with_images(each) if name in ("code", "web") else each for name, each in SIZES.items()}
VIT = EncoderModel(layers=2, hidden=8, ffn=16, heads=2)
HERE = "tests.support.wrong_strategies"


def planner_of(module: Module | None = None, **keys: str) -> Planner:
    recipe = make_recipe(SHARES)
    recipe = msgspec.structs.replace(recipe, balance=msgspec.structs.replace(recipe.balance, **keys))
    modules = {"vision": module or Module(items="image", sizes="patches", model=VIT)}
    return make_planner(check_recipe(msgspec.structs.replace(recipe, modules=modules)), IMAGES, dp=4, tp=2)


def refused(planner: Planner, what: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as found:
        plan_steps(planner, 2)
    assert type(found.value) is PlanError and what in str(found.value)


def test_a_right_strategy_gives_the_plans_of_the_keys() -> None:
    own, by_keys = (
        [plan.plan_digest for plan in plan_steps(planner_of(**keys), 3)[0]]
        for keys in ({"strategy": f"{HERE}:right"}, {"method": "rows"})
    )
    assert own == by_keys


@pytest.mark.parametrize("name", wrong_strategies.STRATEGIES)
def test_a_wrong_strategy_is_named_with_its_step_and_the_rule(name: str) -> None:
    wrong_strategies._kept.clear()
    message = wrong_strategies.STRATEGIES[name][1]
    refused(planner_of(strategy=f"{HERE}:{name}"), f"the strategy {HERE}:{name}, step ", message)


def test_plans_made_by_hand_are_checked_alike() -> None:
    planner = planner_of()
    expected = planner.step(planner.start())[0]
    summary = summary_buffer(planner, planner.start())
    own, vision = summary.columns["sample"], expected.item_modules["vision"]

    def raw(**modules: ItemPlan) -> StepPlan:
        placements = {"backbone": expected.placement, **modules}
        return plan_raw(summary, own, placements, slot_of_piece=summary.columns["slot"])

    assert raw(vision=vision).plan_digest == expected.plan_digest
    half = np.arange(len(vision.items) // 2)
    columns = {
        name: getattr(vision, name)[half]
        for name in ("consumer_of_item", "bin_of_item", "slot_of_item", "cost_of_item")
    }
    fewer = msgspec.structs.replace(vision, items=vision.items.take(half), **columns)
    faults = (
        ({}, "it lacks the module 'vision'"),
        ({"vision": fewer}, "images of this step"),
        ({"vsion": vision}, "vsion"),
    )
    for modules, message in faults:
        with pytest.raises(PlanError, match=f"plan_raw, step 0: .*{message}"):
            raw(**modules)


@pytest.mark.parametrize("name", wrong_strategies.METHODS)
def test_a_wrong_method_is_named_with_its_step_and_the_rule(name: str) -> None:
    message = wrong_strategies.METHODS[name][1]
    refused(planner_of(method=f"{HERE}:{name}"), f"the method {HERE}:{name}, step 0: it ", message)
    if name != "all_in_one":  # which items may be
        module = Module(items="image", sizes="patches", method=f"{HERE}:{name}", model=VIT, cap="1GiB")
        refused(planner_of(module), f"the method {HERE}:{name}, step 0: it ", message)
