"""A small share of the trial: all layouts in two modes, and one of them over hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trials.oracle_modes import LAYOUTS, one_run, run_trial

pytestmark = pytest.mark.system


def test_where_steps_are_read_changes_no_tensor(tmp_path: Path) -> None:
    out = tmp_path / "trial.json"
    assert run_trial(seed=2, count=2, out=out, modes=("in_process", "node"))["runs"] == 2
    result = run_trial(seed=2, count=len(LAYOUTS), out=out, modes=("in_process", "node"))
    assert result["wrong"] == []
    assert len(result["legs"]) == 2 * len(LAYOUTS), "it goes on where it was"


def test_ranks_on_two_hosts_get_what_the_oracle_says() -> None:
    modes = one_run(2, 1, ("node", "hosts"))["modes"]
    if "hosts" not in modes:
        pytest.skip("hosts on one machine cannot be made here")
    assert set(modes) == {"node", "hosts"}
