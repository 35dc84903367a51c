"""A few of the trial's runs on every run: processes die, leave and come."""

from __future__ import annotations

import pytest

from tests.trials.memberships import try_one

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("seed", "number"), [(1, 0), (1, 1)])
def test_what_is_learned_is_what_a_run_learns_that_nothing_befell(seed: int, number: int) -> None:
    found = try_one(seed, number)
    assert found["killed"] and found["come"] and found["groups"] > 2 and found["losses_seen"]
