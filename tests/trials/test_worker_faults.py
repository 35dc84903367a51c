"""A small share of the trial: the same code at a small count, stopped and gone on with once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.worker_faults import run_trial

pytestmark = pytest.mark.system


def test_steps_come_once_whatever_is_done_to_the_worker(tmp_path: Path) -> None:
    out = tmp_path / "trial.json"
    assert run_trial(seed=3, count=1, out=out)["done"] >= 1
    result = run_trial(seed=3, count=3, out=out)
    assert result["wrong"] == []
    assert result["done"] >= 3
    assert max(result["longest_s"].values()) > 0, "something was waited for"
