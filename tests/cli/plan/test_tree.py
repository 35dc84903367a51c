"""`torchmix plan --tree`: who reads, and whom they serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.projects import make_project
from torchmix.cli.main import main


def test_the_tree_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(make_project(tmp_path))  # no catalog is needed
    assert main(["plan", recipe, "--tree", "--dp", "2", "--tp", "2", "--pp", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "8 ranks: dp 2 x cp 1 x pp 2 x tp 2; 2 of them read, each for 4 ranks",
        "dp 0",
        "  cp 0",
        "    pp 0 (first)  ranks 0* 1  read by 0",
        "    pp 1 (last)  ranks 4 5  read by 0",
        "dp 1",
        "  cp 0",
        "    pp 0 (first)  ranks 2* 3  read by 2",
        "    pp 1 (last)  ranks 6 7  read by 2",
    ]
    arguments = ["--dp", "2", "--tp", "2", "--pp", "2", "--leaders", "node", "--ranks-per-node", "4", "--json"]
    assert main(["plan", recipe, "--tree", *arguments]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["leaders"] == [0, 4, 2, 6]
    assert values["leader_of_rank"] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert values["stage_of_rank"] == ["first"] * 4 + ["last"] * 4


def test_many_replicas_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(make_project(tmp_path)), "--tree", "--dp", "8", "--cp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "16 ranks: dp 8 x cp 2 x pp 1 x tp 1; 8 of them read, each for 2 ranks"
    assert lines[-1] == "... and 4 more replicas"
    assert len(lines) == 2 + 4 * 5


def test_sizes_that_do_not_fit_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(make_project(tmp_path))
    assert main(["plan", recipe, "--tree", "--dp", "7"]) == 2
    assert "does not divide by dp 7" in capsys.readouterr().err
    assert main(["plan", recipe, "--tree", "--dp", "2", "--leaders", "node", "--ranks-per-node", "3"]) == 2
    assert "3 ranks a node, in a job of 2 ranks" in capsys.readouterr().err
