"""`torchmix tune`: what it proposes is what plan predicts once the recipe has it; it changes no order and no file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command_line import values_of
from tests.support.projects import make_indexed_project
from torchmix.cli import tune
from torchmix.cli.main import main

JOB = ("--dp", "4", "--steps", "3")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A project whose recipe leaves samples in hash order."""
    path = make_indexed_project(tmp_path)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values["balance"] = {"method": "none", "model": values["balance"]["model"]}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def planned(recipe: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return values_of(capsys, "plan", str(recipe), "--simulate", *JOB, *words)


def test_what_it_proposes_is_predicted_by_plan_and_the_order_stays(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = recipe.read_text(encoding="utf-8")
    found = values_of(capsys, "tune", str(recipe), *JOB)
    assert recipe.read_text(encoding="utf-8") == before
    assert found["today"]["change"] == {} and found["today"]["gain"] == 0
    best = found["best"][0]
    assert best["gain"] > 0.01 and found["change"] == best["change"]
    old = planned(recipe, capsys, "--micro-batch-size", "1")
    values = yaml.safe_load(before)
    values["balance"].update(found["change"]["balance"])
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    size = str(found["change"].get("job", {}).get("micro_batch_size", 1))
    new = planned(recipe, capsys, "--micro-batch-size", size)
    times = [each["simulation"]["orders"]["this plan"]["at_end"]["over_ideal"] for each in (old, new)]
    assert times == pytest.approx([found["today"]["over_ideal"], best["over_ideal"]])
    assert old["order_digest"] == new["order_digest"]
    again = values_of(capsys, "tune", str(recipe), *JOB, "--micro-batch-size", size)
    assert again["best"][0]["over_ideal"] == pytest.approx(best["over_ideal"], abs=2e-3)


def test_a_person_reads_the_lines_to_change_and_whose_the_gain_of_packing_is(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(recipe), *JOB, "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "balance: {method:" in printed
    found = re.search(r"^([\d.]+) x .*\n([\d.]+) x .*: ([\d.]+) x of it is the gain of packing", printed, re.MULTILINE)
    assert found is not None
    hashed, arrived, packing = map(float, found.groups())
    assert hashed == 1 and arrived == packing > 1, "today's recipe has hash order"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("method: none", "method: rows"), encoding="utf-8")
    assert main(["tune", str(recipe), *JOB, "--meet", "microbatch", "--quiet"]) == 0
    found = re.search(r"^([\d.]+) x .*\n([\d.]+) x .*: ([\d.]+) x of it", capsys.readouterr().out, re.MULTILINE)
    assert found is not None
    hashed, arrived, packing = map(float, found.groups())
    assert hashed > 1 and arrived / hashed == pytest.approx(packing, abs=0.02)
    assert main(["tune", str(recipe), *JOB, "--meet", "microbatch", "--explain", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "wait for each other in each microbatch" in printed and "Traffic has no time" in printed


def test_a_recipe_that_is_best_as_it_is_is_told_so(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(recipe), "--dp", "1", "--steps", "2", "--try-micro-batch-sizes", "1", "--quiet"]) == 0
    assert "no way is faster than the recipe as it is" in capsys.readouterr().out


def test_a_gain_that_predictions_may_miss_is_said_to_be_one(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for unsure in (0.0, 10.0):
        monkeypatch.setattr(tune, "UNSURE", unsure)
        assert main(["tune", str(recipe), *JOB, "--quiet"]) == 0
        printed = capsys.readouterr().out
        assert "% faster than today:" in printed and ("within what predictions miss" in printed) == bool(unsure)


def test_what_cannot_be_tuned_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--rank-memory", "2MiB"), ("--ranks-per-node", "5")):
        assert main(["tune", str(recipe), *JOB, *words]) == 2
        assert f"{words[0]} goes with --try-layouts" in capsys.readouterr().err
    assert main(["tune", str(recipe), "--dp", "5"]) == 2
    assert "does not divide" in capsys.readouterr().err
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["balance"]["model"]["experts_per_token"] = 2
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert main(["tune", str(recipe), *JOB, "--try-layouts"]) == 2
    assert "of a dense model" in capsys.readouterr().err
    del values["balance"]
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert main(["tune", str(recipe), *JOB]) == 2
    assert "--model" in capsys.readouterr().err


def test_runs_of_ranks_are_tuned_and_plan_predicts_the_same_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ("--world", "16", "--cp", "4", "--steps", "3")
    recipe = make_indexed_project(
        tmp_path,
        ("balance: {method: rows, ", "packing: {method: whole}\nbalance: {context: {rank_tokens: 96, sizes: [4]}, "),
    )
    before = recipe.read_text(encoding="utf-8")
    found = values_of(capsys, "tune", str(recipe), *job)
    assert recipe.read_text(encoding="utf-8") == before
    today, best = found["today"], found["best"][0]
    assert (today["change"], today["gain"]) == ({}, 0)
    assert today["microbatch_tokens"] <= 96 and found["baselines"]["hash_order"] > 1
    assert best["gain"] > 0 and found["change"] == best["change"]
    for one in found["best"]:
        context = one["change"].get("balance", {}).get("context", {})
        assert one["microbatch_tokens"] <= context.get("rank_tokens", 96)
        assert one["traffic_bytes"] > 0
    seconds = []
    for change in ({}, found["change"]["balance"]["context"]):
        values = yaml.safe_load(before)
        values["balance"]["context"] |= change
        recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
        plan = values_of(capsys, "plan", str(recipe), "--simulate", *job)
        seconds.append((plan["simulation"]["orders"]["this plan"]["each_microbatch"]["seconds"], plan["order_digest"]))
    assert [time for time, _ in seconds] == pytest.approx([today["step_seconds"], best["step_seconds"]])
    assert seconds[0][1] == seconds[1][1], "the order stays"


def test_all_sizes_are_tried_and_what_they_cost_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_indexed_project(
        tmp_path, ("balance: {method: rows, ", "packing: {method: whole}\nbalance: {context: {rank_tokens: 96}, ")
    )
    assert main(["tune", str(recipe), "--world", "16", "--cp", "4", "--steps", "2", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "traffic" in printed and "memory" in printed and "that gain is of planning" in printed
    assert re.search(r"^(rank_tokens 192, )?sizes \[\d+\] ", printed, re.MULTILINE), "each size alone"
    words = ["--try-micro-batch-sizes", "2"]
    assert main(["tune", str(recipe), "--world", "16", "--cp", "4", *words]) == 2
    assert "a microbatch is a bin" in capsys.readouterr().err
    assert main(["tune", str(recipe), "--world", "16", "--cp", "4", "--try-layouts"]) == 2
    assert "sizes of its own" in capsys.readouterr().err


def test_a_strategy_is_tried_beside_the_keys_and_layouts_have_their_traffic(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["balance"]["strategy"] = "tests.support.strategies:llm_balance"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    found = values_of(capsys, "tune", str(recipe), *JOB, "--try-layouts")
    assert found["best"][0]["gain"] > 0 and found["change"]["balance"]["strategy"] is None
    assert found["layouts"][0]["gain"] >= found["best"][0]["gain"] - 1e-3
    traffic = [one["traffic_bytes"] for one in found["layouts"]]
    assert len(traffic) > 1 and traffic == sorted(traffic, reverse=True)
    assert all(one["memory_bytes"] <= found["today"]["memory_bytes"] for one in found["layouts"])
    assert main(["tune", str(recipe), *JOB, "--try-layouts", "--rank-memory", "2MiB", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "none is better in time and traffic at once" in printed and "strategy: null" in printed
    assert "dp 1, tp 4, cp 1, pp 1, micro_batch_size" in printed, "its weights alone fit"
