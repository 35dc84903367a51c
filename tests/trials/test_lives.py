"""A few of the trial's lives on every run."""

from __future__ import annotations

import pytest

from tests.trials.lives import try_life, try_policy


@pytest.mark.parametrize("number", [2, 8, 14])
def test_nothing_is_lost_or_repeated_over_a_life(number: int) -> None:
    found = try_life(1, number)
    assert found["edits"] and found["documents"] > 0 and found["shares"] > 0 and found["steps"] > 20


def test_a_policy_is_killed_between_a_decision_and_a_checkpoint() -> None:
    assert try_policy(1, 1)["kills"] > 2
