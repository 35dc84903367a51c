"""One case of the trial on every run: trainers without data on two hosts, and loaders on two others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.fleet_hosts import CASES, Hosts

pytestmark = pytest.mark.system


def test_trainers_on_hosts_without_data_get_the_tensors_of_the_oracle(tmp_path: Path) -> None:
    assert len(CASES) == 15
    assert Hosts(tmp_path, 3).one("remote of 2", "dp2")["loaders"] == 2
