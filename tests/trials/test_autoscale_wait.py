"""A turn of the trial: loaders that are scaled are waited for no longer than one is."""

from __future__ import annotations

from tests.trials.autoscale_wait import try_wait


def test_a_turn_ends_and_says_what_was_decided() -> None:
    found = try_wait(1, 8, rows=1_000)  # what must hold is asserted there
    assert [reason for _, reason, _ in found["scaled"]["decisions"]] == ["begin", "begin", "more"]
