"""A single pass: every document of the part once, what does not fill the last batch in a batch with padding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.mixtures import PACKINGS, SHARES, SIZES, make_planner
from tests.support.recipes import make_recipe
from torchmix.errors import SourceExhausted
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.sources import rows_of

SOURCES = {name: {"documents": ("50%", "100%")} for name in SHARES if name != "one"}


def recipe_of(packing: str, *, samples: int = 16) -> Part:
    recipe = make_recipe(SHARES, samples=samples, length=256, packing=PACKINGS[packing], sources=SOURCES)
    return part_of(recipe, "train", one_pass=True)


def all_plans(planner: Planner) -> list[StepPlan]:
    cursor, plans = planner.start(), []
    while True:
        try:
            plan, cursor = planner.step(cursor)
        except SourceExhausted:
            assert len(cursor.pool) == 0
            return plans
        plans.append(plan)


def counted(tokens: int, packing: str) -> int:
    overflow = PACKINGS[packing].get("overflow", "split")
    return {"truncate": min(tokens, 256), "drop": tokens if tokens <= 256 else 0}.get(str(overflow), tokens)


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_document_of_the_part_comes_once_and_whole(packing: str) -> None:
    recipe = recipe_of(packing)
    planner = make_planner(recipe, SIZES, dp=2, one_pass=True)
    given: dict[tuple[str, int], int] = {}
    for plan in all_plans(planner):
        columns = (getattr(plan.pieces, name).tolist() for name in ("source", "row", "epoch", "tokens"))
        for source, row, epoch, tokens in zip(*columns, strict=True):
            assert epoch == 0
            key = planner.sources[source], row
            given[key] = given.get(key, 0) + tokens
    expected = {
        (name, row): counted(int(sizes.tokens[row]), packing)
        for name, sizes in SIZES.items()
        for row in range(*rows_of(recipe.sources[name], sizes.num_documents))
    }
    assert given == {key: tokens for key, tokens in expected.items() if tokens}


@pytest.mark.parametrize("packing", PACKINGS)
def test_only_what_comes_last_has_room_left(packing: str) -> None:
    plans = all_plans(make_planner(recipe_of(packing), SIZES, one_pass=True))
    aligned = 1 if packing.startswith("concat") else PACKINGS[packing].get("align_tokens", 8)
    for plan in plans:
        room = plan.capacity_tokens - int((-(-plan.pieces.tokens // aligned) * aligned).sum())
        assert room >= 0
        ends = plan.sample_offset + plan.pieces.tokens
        assert ends.max() <= 256
        if packing.startswith("concat") and plan.step < len(plans) - 1:
            assert room == 0
    assert plans[-1].num_samples == 16
    assert plans[-1].fill < 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_up_to_its_end_it_is_the_order_of_a_run_that_stops_there(packing: str) -> None:
    recipe = recipe_of(packing)
    once, run = make_planner(recipe, SIZES, one_pass=True), make_planner(recipe, SIZES, one_pass=False)
    plans, cursor, digests = all_plans(once), run.start(), []
    with pytest.raises(SourceExhausted):
        while True:
            plan, cursor = run.step(cursor)
            digests.append(plan.order_digest)
    assert len(digests) < len(plans)
    assert digests == [plan.order_digest for plan in plans[: len(digests)]]


def test_a_part_smaller_than_a_batch_is_one_step_with_empty_samples() -> None:
    for packing in ("best_fit", "concat"):
        recipe = make_recipe({"tiny": "100%"}, samples=64, length=256, packing={"method": packing})
        recipe = part_of(recipe, "train", one_pass=True)
        planner = make_planner(recipe, {"tiny": SIZES["tiny"]}, dp=4, one_pass=True)
        [plan] = all_plans(planner)
        assert plan.pieces.tokens.sum() == SIZES["tiny"].tokens.sum()
        assert np.unique(plan.sample).size < 64, packing
        assert plan.num_tokens_global == SIZES["tiny"].tokens.sum() - np.count_nonzero(SIZES["tiny"].tokens)
