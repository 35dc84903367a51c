"""DGraph: chains against the landed rules, the paper's use cases against the recipe's keys, and what is refused."""

from __future__ import annotations

import inspect
import xml.dom.minidom
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.planner.test_place_items import with_images
from tests.support import strategies
from tests.support.mixtures import SHARES, SIZES, make_planner, plan_steps
from tests.support.recipes import make_recipe
from torchmix.errors import PlanError, RecipeError
from torchmix.parallel.place_tree import Layout
from torchmix.planner import balance
from torchmix.planner.graph.dgraph import DGraph, StrategyStep
from torchmix.planner.graph.drawing import states_of
from torchmix.planner.graph.strategy import backbone_cost, flops
from torchmix.planner.plan import StepPlan, plan_digest
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import EncoderModel, Module, Recipe

IMAGES = {**SIZES, "code": with_images(SIZES["code"])}
VIT = EncoderModel(layers=2, hidden=8, ffn=16, heads=2)
VISION = {"vision": Module(items="image", sizes="patches", model=VIT)}


def recipe_with(modules: dict[str, Module] | None = None, **keys: Any) -> Recipe:
    recipe = make_recipe(SHARES)
    changed = msgspec.structs.replace(recipe, balance=msgspec.structs.replace(recipe.balance, **keys))
    return check_recipe(msgspec.structs.replace(changed, modules=modules or {}))


def plans_of(recipe: Recipe, sizes: Any = SIZES, *, steps: int = 4, **layout: Any) -> list[StepPlan]:
    return plan_steps(make_planner(recipe, sizes, **(layout or {"dp": 4})), steps)[0]


def digests(plans: list[StepPlan]) -> list[str]:
    return [plan.plan_digest.hex() for plan in plans]


def strategy_step(monkeypatch: pytest.MonkeyPatch, planner: Planner | None = None) -> tuple[StrategyStep, Any]:
    """The first step of a planner, and the model, as a strategy gets them."""
    found: list[Any] = []

    def catch(step: Any, tree: Any, model: Any) -> DGraph:
        found.append((step, model))
        return step.graph("tokens").distribute("DP").cost(flops(model)).balance("none")  # type: ignore[no-any-return]

    monkeypatch.setattr(strategies, "of_no_step", catch)
    planner = planner or make_planner(recipe_with(strategy="tests.support.strategies:of_no_step"), SIZES, dp=4)
    planner.step(planner.start())
    step, model = found[0]
    return step, model


@pytest.mark.parametrize("layout", [{"dp": 1}, {"dp": 4}, {"dp": 2, "micro_batch_size": 4}, {"dp": 16}])
@pytest.mark.parametrize("method", ["rows", "none"])
def test_the_chain_of_a_recipe_gives_the_plans_of_the_rules(method: str, layout: dict[str, int]) -> None:
    recipe = recipe_with(method=method)
    grid = Layout(**layout)
    for plan in plans_of(recipe, **layout):
        cost = backbone_cost(make_planner(recipe, SIZES).part).of_samples(
            plan.pieces.tokens, plan.sample, num_samples=16, length=256
        )
        placement = balance.in_rows(cost, grid) if method == "rows" else balance.in_hash_order(16, grid)
        assert plan.plan_digest == plan_digest(plan.order_digest, placement, grid)
        assert plan.balance == balance.report(cost, placement, grid)


def test_the_use_cases_are_as_short_as_in_the_paper_and_equal_the_recipe() -> None:
    def lines(function: Callable[..., Any]) -> int:
        return len(inspect.getsource(function).splitlines())

    assert lines(strategies.llm_balance) <= 7
    assert lines(strategies.vlm_balance) <= 5
    by_keys = plans_of(recipe_with(broadcast_at="TP"), dp=2, tp=2, broadcast_at="TP")
    own = recipe_with(strategy="tests.support.strategies:llm_balance", broadcast_at="TP")
    assert digests(plans_of(own, dp=2, tp=2, broadcast_at="TP")) == digests(by_keys)
    job = {"dp": 2, "tp": 2, "pp": 2, "broadcast_at": "TP"}
    by_keys = plans_of(recipe_with(VISION, broadcast_at="TP"), IMAGES, **job)
    own = recipe_with(VISION, strategy="tests.support.strategies:vlm_balance", broadcast_at="TP")
    assert digests(plans_of(own, IMAGES, **job)) == digests(by_keys)
    assert all(len(plan.item_modules["vision"].items) for plan in by_keys)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["rows", "max", "rank", "pipeline"])
