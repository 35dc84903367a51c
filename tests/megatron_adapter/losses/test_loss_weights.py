"""One warning, with figures, where microbatches of the first step differ in tokens."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.support.microbatches import make_microbatch
from torchmix.constructor.fields import Microbatch
from torchmix.megatron_adapter.losses import FirstStepTokens


def step_of(*tokens: int, step: int = 0, has_mask: bool = True) -> list[Microbatch]:
    """Microbatches with so many tokens that count, of 8."""
    return [
        make_microbatch(
            labels_int32=torch.where(torch.arange(8) < count, 7, -100).int().view(1, -1) if has_mask else None,
            step=step,
            index=index,
            is_last_of_step=index + 1 == len(tokens),
            num_tokens_global=sum(tokens),
        )
        for index, count in enumerate(tokens)
    ]


def warnings_of(caplog: pytest.LogCaptureFixture, *microbatches: Microbatch) -> list[str]:
    first = FirstStepTokens()
    with caplog.at_level(logging.WARNING):
        for microbatch in microbatches:
            first.note(microbatch)
    return [record.getMessage() for record in caplog.records]


def test_unequal_microbatches_are_told_with_figures_once(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warnings_of(caplog, *step_of(4, 8, 6), *step_of(1, 8, 8, step=1))
    assert "the 3 microbatches of this rank in step 0 have 4 to 8 tokens that count (mean 6)" in text
    assert "emptiest weighs 1.500 times the mean, one of the fullest 0.750 times" in text
    assert "--calculate-per-token-loss" in text


def test_equal_microbatches_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, *step_of(6, 6), *step_of(1, 8, step=1)) == []


def test_a_stage_without_masks_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, *step_of(1, 8, has_mask=False)) == []
