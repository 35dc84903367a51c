"""`torchmix plan --simulate`: predicted times of the recipe's own steps, for the job and the model that one names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import values_of
from tests.support.loaders import write_job
from tests.support.projects import make_indexed_project
from torchmix.cli.main import main
from torchmix.planner.simulation import ASSUMPTIONS, MODELS, ORDERS

JOB = ("--simulate", "--world", "64", "--tp", "2", "--pp", "4", "--steps", "2")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_indexed_project(tmp_path)


def simulated(recipe: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return values_of(capsys, "plan", recipe, *words)


def test_all_orders_are_timed_for_the_job(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = simulated(recipe, capsys, *JOB, "--model", "llama3-70b")
    assert (values["dp"], values["tp"], values["pp"]) == (8, 2, 4)
    found = values["simulation"]
    assert (found["world"], found["num_steps"], found["model"]) == (64, 2, "llama3-70b")
    assert list(found["orders"]) == list(ORDERS)
    assert found["pipeline_bubble"] == (2 + 3) / 2  # 16 samples on 8 ranks, in 4 stages
    ours = found["orders"]["this plan"]
    assert 1 < ours["at_end"]["over_ideal"] <= found["orders"]["hash order"]["at_end"]["over_ideal"]
    assert ours["at_end"]["seconds"] == pytest.approx(ours["at_end"]["over_ideal"] * found["ideal_seconds"])
    # 70e9 parameters: six operations a token each, 16 samples of 256 tokens, on 64 ranks of 400 TFLOP/s.
    assert found["ideal_seconds"] == pytest.approx(6 * 70e9 * 16 * 256 / 64 / 400e12, rel=0.02)
    assert set(ASSUMPTIONS) < set(found["assumptions"])


def test_another_rate_changes_seconds_alone(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        simulated(recipe, capsys, *JOB, "--model", "llama3-8b", "--tflops", rate)["simulation"]["orders"]["hash order"]
        for rate in ("100", "200")
    )
    assert first["at_end"]["over_ideal"] == second["at_end"]["over_ideal"]
    assert first["at_end"]["seconds"] == pytest.approx(2 * second["at_end"]["seconds"])


def test_a_measured_cost_gives_ratios_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_indexed_project(
        tmp_path, ("model: {layers: 4, hidden: 64, ffn: 128, heads: 4}", "cost: {per_token: 7, per_pair: 2}")
    )
    found = simulated(recipe, capsys, *JOB)["simulation"]
    assert found["ideal_seconds"] is None
    assert found["orders"]["this plan"]["at_end"]["seconds"] is None
    assert "ratios and no seconds" in found["assumptions"][-1]


def test_another_batch_may_be_simulated(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = simulated(recipe, capsys, *JOB, "--samples", "64")
    assert values["capacity_tokens"] == 64 * 256


def test_a_recipe_without_balance_is_placed_by_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_indexed_project(
        tmp_path, ("balance: {method: rows, model: {layers: 4, hidden: 64, ffn: 128, heads: 4}}\n", "")
    )
    orders = simulated(recipe, capsys, *JOB, "--model", "llama3-8b")["simulation"]["orders"]
    ours, plain = (orders[name]["each_microbatch"]["over_ideal"] for name in ("this plan", "hash order"))
    assert ours < plain
    assert main(["plan", str(recipe), *JOB]) == 2
    assert "predicted times need balance.model in the recipe, or --model, one of llama3-8b" in capsys.readouterr().err


def test_people_get_a_table_and_all_assumptions(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), *JOB, "--explain", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "predicted for the model of the recipe on 64 ranks" in text
    for name, meaning in ORDERS.items():
        assert f"- {name}: {meaning}." in text
    for line in ASSUMPTIONS:
        assert f"- {line}" in text


def test_each_length_of_a_context_extension_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = "[{from_step: 0, samples: 8}, {from_step: 1000, samples: 4, length: 256}]"
    recipe = write_job(tmp_path, samples=stages)
    costs = {}
    for words in ((), ("--length", "64"), ("--length", "256"), ("--length", "256", "--samples", "16")):
        values = simulated(recipe, capsys, "--simulate", "--dp", "4", "--steps", "3", *words)
        simulation = values["simulation"]
        costs[words] = simulation["lengths"], simulation["other_lengths"], values["capacity_tokens"]
    assert costs == {
        (): ([64], [256], 8 * 64),
        ("--length", "64"): ([64], [], 8 * 64),
        ("--length", "256"): ([256], [], 4 * 256),
        ("--length", "256", "--samples", "16"): ([256], [], 16 * 256),
    }
    assert main(["plan", str(recipe), "--simulate", "--dp", "4", "--steps", "3", "--quiet"]) == 0
    assert "samples of 256 tokens are in none of these steps; --length predicts theirs" in capsys.readouterr().out


def test_encoders_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_indexed_project(tmp_path)
    recipe.write_text(recipe.read_text() + "modules: {query: {sources: [web], axis: WORLD}}\n")
    small = ("--simulate", "--dp", "2", "--tp", "2", "--steps", "2")
    found = simulated(recipe, capsys, *small)["simulation"]["modules"]["query"]
    assert 1 <= found["plan_over_ideal"] < found["hash_order_over_ideal"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--simulate", "--model", "llama3-7b"), "did you mean 'llama3-70b'|did you mean 'llama3-8b'"),
        (("--steps", "2", "--model", "llama3-8b"), "--model goes with --simulate"),
        (("--steps", "2", "--samples", "8"), "--samples goes with --simulate"),
        (("--simulate", "--length", "100"), "--length 100: samples of the recipe have"),
        (("--steps", "2", "--length", "100"), "--length goes with --simulate"),
        (("--simulate", "--samples", "8", "--out", "x"), "another run than the recipe's"),
        (("--simulate", "--dp", "48"), "divide by dp 48 x micro_batch_size 1 = 48; --samples 48 simulates one"),
        (("--simulate", "--world", "30", "--tp", "4"), "--world 30 does not divide by tp 4"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: tuple[str, ...], what: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert main(["plan", str(recipe), *words]) == 2
    assert re.search(what, capsys.readouterr().err)


def test_dimensions_of_models_divide() -> None:
    for name, model in MODELS.items():
        assert model.hidden % model.heads == 0 and model.heads % (model.kv_heads or 1) == 0, name


def test_plan_and_show_place_items_of_modules_on_the_ranks_of_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_indexed_project(tmp_path)
    recipe.write_text(recipe.read_text() + "modules: {query: {sources: [web], axis: WORLD}}\n")
    sizes = ("--dp", "2", "--tp", "2", "--cp", "2", "--pp", "2")
    values = simulated(recipe, capsys, "--steps", "1", *sizes)
    query = values["modules"]["query"]
    assert (query["items"], query["num_consumers"]) == ("document", 16)
    assert 1 <= query["balance_ratio"] < query["hash_order_ratio"]
    assert main(["plan", str(recipe), "--steps", "1", "--quiet", *sizes]) == 0
    assert f"module    query: {query['num_items']} documents on 16 consumers" in capsys.readouterr().out
    assert simulated(recipe, capsys, "--steps", "1", "--dp", "2")["modules"]["query"]["num_consumers"] == 2
