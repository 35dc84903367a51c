"""A small share of the trial: the same code at a small count, stopped and gone on with once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.judge_process import JudgeProcess, run_trial
from tests.trials.mutations import MODULE, TIME_S

pytestmark = pytest.mark.system


def test_11_mutated_files_give_no_wrong_row_and_no_error_but_those_of_torchmix(tmp_path: Path) -> None:
    out = tmp_path / "trial.json"
    with JudgeProcess(MODULE, 7, limit_s=TIME_S) as judge:
        assert run_trial(judge, seed=7, count=5, out=out)["done"] == 5
        result = run_trial(judge, seed=7, count=60, out=out)
    assert result["wrong"] == []
    assert sum(result["verdicts"].values()) == result["done"] == 60
    for when in ("before: read", "before: refused", "after: read", "after: refused"):
        assert any(verdict.startswith(when) for verdict in result["verdicts"]), when
