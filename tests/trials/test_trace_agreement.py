"""A few of the trial's recipes on every run."""

from __future__ import annotations

import pytest

from tests.trials.trace_agreement import try_recipe


@pytest.mark.parametrize("number", range(3))
def test_trace_and_plan_agree_on_every_document(number: int) -> None:
    found = try_recipe(7, number, steps=30)
    assert "refused" in found or found["pieces"] > 0
