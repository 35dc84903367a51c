"""A few of the trial's jobs on every run."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.trials.context_delivery import try_job

JOBS = (0, 1, 2)


def test_tensors_of_random_runs_are_those_of_the_oracle(capsys: pytest.CaptureFixture[str]) -> None:
    found: Counter[str] = Counter()
    for number in JOBS:
        one = try_job(1, number)
        found.update(one["bins_by_ranks"])
    assert len(found) > 2, "runs of several sizes"
