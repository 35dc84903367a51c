"""Functions of the user whose answer depends on their process: `plan` and `check` find them; others pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import wrong_strategies
from tests.support.projects import make_indexed_project
from torchmix.cli.main import main

METHOD = "balance: {method: rows, "


def recipe_of(folder: Path, name: str, key: str = "method") -> Path:
    return make_indexed_project(folder, (METHOD, f"balance: {{{key}: 'tests.support.{name}', "))


@pytest.mark.slow
@pytest.mark.parametrize(("key", "name"), [("strategy", "tires"), ("method", "hashes")])
def test_an_answer_that_follows_from_the_process_is_a_finding(
    key: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(recipe_of(tmp_path, f"wrong_strategies:{name}", key))
    words = [recipe, "--steps", "4", "--dp", "4", "--json"]
    for verb in ("plan", "check"):
        capsys.readouterr()
        wrong_strategies._kept.clear()
        assert main([verb, *words]) == 1
        printed = capsys.readouterr().out
        told = [
            one for one in json.loads(printed[printed.index("{\n") :])["findings"] if one["where"] == f"balance.{key}"
        ]
        assert len(told) == 1
        message = told[0]["message"]
        assert message.startswith(f"step 3 of balance.{key} tests.support.wrong_strategies:{name} has plan digest ")
        assert "in a second interpreter, so ranks and resumed jobs would diverge" in message
    wrong_strategies._kept.clear()
    assert main(["plan", *words[:-1], "--quiet"]) == 1
    assert f"finding: balance.{key}: step 3 of" in capsys.readouterr().out


def test_a_function_of_its_arguments_alone_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(tmp_path, "strategies:in_turn")
    for verb in ("plan", "check"):
        capsys.readouterr()
        assert main([verb, str(recipe), "--steps", "300" if verb == "check" else "3", "--dp", "4", "--json"]) == 0
        assert not [one for one in json.loads(capsys.readouterr().out)["findings"] if one.get("level") != "note"]


def test_a_method_that_breaks_a_rule_is_a_finding_of_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(tmp_path, "wrong_strategies:in_floats")
    assert main(["check", str(recipe), "--steps", "3", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["findings"]
    assert [one["where"] for one in told if "in_floats, step 0: it gives float64" in one["message"]] == [
        "balance.method"
    ]
    assert main(["plan", str(recipe), "--one-pass", "--json"]) == 3
    assert "wrong_strategies:in_floats, step 0: it gives float64" in capsys.readouterr().err
