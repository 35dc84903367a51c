"""A small share of the trial: the same code at a small count, stopped and gone on with once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.forged_states import run_trial

pytestmark = pytest.mark.system


def test_forged_states_are_refused_by_name_or_go_on(tmp_path: Path) -> None:
    out = tmp_path / "trial.json"
    assert run_trial(seed=0, count=20, out=out)["done"] == 20
    result = run_trial(seed=0, count=60, out=out)
    assert result["wrong"] == []
    assert sum(result["verdicts"].values()) == result["done"] == 60
    assert result["verdicts"]["refused: StateError"] >= 10
    assert sum(count for verdict, count in result["verdicts"].items() if verdict.startswith("goes on")) >= 5