@pytest.mark.parametrize("level", ["both", "bucket", "bin"])
@pytest.mark.parametrize("method", ["rows", "lpt", "karmarkar_karp", "zigzag", "tests.support.strategies:in_turn"])
def test_any_method_keeps_counts_and_what_its_level_keeps(method: str, level: str, objective: str) -> None:
    keys = {"method": method, "level": level, "objective": objective}
    for layout in ({"dp": 4}, {"dp": 2, "micro_batch_size": 2, "pp": 2}, {"dp": 8, "group_size": 3}):
        group_size = layout.pop("group_size", None)
        base = plans_of(recipe_with(method="none"), steps=2, **layout)
        for plain, plan in zip(
            base, plans_of(recipe_with(**keys, group_size=group_size), steps=2, **layout), strict=True
        ):
            assert plan.order_digest == plain.order_digest
            size = layout.get("micro_batch_size", 1)
            rank, microbatch = plan.placement.dp_rank_of_sample, plan.placement.microbatch_of_sample
            place = rank * plan.num_microbatches + microbatch
            assert (np.bincount(place) == size).all() and len(np.bincount(place)) * size == 16
            for number in np.unique(place):
                assert plan.placement.slot_of_sample[place == number].tolist() == list(range(size))
            if level == "bucket":
                assert np.array_equal(microbatch, plain.placement.microbatch_of_sample)
            if level == "bin":
                assert np.array_equal(rank, plain.placement.dp_rank_of_sample)
            assert plan.balance.lower_bound <= plan.balance.cost <= plan.balance.hash_order_cost


