"""A job of texts and a job of images of the trial on every run."""

from __future__ import annotations

import pytest

from tests.trials.tuned import CORPORA, try_job


@pytest.mark.parametrize("number", [CORPORA.index("any"), CORPORA.index("images")])
def test_what_is_proposed_is_what_plan_predicts_and_no_worse_on_later_steps(number: int) -> None:
    found = try_job(1, number)
    assert found["corpus"] == CORPORA[number] and found["change"] and found["predicted"] > 0 and found["later"] > 0
