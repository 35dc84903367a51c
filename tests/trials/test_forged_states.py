"""A small share of the trial: the same code at a small count, stopped and gone on with once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.judge_process import JudgeProcess, run_trial
from tests.trials.forged_states import MODULE, TIME_S

pytestmark = pytest.mark.system


def test_forged_states_are_refused_by_name_or_go_on(tmp_path: Path) -> None:
    out = tmp_path / "trial.json"
    with JudgeProcess(MODULE, 0, limit_s=TIME_S) as judge:
        assert run_trial(judge, seed=0, count=5, out=out)["done"] == 5
        result = run_trial(judge, seed=0, count=40, out=out)
    assert result["wrong"] == []
    assert sum(result["verdicts"].values()) == result["done"] == 40
    assert result["verdicts"]["refused: StateError"] >= 10
    assert sum(count for verdict, count in result["verdicts"].items() if verdict.startswith("goes on")) >= 5
