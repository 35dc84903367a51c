"""A small share of the trial: the same code at a small count, a run of each kind, and one that is gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.worker_faults import KINDS, run_trial

pytestmark = pytest.mark.system


@pytest.mark.parametrize("kind", KINDS)
def test_steps_come_once_whatever_fails(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "trial.json"
    result = run_trial(seed=3, count=1, out=out, kinds=(kind,))
    assert result["wrong"] == []
    assert result["done"] >= 1
    assert run_trial(seed=3, count=1, out=out, kinds=(kind,)) == result, "it is done already"
    assert kind != "worker" or {"SIGKILL", "SIGSTOP"} & result["faults"].keys()
