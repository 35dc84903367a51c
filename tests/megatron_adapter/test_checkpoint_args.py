"""The state of the data among Megatron's arguments: written after each step, read back, compared with its counts."""

from __future__ import annotations

import io
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.support.fake_megatron import default_args, modules_of
from torchmix.errors import StateError, StateMismatch
from torchmix.megatron_adapter.checkpoint import (
    LoadedCheckpoint,
    RunStart,
    remember,
    start_of_run,
    watch_checkpoints,
)
from torchmix.parallel.place_tree import Layout
from torchmix.recipe.structs import Batch, RampStage
from torchmix.steps.state import encode_state, start_state

BATCH = Batch(samples=(RampStage(from_step=0, samples=4), RampStage(from_step=10, samples=8)), length=64)
RECIPE = "0123456789abcdef"


def state_before(step: int, *, recipe: str = RECIPE, microbatch: int = 0) -> bytes:
    state = start_state(Layout(dp=2, micro_batch_size=1), recipe=recipe, step=step)
    digest = bytes(8) if microbatch else b""
    return encode_state(replace(state, microbatch=microbatch, plan_digest=digest))


def checkpoint_of(*steps: int) -> LoadedCheckpoint:
    """What was loaded: a checkpoint saved after these steps were consumed, one after another."""
    args = SimpleNamespace()
    for step in steps:
        remember(args, state_before(step))
    loaded = LoadedCheckpoint()
    loaded.note(args)
    return loaded


def start(loaded: LoadedCheckpoint, **changes: Any) -> RunStart:
    return start_of_run(default_args(**changes), BATCH, loaded, recipe=RECIPE)


@pytest.fixture
def checkpointing() -> ModuleType:
    return modules_of(default_args())["megatron.training.checkpointing"]


def test_the_state_is_text_that_every_format_of_megatron_loads() -> None:
    args = SimpleNamespace()
    remember(args, state_before(3))
    buffer = io.BytesIO()
    torch.save(vars(args), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == vars(args)
    assert isinstance(args.torchmix_state, str)


def test_what_megatron_loads_is_seen_and_still_checked(checkpointing: ModuleType) -> None:
    checked: list[Any] = []
    checkpointing.check_checkpoint_args = lambda args, skip_args=None: checked.append((args, skip_args))  # type: ignore[attr-defined]
    loaded = watch_checkpoints(checkpointing)
    assert watch_checkpoints(checkpointing) is loaded, "watching twice is watching once"
    assert not loaded.was_loaded
    args = SimpleNamespace()
    remember(args, state_before(5))
    checkpointing.check_checkpoint_args(args, skip_args={"num_layers"})
    assert checked == [(args, {"num_layers"})]
    assert start(loaded, consumed_train_samples=20).step == 5


def test_a_checkpoint_that_is_saved_before_there_are_data_keeps_its_state(checkpointing: ModuleType) -> None:
    """As by `--ckpt-convert-format`, which loads, saves in another format, and ends."""
    loaded = watch_checkpoints(checkpointing)
    old = SimpleNamespace()
    for step in (4, 5):
        remember(old, state_before(step))
    checkpointing.check_checkpoint_args(old)
    converted = checkpointing.get_args()
    checkpointing.check_checkpoint_args(converted)
    assert [start(loaded, consumed_train_samples=count).step for count in (20, 16)] == [5, 4]


def test_a_megatron_without_the_place_to_look_is_an_error() -> None:
    with pytest.raises(StateError, match=r"no megatron[.]training[.]checkpointing[.]check_checkpoint_args"):
        watch_checkpoints(ModuleType("checkpointing"))


@pytest.mark.parametrize(("step", "consumed"), [(1, 4), (10, 40), (12, 56)])
def test_a_checkpoint_goes_on_where_it_was_saved(step: int, consumed: int) -> None:
    found = start(checkpoint_of(step - 1, step), consumed_train_samples=consumed)
    assert found == RunStart(step=step, state=state_before(step), reason="continuing from the checkpoint")


def test_the_unfinished_step_of_a_suspected_fault_comes_again() -> None:
    # Megatron saves before it counts the step, whose microbatches have all been handed out.
    assert start(checkpoint_of(2, 3), consumed_train_samples=8).step == 2


@pytest.mark.parametrize("consumed", [0, 4, 16])
def test_weights_and_data_of_different_steps_are_refused(consumed: int) -> None:
    with pytest.raises(StateMismatch, match=rf"step 3 \(after 12 samples\) or step 2 \(after 8 .* is {consumed}\."):
        start(checkpoint_of(2, 3), consumed_train_samples=consumed)


def test_a_state_inside_a_step_is_refused() -> None:
    loaded = LoadedCheckpoint()
    args = SimpleNamespace()
    remember(args, state_before(2, microbatch=1))
    loaded.note(args)
    with pytest.raises(StateMismatch, match="do not belong together"):
        start(loaded, consumed_train_samples=8)


def test_a_checkpoint_of_another_recipe_is_refused() -> None:
    loaded = LoadedCheckpoint()
    args = SimpleNamespace()
    remember(args, state_before(2, recipe="f" * 16))
    loaded.note(args)
    with pytest.raises(StateMismatch, match=r"saved with recipe f{16}.*--data-start-fresh continues with this recipe"):
        start(loaded, consumed_train_samples=8)


def test_damaged_text_is_refused() -> None:
    loaded = LoadedCheckpoint()
    loaded.note(SimpleNamespace(torchmix_state="no base64!"))
    with pytest.raises(StateError, match="no base64 text"):
        start(loaded, consumed_train_samples=8)


def test_a_checkpoint_without_a_state_says_what_to_do() -> None:
    loaded = LoadedCheckpoint()
    loaded.note(SimpleNamespace(consumed_train_samples=40))
    with pytest.raises(StateError, match=r"of 40 samples was not trained with torchmix.*--data-start-fresh once"):
        start(loaded, consumed_train_samples=40)


def test_weights_that_have_trained_on_nothing_need_no_state() -> None:
    loaded = LoadedCheckpoint()
    loaded.note(SimpleNamespace())  # as a `release` checkpoint, which holds converted weights
    assert start(loaded).step == 0


def test_a_run_moves_to_torchmix_at_the_step_of_megatrons_count() -> None:
    loaded = LoadedCheckpoint()
    loaded.note(SimpleNamespace())
    found = start(loaded, consumed_train_samples=48, data_start_fresh=True)
    assert (found.step, found.state) == (11, None)
    with pytest.raises(StateError, match="--data-start-fresh was given, but 50 consumed samples end inside step 11"):
        start(loaded, consumed_train_samples=50, data_start_fresh=True)


@pytest.mark.parametrize(("load", "reason"), [(None, "a new run"), ("/checkpoints", "no checkpoint was loaded")])
def test_without_a_checkpoint_the_run_is_new(load: str | None, reason: str) -> None:
    assert start(LoadedCheckpoint(), load=load) == RunStart(step=0, state=None, reason=reason)


def test_a_count_without_a_checkpoint_needs_a_word() -> None:
    with pytest.raises(StateError, match="begins after 8 samples, but no checkpoint"):
        start(LoadedCheckpoint(), consumed_train_samples=8)
    found = start(LoadedCheckpoint(), consumed_train_samples=8, data_start_fresh=True)
    assert (found.step, found.state) == (2, None)


def test_an_overridden_iteration_moves_the_data_too() -> None:
    found = start(checkpoint_of(2, 3), consumed_train_samples=20, override_ckpt_iteration=5)
    assert (found.step, found.state) == (5, None)
