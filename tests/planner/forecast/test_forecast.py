"""The forecast: exact where the plan is made, near where rates take over, and equal to the planner's own errors."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.support.mixtures import forecast_of, make_planner
from tests.support.recipes import make_recipe
from tests.support.sizes import synthetic_sizes
from torchmix.catalog.sizes import SourceSizes
from torchmix.errors import PlanError, SourceExhausted
from torchmix.planner.forecast import Forecast, SourceForecast
from torchmix.planner.stream_order import epoch_tokens, order_of_stream
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe

SIZES = {
    "code": synthetic_sizes(600, shortest=20, longest=400, salt=2),
    "tiny": synthetic_sizes(8, shortest=20, longest=90, salt=3),
    "web": synthetic_sizes(1500, shortest=5, longest=1500),
}
SHARES = {"code": "30%", "tiny": "0.1%", "web": "69.9%"}


def recipe_with(**sources: dict[str, object]) -> Recipe:
    return make_recipe(SHARES, samples=16, length=256, sources=sources)


def of(result: Forecast, name: str) -> SourceForecast:
    return next(source for source in result.sources if source.name == name)


def steps_until_exhausted(recipe: Recipe, limit: int) -> int:
    planner = make_planner(recipe, SIZES)
    cursor = planner.start()
    for step in range(limit):
        try:
            _, cursor = planner.step(cursor)
        except SourceExhausted:
            return step
    return limit


def test_simulated_steps_give_the_numbers_of_the_plan() -> None:
    recipe = recipe_with()
    planner = make_planner(recipe, SIZES)
    cursor = planner.start()
    delivered, first = np.zeros(3, np.int64), dict[int, int]()
    for step in range(40):
        plan, cursor = planner.step(cursor)
        delivered += plan.delivered_tokens
        for s in np.flatnonzero(plan.delivered_tokens).tolist():
            first.setdefault(s, step)
    result = forecast_of(recipe, SIZES, 40)
    assert [source.name for source in result.sources] == ["code", "tiny", "web"]
    assert [source.delivered_tokens for source in result.sources] == delivered.tolist()
    assert [source.first_step for source in result.sources] == [first.get(s) for s in range(3)]
    assert result.fill == pytest.approx(delivered.sum() / (40 * 16 * 256))
    assert (result.simulated_steps, result.stop_step) == (40, None)


def test_rates_carry_on_where_the_plan_ends() -> None:
    recipe = recipe_with()
    exact, expected = (
        forecast_of(recipe, SIZES, 400),
        forecast_of(recipe, SIZES, 400, simulated_steps=40),
    )
    assert expected.simulated_steps == 40
    for name in ("code", "web"):
        assert of(expected, name).delivered_tokens == pytest.approx(of(exact, name).delivered_tokens, rel=0.03)
        assert of(expected, name).epochs == pytest.approx(of(exact, name).epochs, rel=0.03)


@pytest.mark.parametrize("simulated_steps", [1, 5])
def test_the_first_step_of_a_rare_source_is_foreseen(simulated_steps: int) -> None:
    recipe = make_recipe({"web": "99.98%", "tiny": "0.02%"}, samples=16, length=256)
    exact = of(forecast_of(recipe, SIZES, 200), "tiny").first_step
    assert exact is not None and exact > simulated_steps
    expected = of(forecast_of(recipe, SIZES, 200, simulated_steps=simulated_steps), "tiny").first_step
    assert expected is not None and abs(expected - exact) <= max(2, exact // 10)


def test_a_first_step_beyond_the_run_is_estimated() -> None:
    recipe = make_recipe({"web": "99.98%", "tiny": "0.02%"}, samples=16, length=256)
    exact = of(forecast_of(recipe, SIZES, 200), "tiny").first_step
    assert exact is not None
    for simulated_steps in (3, 1000):
        result = forecast_of(recipe, SIZES, 5, simulated_steps=simulated_steps)
        first = of(result, "tiny").first_step
        assert first is not None and first >= 5 and abs(first - exact) <= 2
        assert not result.is_exact(first)
        assert of(result, "tiny").delivered_tokens < 5


def test_a_source_has_no_first_step_where_the_data_ends_before() -> None:
    recipe = make_recipe(
        {"web": "60%", "code": "39.9999%", "tiny": "0.0001%"},
        samples=16,
        length=256,
        sources={"code": {"max_epochs": 1}},
    )
    for simulated_steps in (3, 1000):
        result = forecast_of(recipe, SIZES, 10_000, simulated_steps=simulated_steps)
        assert result.stop_step is not None
        assert of(result, "tiny").first_step is None


def test_the_run_stops_where_the_planner_says_that_a_source_is_exhausted() -> None:
    recipe = recipe_with(code={"max_epochs": 2})
    stop = steps_until_exhausted(recipe, 1000)
    assert 10 < stop < 1000
    result = forecast_of(recipe, SIZES, 1000)
    assert (result.stop_step, of(result, "code").runs_out_step) == (stop, stop)
    assert of(result, "web").runs_out_step is None
    assert result.simulated_steps == stop
    expected = forecast_of(recipe, SIZES, 1000, simulated_steps=10)
    assert expected.stop_step is not None and abs(expected.stop_step - stop) <= 2 + stop // 20


def test_a_source_that_hands_its_share_on_runs_out_without_a_stop() -> None:
    recipe = recipe_with(code={"max_epochs": 2, "on_exhausted": "renormalise"})
    stop = steps_until_exhausted(recipe_with(code={"max_epochs": 2}), 1000)
    for simulated_steps in (1000, 10):
        result = forecast_of(recipe, SIZES, 2 * stop, simulated_steps=simulated_steps)
        ran_out = of(result, "code").runs_out_step
        assert ran_out is not None and abs(ran_out - stop) <= 2 + stop // 20
        assert result.stop_step is None
        assert of(result, "code").epochs == pytest.approx(2.0)
        assert of(result, "web").epochs > 0


def test_the_run_ends_with_the_last_source() -> None:
    bound = {"max_epochs": 1, "on_exhausted": "renormalise"}
    recipe = recipe_with(code=bound, tiny=bound, web=bound)
    stop = steps_until_exhausted(recipe, 10_000)
    result = forecast_of(recipe, SIZES, 10_000)
    assert result.stop_step == stop
    assert all(source.runs_out_step is not None for source in result.sources)
    expected = forecast_of(recipe, SIZES, 10_000, simulated_steps=10)
    assert expected.stop_step is not None and abs(expected.stop_step - stop) <= 2 + stop // 10


def test_a_source_smaller_than_its_share_of_a_step_repeats_its_documents() -> None:
    recipe = make_recipe({"web": "50%", "tiny": "50%"}, samples=16, length=256)
    planner = make_planner(recipe, SIZES)
    cursor = planner.start()
    most = Counter[str]()
    for _ in range(5):
        plan, cursor = planner.step(cursor)
        pieces = plan.pieces
        begins = zip(pieces.source[pieces.start == 0].tolist(), pieces.row[pieces.start == 0].tolist(), strict=True)
        for (source, _row), count in Counter(begins).items():
            most[plan.sources[source]] = max(most[plan.sources[source]], count)
    assert most["tiny"] > 3
    result = forecast_of(recipe, SIZES, 5)
    assert {source.name: source.most_repeats for source in result.sources} == most


@pytest.mark.parametrize(("overflow", "tokens"), [("split", 1260), ("truncate", 516), ("drop", 260)])
def test_an_epoch_counts_tokens_after_the_overflow_rule(overflow: str, tokens: int) -> None:
    sizes = SourceSizes(
        first_row_of_page=np.array([0, 3], np.int64), tokens=np.array([4, 256, 1000], np.int32), window_pages=1
    )
    recipe = make_recipe({"a": "100%"}, length=256, packing={"overflow": overflow})
    assert epoch_tokens(order_of_stream(part_of(recipe, "train"), "a", {"a": sizes})) == tokens


def test_what_the_planner_refuses_from_the_start_is_raised() -> None:
    recipe = make_recipe({"web": "100%"}, length=256, packing={"overflow": "error"})
    with pytest.raises(PlanError, match="overflow: error"):
        forecast_of(recipe, SIZES, 5)


def test_progress_is_told_of_every_simulated_step() -> None:
    calls: list[int] = []
    forecast_of(recipe_with(), SIZES, 50, simulated_steps=7, progress=lambda: calls.append(1))
    assert len(calls) == 7


def test_an_epoch_counts_the_rows_that_are_used() -> None:
    sizes = SourceSizes(
        first_row_of_page=np.array([0, 4], np.int64), tokens=np.array([4, 256, 1000, 7], np.int32), window_pages=1
    )
    recipe = make_recipe({"a": "100%"}, length=256, sources={"a": {"documents": ("25%", "75%")}})
    assert epoch_tokens(order_of_stream(part_of(recipe, "train"), "a", {"a": sizes})) == 1256


@pytest.mark.parametrize("ramp", [[(0, 8), (60, 16)], [(0, 32), (20, 16), (90, 24)]])
def test_estimates_follow_a_ramp(ramp: list[tuple[int, int]]) -> None:
    limits = {"web": {"max_epochs": 1, "on_exhausted": "renormalise"}, "code": {"max_epochs": 12}}
    recipe = make_recipe(SHARES, samples=ramp, length=256, sources=limits)
    exact, estimate = (
        forecast_of(recipe, SIZES, 800),
        forecast_of(recipe, SIZES, 800, simulated_steps=40),
    )
    assert exact.stop_step is not None and estimate.stop_step is not None and estimate.simulated_steps == 40
    assert estimate.stop_step == pytest.approx(exact.stop_step, rel=0.05)
    assert of(estimate, "web").runs_out_step == pytest.approx(of(exact, "web").runs_out_step, rel=0.05)
    assert estimate.capacity_tokens == exact.capacity_tokens
    for name in SHARES:
        assert of(estimate, name).delivered_tokens == pytest.approx(of(exact, name).delivered_tokens, rel=0.05, abs=300)
