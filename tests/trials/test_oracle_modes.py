"""A small share of the trial: a layout over hosts; layouts in other modes stand in tests/pairs."""

from __future__ import annotations

import pytest

from tests.trials.oracle_modes import one_run

pytestmark = pytest.mark.system


def test_ranks_on_two_hosts_get_what_the_oracle_says() -> None:
    modes = one_run(2, 1, ("node", "hosts"))["modes"]
    if "hosts" not in modes:
        pytest.skip("hosts on one machine cannot be made here")
    assert set(modes) == {"node", "hosts"}
