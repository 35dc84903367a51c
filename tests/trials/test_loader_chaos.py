"""A few faults of the trial on every run."""

from __future__ import annotations

import multiprocessing.resource_tracker  # noqa: F401
import os
from pathlib import Path

import pytest

from tests.trials.loader_chaos import chaos

pytestmark = pytest.mark.system


def test_whatever_happens_to_loaders_the_tokens_are_the_same_and_nothing_is_left() -> None:
    with chaos(3) as running:
        pids = set(running.pool.pids)
        for number in range(8):
            running.one(number)
        pids |= set(running.pool.pids)
        assert running.client.stats()["total_loader_requests"] > 0
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists() and os.getpgid(pid) == os.getpgid(0)]
    assert not left
