"""A small share of the trial: the same code at a small count."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.job_faults import run_trial

pytestmark = pytest.mark.system


def test_a_job_whose_loaders_and_workers_fail_gives_the_same_tensors_and_leaves_nothing(tmp_path: Path) -> None:
    """Ten seconds and more: real ranks, workers and loaders start, and are started again."""
    result = run_trial(seed=1, count=2, out=tmp_path / "trial.json", where=["cold"], steps=12)
    assert result["wrong"] == []
    assert result["done"] == sum(result["counts"].values()) == 2
    assert result["total_loader_requests"] > 0


def test_a_job_continues_when_a_rank_or_a_command_that_serves_it_is_killed(tmp_path: Path) -> None:
    """Half a minute: the commands and the job are started again."""
    only = ["kill keeper", "kill serve"]
    result = run_trial(seed=8, count=2, out=tmp_path / "trial.json", where=["served"], steps=30, only=only)
    assert result["wrong"] == []
    assert set(result["counts"]) == set(only)
    assert result["total_loader_requests"] > 0
