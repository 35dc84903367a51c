"""Items of modules: which there are, who computes them, and that nothing else of a plan depends on them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.mixtures import SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from torchmix.catalog.sizes import SourceSizes, TokenRuns
from torchmix.errors import PlanError, RecipeError
from torchmix.planner.balance import encoder_cost
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import EncoderModel, Module, Recipe

VIT = EncoderModel(layers=2, hidden=8, ffn=16, heads=2)
JOB = {"dp": 2, "tp": 2, "cp": 2}


def with_module(**module: Any) -> Recipe:
    return check_recipe(msgspec.structs.replace(make_recipe(SHARES), modules={"encoder": Module(**module)}))


def plans_of(recipe: Recipe, sizes: Any = SIZES, **layout: int) -> list[StepPlan]:
    return plan_steps(make_planner(recipe, sizes, **(layout or JOB)), 4)[0]


def item_plan(plan: StepPlan) -> ItemPlan:
    return plan.item_modules["encoder"]


def with_images(sizes: SourceSizes, *, each: int = 2, tokens: int = 3) -> SourceSizes:
    """`each` images of `tokens` tokens at the beginning of every document that has room for them."""
    count = np.where(sizes.tokens >= each * tokens, each, 0)
    first = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    number = np.arange(first[-1]) % each
    table = TokenRuns(
        first_run_of_row=first,
        offset=(number * tokens).astype(np.int32),
        tokens=np.full(first[-1], tokens, np.int32),
        sizes={"patches": (np.arange(first[-1]) % 17 * 4 + 4).astype(np.int32)},
    )
    return replace(sizes, items={"image": table})


def test_modules_leave_the_order_and_the_backbone_as_they_are() -> None:
    plain = plans_of(make_recipe(SHARES))
    other = plans_of(with_module(sources=("code",), model=VIT))
    for one, with_items in zip(plain, other, strict=True):
        assert one.order_digest == with_items.order_digest
        assert np.array_equal(one.placement.dp_rank_of_sample, with_items.placement.dp_rank_of_sample)
        assert one.plan_digest != with_items.plan_digest
    assert [plan.item_modules for plan in plain] == [{}] * 4


def test_the_items_are_the_pieces_of_the_chosen_sources() -> None:
    for plan in plans_of(with_module(sources=("code", "web"))):
        items = item_plan(plan).items
        chosen = np.isin(plan.pieces.source, [plan.sources.index(name) for name in ("code", "web")])
        assert np.array_equal(items.piece, np.flatnonzero(chosen))
        assert np.array_equal(items.tokens, plan.pieces.tokens[chosen])
        assert np.array_equal(items.offset, plan.sample_offset[chosen])


@pytest.mark.parametrize(("axis", "count"), [("DP", 2), ("CP", 4), ("WORLD", 8)])
@pytest.mark.parametrize("scope", ["step", "microbatch"])
def test_each_item_has_one_consumer_and_bins_are_balanced(axis: str, count: int, scope: str) -> None:
    plans = plans_of(with_module(axis=axis, scope=scope, model=VIT))
    for plan in plans:
        module = item_plan(plan)
        assert module.num_consumers == count
        assert module.consumer_of_item.min() >= 0 and module.consumer_of_item.max() < count
        microbatch = plan.placement.microbatch_of_sample[module.items.sample]
        assert np.array_equal(module.bin_of_item, microbatch if scope == "microbatch" else 0 * microbatch)
        place = module.consumer_of_item * module.num_bins + module.bin_of_item
        for number in np.unique(place):
            assert module.slot_of_item[place == number].tolist() == list(range((place == number).sum()))
        report = module.balance
        assert report.lower_bound <= report.cost <= report.hash_order_cost
    assert sum(item_plan(plan).balance.cost for plan in plans) < sum(
        item_plan(plan).balance.hash_order_cost for plan in plans
    )


def test_images_cost_as_their_tiles_and_other_columns_have_none() -> None:
    code = with_images(SIZES["code"])
    table = code.items["image"]
    segments = np.where(table.sizes["patches"] % 8 == 0, 4, 1)
    tiled = replace(code, items={"image": replace(table, sizes={**table.sizes, "segments": segments})})
    for column in ("patches", "tokens"):
        [plan, *_] = plans_of(with_module(items="image", sizes=column, model=VIT), {**SIZES, "code": tiled})
        items = item_plan(plan).items
        wanted = segments[items.item] if column == "patches" else np.ones(len(items))
        assert items.segments.tolist() == wanted.tolist()
        assert item_plan(plan).cost_of_item.tolist() == encoder_cost(VIT)(items.size, items.segments).tolist()


def test_images_lie_where_their_tokens_do() -> None:
    sizes = {**SIZES, "code": with_images(SIZES["code"])}
    for plan in plans_of(with_module(items="image", sizes="patches", model=VIT), sizes):
        items = item_plan(plan).items
        table = sizes["code"].items["image"]
        assert len(items)
        assert (plan.pieces.source[items.piece] == plan.sources.index("code")).all()
        assert np.array_equal(items.size, table.sizes["patches"][items.item])
        inside = items.offset - plan.sample_offset[items.piece] + plan.pieces.start[items.piece]
        assert np.array_equal(inside, table.offset[items.item])
        assert np.array_equal(items.sample, plan.sample[items.piece])


def test_a_column_of_documents_counts_for_their_pieces() -> None:
    sizes = {name: replace(each, columns={"bytes": each.tokens * 5}) for name, each in SIZES.items()}
    for plan in plans_of(with_module(sizes="bytes"), sizes):
        items = item_plan(plan).items
        assert np.array_equal(items.size, items.tokens * 5)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ({"sizes": "tokns"}, r"modules.encoder.sizes: 'tokns' is no column .*did you mean 'tokens'"),
        ({"sources": ("wbe",)}, r"modules.encoder.sources\[0\]: 'wbe' is no source .*did you mean 'web'"),
        ({"items": "image", "sources": ("web",)}, "modules.encoder.sources: source 'web' has no images in its catalog"),
        ({"method": "ltp"}, "modules.encoder.method: 'ltp' is not one of"),
        ({"cap": "1GiB"}, "modules.encoder.cap: needs the module's model"),
        ({"cap": "1GiB", "model": VIT, "near_text": "always"}, "modules.encoder.cap: items stay with their text"),
        (
            {"near_text": "mostly"},
            "modules.encoder.near_text: 'mostly' is neither a percentage, as 5%, nor the word always",
        ),
        ({"model": msgspec.structs.replace(VIT, layers=0)}, "modules.encoder.model.layers: 0 is out of range"),
    ],
)
def test_faults_are_named(module: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        plans_of(with_module(**module))


def test_a_cap_is_hard() -> None:
    plan = plans_of(with_module(model=VIT))[0]
    total = int((item_plan(plan).items.size * 2 * 2 * (48 + 16 + 32)).sum())
    tight = plans_of(with_module(model=VIT, cap=total // 8 * 5 // 4))[0]
    bytes_of_consumer = np.zeros(8, np.int64)
    np.add.at(bytes_of_consumer, item_plan(tight).consumer_of_item, item_plan(tight).items.size * 384)
    assert bytes_of_consumer.max() <= total // 8 * 5 // 4
    with pytest.raises(PlanError, match=r"module encoder: item \d+ takes \d+ bytes.* Raise modules\.encoder\.cap"):
        plans_of(with_module(model=VIT, cap=total // 9))


@pytest.mark.parametrize("axis", ["DP", "WORLD"])
def test_near_text_keeps_items_in_the_replica_of_their_text(axis: str) -> None:
    sizes = {name: with_images(one) for name, one in SIZES.items()}
    at_home: dict[str | None, list[float]] = {}
    for near in (None, "20%"):
        recipe = with_module(items="image", sizes="patches", axis=axis, near_text=near)
        for plan in plans_of(recipe, sizes, dp=4, tp=2):
            module = item_plan(plan)
            replica = module.consumer_of_item * 4 // module.num_consumers
            home = plan.placement.dp_rank_of_sample[module.items.sample]
            at_home.setdefault(near, []).append(float((replica == home).mean()))
            assert module.balance.cost <= 1.21 * module.balance.lower_bound + 68
    assert np.mean(at_home["20%"]) > np.mean(at_home[None]) + 0.15, at_home


@pytest.mark.parametrize("near", ["5%", "10%", "20%"])
def test_many_small_images_stay_near_their_text_within_the_tolerance(near: str) -> None:
    sizes = {name: with_images(one, each=8, tokens=2) for name, one in SIZES.items()}

    def plans(near_text: str | None, dp: int = 4) -> list[StepPlan]:
        return plans_of(with_module(items="image", sizes="patches", near_text=near_text), sizes, dp=dp)

    for plan, plain in zip(plans(near), plans(None), strict=True):
        module, rows = item_plan(plan), int(item_plan(plan).items.tokens.sum())
        assert not module.balance.took_hash_order and not module.balance.left_text
        assert module.balance.cost <= item_plan(plain).balance.cost * (1 + float(near[:-1]) / 100)
        assert plan.rows_that_travel("encoder") < 0.3 * rows < plain.rows_that_travel("encoder")
        replica = module.consumer_of_item * 4 // module.num_consumers
        away = replica != plan.placement.dp_rank_of_sample[module.items.sample]
        assert plan.rows_that_travel("encoder") == int(module.items.tokens[away].sum())


def test_items_that_cannot_stay_near_their_text_are_placed_by_lpt() -> None:
    def plans(near_text: str | None, cap: int | None = None) -> list[StepPlan]:
        sizes = {name: with_images(one) for name, one in SIZES.items()}
        module = with_module(items="image", sizes="patches", model=VIT, near_text=near_text, cap=cap)
        return plans_of(module, sizes, dp=8)

    def most_bytes(plan: StepPlan) -> int:
        return int(np.bincount(item_plan(plan).consumer_of_item, item_plan(plan).items.size).max()) * 384

    near, cap = plans("1000%"), int(np.median([most_bytes(plan) for plan in plans("1000%")]))
    fits = [most_bytes(plan) <= cap for plan in near]
    assert any(fits) and not all(fits)
    for plan, plain, free, has_room in zip(plans("1000%", cap), plans(None, cap), near, fits, strict=True):
        expected = free if has_room else plain
        assert np.array_equal(item_plan(plan).consumer_of_item, item_plan(expected).consumer_of_item)
        assert item_plan(plan).balance.left_text != has_room and not item_plan(plain).balance.left_text


@pytest.mark.parametrize(
    ("near_text", "method", "told"), [("5%", "none", "of the method lpt"), ("-1%", "lpt", "range")]
)
def test_near_text_is_checked(near_text: str, method: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        with_module(method=method, near_text=near_text)


def test_an_item_across_the_end_of_a_piece_is_left_out() -> None:
    sizes = {name: with_images(one, each=3, tokens=one.longest_tokens // 4) for name, one in SIZES.items()}
    for plan in plans_of(with_module(items="image", sizes="patches"), sizes):
        items = item_plan(plan).items
        start = plan.sample_offset[items.piece]
        assert (items.offset >= start).all()
        assert (items.offset + items.tokens <= start + plan.pieces.tokens[items.piece]).all()


@pytest.mark.parametrize("axis", ["DP", "WORLD"])
def test_items_stay_with_their_text_always_where_the_recipe_says_so(axis: str) -> None:
    sizes = {**SIZES, "code": with_images(SIZES["code"])}
    module = {"items": "image", "sizes": "patches", "axis": axis, "model": VIT}
    always = plans_of(with_module(**module, near_text="always"), sizes)
    for plan in always:
        replica = item_plan(plan).consumer_of_item // plan.layout.consumers_of_replica(item_plan(plan).axis)
        assert np.array_equal(replica, plan.placement.dp_rank_of_sample[item_plan(plan).items.sample])
        assert plan.rows_that_travel("encoder") == 0 and not item_plan(plan).balance.left_text
    assert sum(plan.rows_that_travel("encoder") for plan in plans_of(with_module(**module, near_text="0%"), sizes))
