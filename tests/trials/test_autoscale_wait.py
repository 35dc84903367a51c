"""A turn of the trial without sleep: its runs end, with one order; how long they wait is not judged."""

from __future__ import annotations

import pytest

from tests.trials.autoscale_wait import try_wait


@pytest.mark.system
def test_all_runs_get_the_same_order() -> None:
    found = try_wait(9, 0, steps=45, samples=64, rows=4_000, most=2, compute_s=0.0, sleep_s=0.0)
    assert found["decisions"][0] == [0, "begin", 2]
