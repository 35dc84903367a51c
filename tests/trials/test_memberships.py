"""A few of the trial's runs on every run: processes die, leave and come."""

from __future__ import annotations

import pytest

from tests.trials.memberships import try_one

pytestmark = pytest.mark.system


def test_what_is_learned_is_what_a_run_learns_that_nothing_befell() -> None:
    found = try_one(1, 0)
    assert found["killed"] and found["come"] and found["groups"] > 2 and found["losses_seen"]


def test_replicas_of_two_ranks_learn_it_too_and_who_loses_one_is_lost_as_a_whole() -> None:
    found = try_one(1, 41)
    assert (found["replica"], found["killed"]) == (2, 1)
    assert found["broken"] and found["groups"] > 1 and found["losses_seen"]
