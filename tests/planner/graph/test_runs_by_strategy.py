"""Strategies over samples of `packing.method: whole`: the recipe's chain, sizes of one's own, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.planner.test_contexts import check_bins, costs_of, recipe_of
from tests.support import strategies
from tests.support.mixtures import SIZES, make_planner, plan_steps
from torchmix.errors import PlanError
from torchmix.planner.balance import CostModel
from torchmix.planner.contexts import place_in_contexts, plan_of_runs
from torchmix.planner.graph.strategy import flops
from torchmix.planner.plan import StepPlan
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Recipe

NAME = "tests.support.strategies:of_no_step"


def own(monkeypatch: pytest.MonkeyPatch, function: Any, *, num_steps: int = 3, **context: Any) -> list[StepPlan]:
    """Plans of a recipe whose strategy is a function."""
    monkeypatch.setattr(strategies, "of_no_step", function)
    plain = recipe_of(**context)
    recipe: Recipe = check_recipe(replace(plain, balance=replace(plain.balance, strategy=NAME)))
    return plan_steps(make_planner(recipe, SIZES, dp=4, cp=2), num_steps)[0]


def chain(step: Any, tree: Any, model: Any) -> Any:
    return step.graph("tokens").mix(step.schedule).distribute("CP").cost(flops(model)).balance()


def functions_of_page() -> dict[str, Any]:
    page = (Path(__file__).parents[3] / "docs" / "strategies.md").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(block, found)
    return found


def test_the_chain_of_a_recipe_gives_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = plan_steps(make_planner(recipe_of(), SIZES, dp=4, cp=2), 3)
    assert [plan.plan_digest for plan in own(monkeypatch, chain)] == [plan.plan_digest for plan in plain]


def test_the_strategies_of_the_page_do_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    page = functions_of_page()
    for plan in own(monkeypatch, page["in_few_sizes"]):
        assert plan.contexts is not None and set(plan.contexts.size_of_bin.tolist()) <= {1, 2, 8}
    for plan in own(monkeypatch, page["one_by_one"]):
        assert plan.contexts is not None
        check_bins(plan.contexts, plan.pieces.tokens, costs_of(8))
        held = np.bincount(plan.contexts.bin_of_sample, minlength=len(plan.contexts.size_of_bin))
        assert held.max() == 1 and plan.balance.cost > plan.balance.lower_bound
    least = {n: next(s for s in (1, 2, 4, 8) if costs_of(8).holds(n, s)) for n in plan.pieces.tokens.tolist()}
    assert plan.contexts.size_of_bin[plan.contexts.bin_of_sample].tolist() == [
        least[n] for n in plan.pieces.tokens.tolist()
    ]


def test_runs_of_ones_own_equal_a_plan_that_they_are_taken_from() -> None:
    costs = costs_of(8)
    tokens = np.random.default_rng(1).integers(1, 300, 40)
    plan, report = place_in_contexts(tokens, costs)
    held = plan.bin_of_sample
    of_sample = (plan.microbatch_of_bin[held], plan.first_rank_of_bin[held], plan.size_of_bin[held])
    again, same = plan_of_runs(tokens, *of_sample, costs)
    assert (same.cost, same.lower_bound) == (report.cost, report.lower_bound)
    check_bins(again, tokens, costs)
    for name in ("load_of_bin", "first_rank_of_bin", "microbatch_of_bin"):
        assert np.array_equal(getattr(again, name)[again.bin_of_sample], getattr(plan, name)[held])
    rounded, _ = plan_of_runs(tokens, *of_sample, replace(costs, microbatches_of=plan.num_microbatches + 1))
    assert rounded.num_microbatches == plan.num_microbatches + 1


BAD_RUNS: list[tuple[list[tuple[int, int, int]], str]] = [
    ([(0, 0, 2), (0, 1, 1)], r"bin 1 is of microbatch 0, rank 1 on: .* runs cover each of 8 ranks once"),
    ([(0, 0, 8), (0, 4, 4)], r"runs cover each of 8 ranks once"),
    ([(0, 0, 3), (0, 4, 4)], r"sample 0 is in microbatch 0, in a run of 3 ranks"),
    ([(0, 0, 2), (0, 8, 1)], r"sample 1 is in microbatch 0, in a run of 1 ranks from rank 8"),
    ([(-1, 0, 2), (0, 2, 1)], r"sample 0 is in microbatch -1"),
    ([(0, 0, 2), (3, 2, 1)], r"sample 1 is in microbatch 3"),
    ([(0, 1, 2), (0, 4, 1)], r"has 2 ranks from rank 1; .* begin at a multiple"),
    ([(0, 0, 1), (0, 4, 1)], r"has 100 tokens with padding; its 1 ranks hold 64"),
]


@pytest.mark.parametrize(("places", "message"), BAD_RUNS)
def test_runs_that_cannot_be_are_named(places: list[tuple[int, int, int]], message: str) -> None:
    columns = np.array(places, np.int64).T.copy()
    with pytest.raises(PlanError, match=message):
        plan_of_runs(np.array([100, 9], np.int64), *columns, costs_of(8))


def test_plans_with_changed_runs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(name: str, value: Any) -> Any:
        def function(step: Any, tree: Any, model: Any) -> Any:
            graph = chain(step, tree, model)
            contexts = graph.placed.contexts
            column = np.array(getattr(contexts, name))
            column[0] = value
            placed = replace(graph.placed, contexts=replace(contexts, **{name: column}))
            return step.plan(replace(graph, placed=placed))

        return function

    for name, value, message in (
        ("bin_of_sample", 10**6, "a sample is in bin"),
        ("bin_of_sample", -1, "a sample is in bin"),
        ("padded_tokens", 7, "padded_tokens is 7 at 0"),
        ("load_of_bin", -1, "load_of_bin is -1 at 0"),
        ("size_of_bin", 3, "bin 0 has 3 ranks"),
        ("size_of_bin", 0, "bin 0 has 0 ranks"),
        ("microbatch_of_bin", 1, "bin 0 is of microbatch 1"),
        ("first_rank_of_bin", 16, "bin 0 is of microbatch 0, rank 16"),
    ):
        with pytest.raises(PlanError, match=message):
            own(monkeypatch, changed(name, value), num_steps=1)


def call(function: Any) -> Any:
    return lambda step, tree, model: function(step.graph("tokens"), step, model)


REFUSED: list[tuple[Any, str]] = [
    (lambda graph, step, model: graph.distribute("DP"), "samples of packing.method: whole go to CP, not to DP"),
    (lambda graph, step, model: graph.distribute("CP", sizes=(3,)), r"sizes=\[3\] are none or not all of 1, 2, 4, 8"),
    (lambda graph, step, model: graph.distribute("CP", sizes=()), "are none or not all"),
    (lambda graph, step, model: graph.distribute("CP").cost(lambda n: n), "give flops"),
    (lambda graph, step, model: graph.distribute("CP").cost(flops(model)).balance("lpt"), "call balance\\(\\) alone"),
    (lambda graph, step, model: graph.cost(flops(model)).balance(), "call distribute"),
    (lambda graph, step, model: graph.distribute("CP").in_runs(*[step.tokens] * 3), "call cost"),
    (
        lambda graph, step, model: graph.distribute("CP").cost(flops(model)).in_runs(*[step.tokens[1:]] * 3),
        r"microbatch must be int64 \[",
    ),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_what_does_not_go_with_runs_is_refused(monkeypatch: pytest.MonkeyPatch, function: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        own(monkeypatch, call(function), num_steps=1)


def test_a_cost_of_ones_own_decides_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_pairs(step: Any, tree: Any, model: Any) -> Any:
        cost = CostModel(per_token=0, per_pair=1000, whole_sample=False)
        return step.graph("tokens").distribute("CP").cost(cost).balance()

    [plan] = own(monkeypatch, by_pairs, num_steps=1)
    [plain] = own(monkeypatch, chain, num_steps=1)
    assert plan.plan_digest != plain.plan_digest and plan.order_digest == plain.order_digest
