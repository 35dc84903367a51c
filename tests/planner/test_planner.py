"""One step and its neighbours: what a plan depends on, and what it is refused for."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.mixtures import PACKINGS, SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import CatalogMissing, DocumentTooLong, PlanError, TopologyError
from torchmix.mixture.draw import Position
from torchmix.parallel.place_tree import Layout
from torchmix.planner.balance import in_hash_order
from torchmix.planner.cursor import Cursor
from torchmix.planner.plan import StepPlan
from torchmix.recipe.modules import BACKBONE
from torchmix.recipe.structs import Recipe

LAYOUTS = [(1, 1), (2, 1), (4, 1), (4, 4), (16, 1), (1, 16), (8, 2)]
STEPS = 12


def mixture_recipe(packing: str = "best_fit", **changes: object) -> Recipe:
    return make_recipe(SHARES, samples=16, length=256, packing=PACKINGS[packing], **changes)


def order_of(plan: StepPlan) -> list[list[int]]:
    """All that must be equal at every layout: pieces, and where each lies in which sample."""
    columns = [plan.sample, plan.slot, plan.sample_offset]
    columns += [getattr(plan.pieces, name) for name in plan.pieces.__struct_fields__]
    columns += [plan.asked_tokens, plan.drawn_tokens, plan.delivered_tokens, plan.pool_tokens]
    return [column.tolist() for column in columns]


def copy_of(cursor: Cursor) -> Cursor:
    """The cursor as plain numbers and back: what a saved state keeps of it."""
    position = {name: getattr(cursor.position, name).tolist() for name in Position.__struct_fields__}
    pool = {name: getattr(cursor.pool, name).tolist() for name in cursor.pool.__struct_fields__}
    return Cursor(
        step=cursor.step,
        position=Position(**{name: np.array(values, np.int64) for name, values in position.items()}),
        pool=type(cursor.pool)(**{name: np.array(values, np.int64) for name, values in pool.items()}),
        order_digest=bytes(cursor.order_digest),
        decisions=tuple(cursor.decisions),
        drawn=replace(cursor.drawn),
    )


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_order_is_equal_at_every_layout_and_the_placement_is_not(packing):
    recipe = mixture_recipe(packing)
    runs = {
        layout: plan_steps(make_planner(recipe, SIZES, dp=layout[0], micro_batch_size=layout[1]), STEPS)[0]
        for layout in LAYOUTS
    }
    base = runs[1, 1]
    for layout, plans in runs.items():
        assert [plan.order_digest for plan in plans] == [plan.order_digest for plan in base]
        assert [order_of(plan) for plan in plans] == [order_of(plan) for plan in base]
        for plan in plans:
            assert (plan.layout.dp, plan.layout.micro_batch_size) == layout
            assert plan.num_samples == 16 and plan.num_microbatches * layout[0] * layout[1] == 16
            assert plan.placement.dp_rank_of_sample.max() == layout[0] - 1
    for step in range(STEPS):
        assert len({plans[step].plan_digest for plans in runs.values()}) == len(LAYOUTS)
        assert len({plans[step].num_tokens_global for plans in runs.values()}) == 1
    assert len({plan.order_digest for plan in base}) == STEPS


@pytest.mark.parametrize("packing", PACKINGS)
def test_any_cursor_continues_as_the_uninterrupted_run_did(packing):
    recipe = mixture_recipe(packing)
    plans, cursors = plan_steps(make_planner(recipe, SIZES), STEPS + 8)
    rng = random.Random(60)
    for start in (0, 1, *rng.sample(range(2, STEPS + 8), 3)):
        resumed = make_planner(recipe, SIZES, dp=4)
        again, between = plan_steps(resumed, min(3, STEPS + 8 - start), copy_of(cursors[start]))
        for plan, uninterrupted in zip(again, plans[start:], strict=False):
            assert plan.step == uninterrupted.step
            assert plan.order_digest == uninterrupted.order_digest
            assert order_of(plan) == order_of(uninterrupted)
        # And a resume of the resume, with yet another planner.
        if start + len(again) < len(plans):
            last, _ = make_planner(recipe, SIZES, dp=2).step(copy_of(between[-1]))
            assert last.order_digest == plans[start + len(again)].order_digest


def test_planning_a_step_twice_or_steps_out_of_order_alters_nothing():
    planner = make_planner(mixture_recipe(), SIZES)
    plans, cursors = plan_steps(planner, STEPS)
    before = [copy_of(cursor) for cursor in cursors]
    for step in random.Random(61).choices(range(STEPS), k=12):
        plan, after = planner.step(cursors[step])
        assert order_of(plan) == order_of(plans[step])
        assert plan.plan_digest == plans[step].plan_digest
        assert after.order_digest == cursors[step + 1].order_digest
    for cursor, kept in zip(cursors, before, strict=True):
        for name in Position.__struct_fields__:
            assert np.array_equal(getattr(cursor.position, name), getattr(kept.position, name))
        for name in cursor.pool.__struct_fields__:
            assert np.array_equal(getattr(cursor.pool, name), getattr(kept.pool, name))


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_the_order_of_sources_in_recipe_and_catalog_means_nothing(packing):
    recipe = mixture_recipe(packing)
    names = list(SHARES)
    base = plan_steps(make_planner(recipe, SIZES), 6)[0]
    for seed in range(3):
        random.Random(seed).shuffle(names)
        shuffled = msgspec.structs.replace(
            recipe,
            sources={name: recipe.sources[name] for name in names},
            mixture={name: recipe.mixture[name] for name in reversed(names)},
        )
        sizes = {name: SIZES[name] for name in names}
        sizes["of another recipe"] = SIZES["web"]
        planner = make_planner(shuffled, sizes)
        assert planner.sources == tuple(sorted(SHARES))
        assert [order_of(plan) for plan in plan_steps(planner, 6)[0]] == [order_of(plan) for plan in base]


def test_the_order_depends_on_the_seed_and_not_on_balance_boundaries_or_alignment_of_a_stream():
    def last_digest(recipe: Recipe) -> bytes:
        return plan_steps(make_planner(recipe, SIZES), 4)[0][-1].order_digest

    base = mixture_recipe("concat")
    same = [
        make_recipe(SHARES, packing={"method": "concat", "align_tokens": 64}),
        make_recipe(SHARES, packing={"method": "concat", "boundaries": "none"}),
        make_recipe(SHARES, packing={"method": "concat"}, balance="none"),
    ]
    assert {last_digest(recipe) for recipe in same} == {last_digest(base)}
    others = [
        make_recipe(SHARES, packing={"method": "concat"}, seed=8),
        make_recipe({**SHARES, "web": "43%", "tiny": "1.001%"}, packing={"method": "concat"}),
        make_recipe(SHARES, packing={"method": "concat"}, samples=8, length=512),
        mixture_recipe("concat truncate"),
        mixture_recipe("best_fit"),
        make_recipe(SHARES, packing={"method": "best_fit", "align_tokens": 64}),
    ]
    assert len({last_digest(recipe) for recipe in (base, *others)}) == 1 + len(others)


def test_a_model_of_one_module_has_one_placement():
    plan, _ = make_planner(make_recipe(SHARES), SIZES, dp=4).step(make_planner(make_recipe(SHARES), SIZES).start())
    assert list(plan.modules) == [BACKBONE]
    module = plan.modules[BACKBONE]
    assert (plan.layout, plan.placement, plan.balance) == (module.layout, module.placement, module.balance)
    assert plan.layout == Layout(dp=4) and plan.num_microbatches == plan.num_samples // 4


def test_without_balance_samples_are_placed_in_hash_order():
    plan = plan_steps(make_planner(make_recipe(SHARES, balance="none"), SIZES, dp=4, micro_batch_size=2), 1)[0][0]
    expected = in_hash_order(16, Layout(dp=4, micro_batch_size=2))
    for name in expected.__struct_fields__:
        assert np.array_equal(getattr(plan.placement, name), getattr(expected, name))
    assert plan.balance.cost == plan.balance.hash_order_cost


@pytest.mark.parametrize("packing", PACKINGS)
def test_pieces_of_a_plan_lie_beside_each_other_in_their_samples(packing):
    align = 1 if packing.startswith("concat") else PACKINGS[packing].get("align_tokens", 8)
    for plan in plan_steps(make_planner(mixture_recipe(packing), SIZES), STEPS)[0]:
        stop_of: dict[int, int] = {}
        slots: dict[int, int] = {}
        columns = (plan.sample, plan.slot, plan.sample_offset, plan.pieces.tokens)
        for sample, slot, offset, tokens in zip(*(column.tolist() for column in columns), strict=True):
            assert slot == slots.get(sample, 0)
            assert offset == stop_of.get(sample, 0)
            slots[sample] = slot + 1
            stop_of[sample] = offset + -(-tokens // align) * align
        assert list(stop_of) == list(range(16)), "samples are out of order, or one is empty"
        assert max(stop_of.values()) <= 256
        if packing.startswith("concat"):
            assert set(stop_of.values()) == {256} and plan.fill == 1.0
        assert plan.fill == pytest.approx(int(plan.pieces.tokens.sum()) / (16 * 256))


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_global_token_count_is_that_of_tokens_whose_document_goes_on(packing):
    cut_documents = 0
    for plan in plan_steps(make_planner(mixture_recipe(packing), SIZES), STEPS)[0]:
        labelled = 0
        for i in range(len(plan.pieces)):
            source, row = plan.sources[plan.pieces.source[i]], int(plan.pieces.row[i])
            length, start = int(SIZES[source].tokens[row]), int(plan.pieces.start[i])
            assert int(plan.pieces.document_tokens[i]) == length
            for token in range(start, start + int(plan.pieces.tokens[i])):
                labelled += token + 1 < length
            cut_documents += start + int(plan.pieces.tokens[i]) < length
        assert plan.num_tokens_global == labelled
    assert cut_documents or packing == "best_fit drop"


def test_truncated_and_dropped_documents_are_charged_for_what_they_give():
    for packing, most in (("best_fit truncate", 256), ("concat truncate", 256), ("best_fit drop", 256)):
        recipe = make_recipe({"web": "100%"}, samples=16, length=256, packing=PACKINGS[packing])
        plans, _ = plan_steps(make_planner(recipe, {"web": SIZES["web"]}), STEPS)
        for plan in plans:
            reach = plan.pieces.start + plan.pieces.tokens
            assert reach.max() <= most
            if packing == "best_fit drop":
                assert plan.pieces.document_tokens.max() <= most
        asked = sum(int(plan.asked_tokens[0]) for plan in plans)
        drawn = sum(int(plan.drawn_tokens[0]) for plan in plans)
        assert abs(asked - drawn) <= most / 2


def test_a_document_longer_than_a_sample_is_named_where_the_recipe_forbids_it():
    sizes = SourceSizes(first_row_of_page=np.array([0, 4]), tokens=np.array([5, 256, 257, 9], np.int32), window_pages=1)
    recipe = make_recipe({"web": "100%"}, length=256, packing={"overflow": "error"})
    with pytest.raises(DocumentTooLong) as raised:
        make_planner(recipe, {"web": sizes})
    for said in ("'web'", "row 2", "257 tokens", "256", "split, truncate or drop"):
        assert said in str(raised.value)
    fits = replace(sizes, tokens=np.array([5, 256, 1, 9], np.int32), longest_tokens=-1)
    plan_steps(make_planner(recipe, {"web": fits}), 3)


def test_a_source_that_would_give_nothing_is_refused_with_the_reason():
    empty = synthetic_sizes(20, shortest=0, longest=0)
    long = synthetic_sizes(20, shortest=257, longest=900)
    none = SourceSizes(first_row_of_page=np.array([0, 0]), tokens=np.zeros(0, np.int32), window_pages=1)
    drop = {"method": "best_fit", "overflow": "drop"}
    for packing, sizes, why in (
        (None, empty, "empty"),
        (None, none, "empty"),
        (drop, long, "drops all"),
        (drop, empty, "empty"),
    ):
        recipe = make_recipe({"bad": "50%", "web": "50%"}, length=256, packing=packing)
        with pytest.raises(PlanError, match=f"'bad' would give no tokens: .*{why}"):
            make_planner(recipe, {"bad": sizes, "web": SIZES["web"]})
    # One document of exactly a sample is enough, and is all that is given.
    one_fits = replace(long, tokens=np.where(np.arange(20) == 3, 256, long.tokens).astype(np.int32))
    plans, _ = plan_steps(make_planner(make_recipe({"web": "100%"}, length=256, packing=drop), {"web": one_fits}), 3)
    assert {row for plan in plans for row in plan.pieces.row.tolist()} == {3}


def test_sizes_that_are_missing_are_named_and_a_layout_that_does_not_divide_is_refused():
    with pytest.raises(CatalogMissing, match=r"books, web; run `torchmix index`"):
        make_planner(mixture_recipe(), {name: SIZES[name] for name in SIZES if name not in ("web", "books")})
    with pytest.raises(TopologyError, match="16 samples"):
        make_planner(mixture_recipe(), SIZES, dp=3)