def test_rows_beat_hash_order_and_microbatches_are_ordered() -> None:
    def row_costs(microbatches: str) -> list[int]:
        recipe = recipe_with(method="rows", microbatches=microbatches)
        plan = plans_of(recipe, steps=1)[0]
        assert plan.balance.cost < plan.balance.hash_order_cost
        cost = backbone_cost(make_planner(recipe, SIZES).part).of_samples(
            plan.pieces.tokens, plan.sample, num_samples=16, length=256
        )
        bins = np.zeros((plan.num_microbatches, 4), np.int64)
        np.add.at(bins, (plan.placement.microbatch_of_sample, plan.placement.dp_rank_of_sample), cost)
        return bins.max(axis=1).tolist()  # type: ignore[no-any-return]

    descending = row_costs("descending")
    assert descending == sorted(descending, reverse=True)
    unimodal = row_costs("unimodal")
    top = unimodal.index(max(unimodal))
    assert unimodal[: top + 1] == sorted(unimodal[: top + 1]) and unimodal[top:] == sorted(unimodal[top:], reverse=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("losing_one", r"gives int64 \[15\], not one whole number for each of 16 items"),
        ("in_floats", r"gives float64 \[16\], not one whole number"),
        ("beyond", "puts item 0 into bin 16; there are bins 0 to 15"),
        ("all_in_one", "puts 16 items into bin 0; each has 1"),
        ("changing", "answers otherwise when it is asked again"),
    ],
)
def test_a_method_that_breaks_a_rule_is_named(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"the method tests.support.strategies:{name}, step 0: it {message}"):
        plans_of(recipe_with(method=f"tests.support.strategies:{name}"))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("restless", PlanError, "strategies:restless, step 0: it answers otherwise when it is asked again"),
        ("of_no_step", PlanError, "strategies:of_no_step, step 0: it gives int, not a DGraph or a StepPlan"),
        ("missing", RecipeError, "balance.strategy: 'tests.support.strategies:missing' cannot be imported"),
    ],
)
def test_a_faulty_strategy_is_named(name: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        plans_of(recipe_with(strategy=f"tests.support.strategies:{name}"))


@pytest.mark.parametrize("axis", ["TP", "CP", "PP"])
def test_a_strategy_and_the_recipe_name_one_axis_to_send_along(axis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, sizes = "tests.support.strategies:of_no_step", {"dp": 2, axis.lower(): 2}

    def sends(step: Any, tree: Any, model: Any) -> DGraph:
        graph: DGraph = step.graph("tokens").distribute("DP").cost(flops(model)).balance("rows").broadcast_at(axis)
        return graph

    monkeypatch.setattr(strategies, "of_no_step", sends)
    plain = plans_of(recipe_with(), steps=1, **sizes)
    assert digests(plans_of(recipe_with(strategy=name), steps=1, dp=2)) == digests(plain), "an axis of one rank"
    told = recipe_with(strategy=name, broadcast_at=axis)
    assert digests(plans_of(told, steps=1, **sizes, broadcast_at=axis)) == digests(plain)
    with pytest.raises(PlanError, match=rf"broadcast_at: all {axis} ranks are served; write .*broadcast_at: {axis}"):
        plans_of(recipe_with(strategy=name), steps=1, **sizes)


def test_graphs_refuse_what_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model = strategy_step(monkeypatch)
    graph = step.graph("tokens")
    placed = graph.distribute("DP").cost(flops(model))
    sized = graph.distribute("DP").cost(flops(model), memory=lambda sizes: sizes)
    faults: list[tuple[Callable[[], object], str]] = [
        (lambda: graph.mix({"web": "100%"}), "drawn by the recipe's mixture and schedule"),
        (lambda: graph.distribute("PD"), "axis 'PD' is not one of DP, CP, WORLD"),
        (lambda: graph.distribute("WORLD"), "samples of fixed length go to DP"),
        (lambda: graph.distribute("DP", group_size=0), "group_size=0 must be an int"),
        (lambda: graph.cost(lambda sizes: sizes * 0.5), "the function gives float64"),
        (lambda: graph.cost(lambda sizes: -sizes), "the function gives -"),
        (lambda: graph.cost(lambda sizes: sizes * 0 + (1 << 61)), "would exceed 62 bits"),
        (lambda: graph.cost(lambda sizes: sizes[1:]), "not a whole number for each"),
        (lambda: graph.broadcast_at("DP"), "axis 'DP' is not one of TP, CP, PP"),
        (lambda: graph.balance("rows"), r"call distribute\(axis\) before it"),
        (lambda: graph.distribute("DP").balance("rows"), r"call cost\(fn\) before it"),
        (lambda: placed.balance("row"), "method 'row' is not one of rows, .*did you mean 'rows'"),
        (lambda: placed.balance("rows", level="bins"), "level 'bins' is not one of both, bucket, bin"),
        (lambda: placed.balance("rows", objective="sum"), "objective 'sum' is not one of"),
        (lambda: placed.balance("rows", cap=5), "a cap needs cost"),
        (lambda: placed.plan(), "needs a graph over samples that is balanced"),
        (
            lambda: sized.balance("rows", cap=200),
            "takes .* bytes, its sample .* the cap is 200",
        ),
        (lambda: step.graph("tokens", unit="sentence"), "unit 'sentence' is not one of"),
        (lambda: step.graph("tokens", ["wbe"]), "'wbe' is no source of this part .did you mean 'web'"),
        (lambda: step.plan(placed.balance("rows"), encoder=placed), "needs a graph over items"),
    ]
    for call, message in faults:
        with pytest.raises((PlanError, RecipeError), match=message):
            call()


def test_a_graph_of_some_sources_counts_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _ = strategy_step(monkeypatch)
    both = [step.graph("tokens", sources).cost(lambda sizes: sizes).costs for sources in (["web"], None)]
    pieces, sample = step.drawn.packed.pieces, step.drawn.packed.sample
    is_web = pieces.source == step.drawn.sources.index("web")
    assert np.array_equal(both[0], np.bincount(sample[is_web], pieces.tokens[is_web], 16).astype(np.int64))
    assert np.array_equal(both[1], np.bincount(sample, pieces.tokens, 16).astype(np.int64))


def test_states_and_drawings_say_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model = strategy_step(monkeypatch)
    graph = step.graph("tokens").distribute("DP").cost(flops(model)).balance("rows")
    plan, states = graph.plan(), graph.states()
    assert np.array_equal(states["bucket"], plan.placement.dp_rank_of_sample[plan.sample])
    assert states["source"].tolist() == [plan.sources[s] for s in plan.pieces.source]
    svg = xml.dom.minidom.parseString(graph.draw(1))
    texts = {node.firstChild.data for node in svg.getElementsByTagName("title")}  # type: ignore[union-attr]
    mine = states["bin"] == 1
    assert {f"sample {sample}" for sample in states["sample"][mine]} == {text for text in texts if "sample" in text}
    assert {f"rank dp {rank}" for rank in range(4)} <= texts
    assert not svg.getElementsByTagName("script") and "href" not in graph.draw(1)
    with pytest.raises(PlanError, match="has microbatches 0 to 3, not 4"):
        graph.draw(4)


def test_states_of_items_name_their_consumers() -> None:
    plan = plans_of(recipe_with(VISION), IMAGES, steps=1, dp=2, tp=2)[0]
    states = states_of(plan, "vision")
    module = plan.item_modules["vision"]
    assert np.array_equal(states["consumer"], module.consumer_of_item)
    assert set(states["source"].tolist()) == {"code"}


def test_modules_by_any_method_are_no_worse_than_hash_order() -> None:
    for method in ("lpt", "karmarkar_karp", "zigzag", "tests.support.strategies:in_turn"):
        for group_size in (None, 3):
            module = msgspec.structs.replace(VISION["vision"], method=method, group_size=group_size)
            for plan in plans_of(recipe_with({"vision": module}), IMAGES, steps=2, dp=4, tp=2):
                report = plan.item_modules["vision"].balance
                assert report.lower_bound <= report.cost <= report.hash_order_cost
