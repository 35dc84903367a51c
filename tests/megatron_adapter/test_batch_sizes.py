"""Sizes in Megatron's flags against the recipe's, with the calculator of core 0.16 and a stand-in for the newer one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_megatron import default_args, file_of_core
from torchmix.errors import RecipeError, StateMismatch
from torchmix.megatron_adapter.batch_sizes import (
    check_batch_sizes,
    check_training,
    validation_micro_batch_size,
    validation_samples,
)
from torchmix.recipe.structs import Batch, RampStage


class StepCalculator:
    """Core 0.20's calculator of a schedule, by its documentation: the last threshold that was reached counts."""

    def __init__(self, *, schedule: str, seq_length: int, **_: Any) -> None:
        pairs = (entry.split(":") for entry in schedule.split())
        self.schedule = [(int(threshold) // seq_length, int(size)) for threshold, size in pairs]

    def update(self, consumed: int, consistency_check: bool, verbose: bool) -> None:
        self._samples = next(size for threshold, size in reversed(self.schedule) if threshold <= consumed)

    def get_current_global_batch_size(self) -> int:
        return self._samples


@pytest.fixture(autouse=True, params=["0.16", "0.20"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Megatron's calculators: those of core 0.16 know a ramp, those of 0.20 a schedule."""
    calculators = file_of_core("num_microbatches_calculator")
    if request.param == "0.20":
        calculators = ModuleType("num_microbatches_calculator")
        calculators.StepBatchsizeNumMicroBatchesCalculator = StepCalculator  # type: ignore[attr-defined]
    core = ModuleType("megatron.core")
    core.num_microbatches_calculator = calculators  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    return str(request.param)


def ramp(*stages: tuple[int, int], length: int = 64) -> Batch:
    return Batch(samples=tuple(RampStage(from_step=start, samples=samples) for start, samples in stages), length=length)


def ramped_args(version: str) -> SimpleNamespace:
    """16 samples for 3 steps, 32 for 2, then 48: in core 0.16 by a ramp from 16 by 16 over 96 samples."""
    if version == "0.16":
        return default_args(global_batch_size=48, rampup_batch_size=["16", "16", "96"])
    return default_args(global_batch_size=1, step_batch_size_schedule="0:16 3072:32 7168:48")


SAME = ((0, 16), (3, 32), (5, 48))


def test_equal_sizes_pass() -> None:
    check_batch_sizes(default_args(global_batch_size=8, seq_length=64), Batch(samples=8, length=64))
    check_batch_sizes(default_args(global_batch_size=8, seq_length=64), ramp((0, 8), (5, 8)))


def test_samples_may_become_longer_and_megatron_has_one_of_their_lengths(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    stages = RampStage(from_step=0, samples=8), RampStage(from_step=5, samples=8, length=256)
    batch = Batch(samples=stages, length=64)
    for length in (64, 256):
        check_batch_sizes(default_args(global_batch_size=8, seq_length=length), batch)
    with pytest.raises(RecipeError, match="--seq-length is 128, the recipe's samples have 64 or 256 tokens"):
        check_batch_sizes(default_args(global_batch_size=8, seq_length=128), batch)
    calculator = ModuleType("num_microbatches_calculator")
    calculator.get_num_microbatches = lambda: 4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.num_microbatches_calculator", calculator)
    sizes = {"global_batch_size": 8, "micro_batch_size": 1}
    for step, length in ((4, 64), (5, 256)):
        check_training(
            default_args(**sizes, seq_length=length, consumed_train_samples=8 * step), batch, dp=2, step=step
        )
    words = "step 5 has samples of 256 tokens .*--train-samples 40 ends a run there.* --seq-length 256"
    with pytest.raises(StateMismatch, match=words):
        check_training(default_args(**sizes, seq_length=64, consumed_train_samples=40), batch, dp=2, step=5)
    with pytest.raises(StateMismatch, match="step 4 has samples of 64 tokens"):
        check_training(default_args(**sizes, seq_length=256, consumed_train_samples=32), batch, dp=2, step=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_length": 128}, "--seq-length is 128, the recipe's batch.length is 64"),
        ({"global_batch_size": 16}, "--global-batch-size is 16, the recipe's batch.samples is 8; .*size 8"),
        ({"decrease_batch_size_if_needed": True}, "--decrease-batch-size-if-needed trains on fewer samples"),
    ],
)
def test_different_sizes_are_refused_with_both_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_batch_sizes(default_args(**changes), Batch(samples=8, length=64))


def test_a_ramp_in_the_recipe_alone_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"batch.samples is \[\{from_step: 0, samples: 4\}.*a ramp: --rampup"):
        check_batch_sizes(default_args(global_batch_size=8), ramp((0, 4), (10, 8)))


def test_a_ramp_that_agrees_at_every_step_passes(version: str) -> None:
    check_batch_sizes(ramped_args(version), ramp(*SAME))
    # The same sizes, spelt in more stages than needed.
    check_batch_sizes(ramped_args(version), ramp((0, 16), (1, 16), (3, 32), (5, 48), (1000, 48)))


@pytest.mark.parametrize(
    ("stages", "step", "before", "planned"),
    [
        (((0, 16), (3, 32), (6, 48)), 5, 112, 32),
        (((0, 16), (2, 32), (5, 48)), 2, 32, 32),
        (((0, 16), (3, 32), (5, 48), (900, 64)), 900, 112 + 895 * 48, 64),
        (((0, 48),), 0, 0, 48),
    ],
)
def test_the_first_step_that_differs_is_named_with_what_megatron_means(
    version: str, stages: tuple[tuple[int, int], ...], step: int, before: int, planned: int
) -> None:
    with pytest.raises(RecipeError) as raised:
        check_batch_sizes(ramped_args(version), ramp(*stages))
    text = str(raised.value)
    megatron = {0: 16, 2: 16}.get(step, 48)
    assert f"step {step} (after {before} samples) has {megatron} samples by Megatron's flags" in text
    assert f"and {planned} by the recipe" in text
    assert "samples: [{from_step: 0, samples: 16}, {from_step: 3, samples: 32}, {from_step: 5, samples: 48}]" in text


@pytest.mark.parametrize("version", ["0.20"], indirect=True)  # a ramp-up, of 0.16, only rises
def test_a_batch_that_falls_is_refused_before_megatron_ends_the_run() -> None:
    args = default_args(global_batch_size=1, step_batch_size_schedule="0:16 3072:8")
    with pytest.raises(RecipeError, match="falls from 16 to 8 samples at step 3"):
        check_batch_sizes(args, ramp((0, 16), (3, 8)))


def test_a_ramp_that_megatron_ignores_is_none(version: str) -> None:
    if version == "0.20":  # it takes --rampup-batch-size, and only warns
        args = default_args(global_batch_size=8, rampup_batch_size=["2", "2", "100"])
        check_batch_sizes(args, Batch(samples=8, length=64))


def test_evaluations_have_the_sizes_of_megatron() -> None:
    older = default_args(global_batch_size=8, micro_batch_size=2)
    assert (validation_samples(older), validation_micro_batch_size(older)) == (8, 2)
    newer = default_args(global_batch_size=8, eval_global_batch_size=4, eval_micro_batch_size=1)
    assert (validation_samples(newer), validation_micro_batch_size(newer)) == (4, 1)
