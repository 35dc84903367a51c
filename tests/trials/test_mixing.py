"""A few of the trial's recipes on every run."""

from __future__ import annotations

from tests.trials.mixing import try_recipe


def test_random_mixtures_lose_and_repeat_nothing() -> None:
    found = [try_recipe(3, number, steps=25) for number in range(16)]
    assert all(sum(one[what] for one in found) > 3 for what in ("epochs", "resumed", "gone", "flats", "views", "cells"))
    assert any(one["lengths"] > 1 for one in found) and any(one["at_epoch"] for one in found)


def test_ramps_longer_samples_and_run_outs_hold_together() -> None:
    found = [try_recipe(3, number, everything=True) for number in range(2)]
    together = ("on_ramp", "borders_inside", "gone", "epochs")
    assert any(all(one[what] for what in together) and one["lengths"] > 2 and one["batches"] > 2 for one in found), (
        found
    )
