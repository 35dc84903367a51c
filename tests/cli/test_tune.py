"""`torchmix tune`: what it proposes is what plan predicts once the recipe has it; it changes no order and no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.projects import make_indexed_project
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


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def planned(recipe: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return run(capsys, "plan", str(recipe), "--simulate", *JOB, *words)


def test_what_it_proposes_is_predicted_by_plan_and_the_order_stays(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = recipe.read_text(encoding="utf-8")
    found = run(capsys, "tune", str(recipe), *JOB)
    assert recipe.read_text(encoding="utf-8") == before
    assert found["today"]["method"] == "none" and found["today"]["gain"] == 0
    best = found["best"][0]
    assert best["gain"] > 0.01 and found["change"]["balance"]["method"] == best["method"]
    old = planned(recipe, capsys, "--micro-batch-size", "1")
    values = yaml.safe_load(before)
    values["balance"].update(found["change"]["balance"])
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    size = str(found["change"].get("micro_batch_size", 1))
    new = planned(recipe, capsys, "--micro-batch-size", size)
    times = [each["simulation"]["orders"]["this plan"]["at_end"]["over_ideal"] for each in (old, new)]
    assert times == pytest.approx([found["today"]["over_ideal"], best["over_ideal"]])
    assert old["order_digest"] == new["order_digest"]
    again = run(capsys, "tune", str(recipe), *JOB, "--micro-batch-size", size)
    assert again["best"][0]["over_ideal"] == pytest.approx(best["over_ideal"], abs=2e-3)


def test_a_person_reads_the_lines_to_change_and_whose_the_gain_of_packing_is(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(recipe), *JOB, "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "balance: {method:" in printed and "that gain is of packing" in printed
    assert main(["tune", str(recipe), *JOB, "--meet", "microbatch", "--explain", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "wait for each other in each microbatch" in printed and "have no communication" in printed


def test_a_recipe_that_is_best_as_it_is_is_told_so(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(recipe), "--dp", "1", "--steps", "2", "--try-micro-batch-sizes", "1", "--quiet"]) == 0
    assert "no way is faster than the recipe as it is" in capsys.readouterr().out


def test_what_cannot_be_tuned_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(recipe), "--dp", "5"]) == 2
    assert "does not divide" in capsys.readouterr().err
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["balance"]["strategy"] = "json:loads"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert main(["tune", str(recipe), *JOB]) == 2
    assert "places the samples" in capsys.readouterr().err
    del values["balance"]
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert main(["tune", str(recipe), *JOB]) == 2
    assert "--model" in capsys.readouterr().err
