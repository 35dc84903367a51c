"""The provider in a job of one rank: iterators, counts, state, policies, skipped steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import strategies
from tests.support.fake_megatron import Lines, installed, script_of
from tests.support.provider_jobs import SAMPLES, Run, args_for, job_of_one_rank, write_recipes
from torchmix import megatron_adapter as tmx
from torchmix.errors import HistoryMissing, RecipeError, StateError, StateMismatch
from torchmix.megatron_adapter.batch import losses_of_part
from torchmix.megatron_adapter.open_loaders import open_loaders
from torchmix.mixture.policy_log import StepRecord, records_of_branch
from torchmix.recipe.load import load_recipe
from torchmix.steps.decisions import last_branch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipes(tmp_path_factory.mktemp("job"))


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with job_of_one_rank():
        yield


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_steps_come_in_order_and_leave_their_state(folder: Path, num_chunks: int) -> None:
    args, lines = args_for(folder / "recipe.yaml"), Lines()
    with installed(args, core=True, lines=lines):
        run = Run(args, num_chunks)
        assert lines == [" > torchmix: the data begin at step 0: a new run"]
        states = [args.torchmix_state]
        for step in range(3):
            assert run.step() == [(step, index) for index in range(SAMPLES)]
            assert args.torchmix_state_before == states[-1]
            states.append(args.torchmix_state)
        assert len(set(states)) == 4
        with pytest.raises(TypeError):
            len(run.train[0])  # type: ignore[arg-type]


@pytest.fixture
def dynamic(folder: Path, tmp_path: Path) -> Path:
    """A recipe with a policy."""
    log = f"dynamic: {{policy: odm, every: 2 steps, lag: 1 step, decisions: {tmp_path}/log}}"
    path = folder / "dynamic.yaml"
    path.write_text(f"{(folder / 'recipe.yaml').read_text()}{log}\n")
    return path


def train_with_losses(run: Run, script: dict[str, Any], *, loss: float = 1.0) -> None:
    """A step whose tokens all have one loss."""
    for iterator in run.train:
        for _ in range(SAMPLES):
            fields = dict(zip(script["BATCH_KEYS"], script["get_batch"](iterator), strict=True))
            script["loss_func"](fields["loss_mask"], loss * fields["loss_mask"])
    run.args.consumed_train_samples += SAMPLES


def log_of(folder: Path) -> list[StepRecord]:
    """The records of the one branch of a log that no other goes on from."""
    return [record for record, _ in records_of_branch(folder, last_branch(folder))]


def test_a_policy_needs_a_script_whose_losses_are_seen(dynamic: Path) -> None:
    with installed(args_for(dynamic), core=True), pytest.raises(RecipeError, match="no `loss_func` of its own"):
        Run(args_for(dynamic))


def test_a_function_of_the_step_needs_no_losses(dynamic: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(dynamic)
    monkeypatch.setattr(strategies, "of_no_step", lambda step: dict.fromkeys(recipe.sources, 1.0 + step))
    dynamic.write_text(dynamic.read_text().replace("odm", '"tests.support.strategies:of_no_step"'))
    args = args_for(dynamic)
    with installed(args, core=True):
        run = Run(args)
        for step in range(4):
            assert run.step() == [(step, index) for index in range(SAMPLES)]
    records = log_of(tmp_path / "log")
    assert len(records) > 60 and [record.shares is None for record in records[:4]] == [True, False, True, False]


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_policy_is_told_each_step_and_goes_on_with_the_checkpoint(
    dynamic: Path, tmp_path: Path, is_logged: bool
) -> None:
    args = args_for(dynamic, iterations_to_skip=[2], data_source_loss=is_logged, log_interval=1000)
    script = script_of("0.20", lambda mask, output: (output * mask).sum())
    with installed(args, core=True, machine=Machine()) as modules:
        script["get_batch"] = tmx.get_batch(script)
        run = Run(args)
        train_with_losses(run, script)
        modules["megatron.training.training"].dummy_train_step(run.train)
        args.consumed_train_samples += SAMPLES
        train_with_losses(run, script, loss=2.0)
        saved = SimpleNamespace(**vars(args))
        train_with_losses(run, script)
        tmx.close()
    first = log_of(tmp_path / "log")
    assert [bool(record.losses) for record in first] == [True, False, True, True]
    for loss_sum, tokens in first[2].losses.values():
        assert loss_sum == 2.0 * tokens > 0
    assert first[3].shares is not None
    resumed = args_for(dynamic, load="/checkpoints", consumed_train_samples=3 * SAMPLES)
    script = script_of("0.20", lambda mask, output: (output * mask).sum())
    with installed(resumed, core=True) as modules:
        script["get_batch"] = tmx.get_batch(script)
        modules["megatron.training.checkpointing"].check_checkpoint_args(saved)
        run = Run(resumed)
        for _ in range(3):
            train_with_losses(run, script)
    again = log_of(tmp_path / "log")
    assert again[:4] == first and len(again) == 6


def test_a_checkpoint_goes_on_with_the_next_step(folder: Path) -> None:
    args = args_for(folder / "recipe.yaml")
    with installed(args, core=True):
        run = Run(args)
        run.step(), run.step()
        saved = SimpleNamespace(**vars(args))
        run.step()
        expected = run.tokens
        tmx.close()
    resumed = args_for(folder / "recipe.yaml", load="/checkpoints", consumed_train_samples=2 * SAMPLES)
    with installed(resumed, core=True) as modules:
        tmx.get_batch(script_of("0.16"))  # from here on, what Megatron loads is seen
        modules["megatron.training.checkpointing"].check_checkpoint_args(saved)
        run = Run(resumed)
        assert resumed.torchmix_state == saved.torchmix_state
        assert run.step()[0] == (2, 0)
        assert all(one.equal(other) for one, other in zip(run.tokens, expected, strict=True))


def test_a_count_of_samples_alone_is_a_place_in_the_edited_run(folder: Path) -> None:
    edited = folder / "edited.yaml"
    edited.write_text((folder / "recipe.yaml").read_text().replace("web: 60%, prose: 38%", "web: 30%, prose: 68%"))
    args = args_for(folder / "recipe.yaml")
    with installed(args, core=True):
        run = Run(args)
        run.step(), run.step()
        saved = SimpleNamespace(**vars(args))
        tmx.close()
    accepted = {"load": "/checkpoints", "consumed_train_samples": 2 * SAMPLES}
    args = args_for(edited, **accepted)
    with installed(args, core=True) as modules:
        tmx.get_batch(script_of("0.16"))
        modules["megatron.training.checkpointing"].check_checkpoint_args(saved)
        with pytest.raises(StateMismatch, match="with this edit, give --data-accept-edit ") as refused:
            Run(args)
    word = str(refused.value).split("give --data-accept-edit ")[1][:16]
    args = args_for(edited, **accepted, data_accept_edit=word)
    with installed(args, core=True) as modules:
        tmx.get_batch(script_of("0.16"))
        modules["megatron.training.checkpointing"].check_checkpoint_args(saved)
        run = Run(args)
        assert run.step()[0] == (2, 0)
        run.step()
        expected = run.tokens
        tmx.close()
    args = args_for(edited, data_start_fresh=True, consumed_train_samples=3 * SAMPLES)
    with installed(args, core=True):
        run = Run(args)
        assert run.step()[0] == (3, 0)
        assert all(one.equal(other) for one, other in zip(run.tokens, expected, strict=True))
        tmx.close()
    args = args_for(edited, data_start_fresh=True, consumed_train_samples=SAMPLES)
    with installed(args, core=True), pytest.raises(HistoryMissing, match="has had this recipe since step 2"):
        Run(args)


def test_a_checkpoint_without_a_state_is_refused_or_begins_at_the_count(folder: Path) -> None:
    args = args_for(folder / "recipe.yaml", load="/checkpoints", consumed_train_samples=2 * SAMPLES)
    with installed(args, core=True) as modules:
        tmx.get_batch(script_of("0.16"))
        modules["megatron.training.checkpointing"].check_checkpoint_args(SimpleNamespace())
        with pytest.raises(StateError, match="--data-start-fresh once"):
            tmx.provider()
        args.data_start_fresh = True
        assert Run(args).step()[0] == (2, 0)


def test_counts_that_part_are_an_error_at_the_next_step(folder: Path) -> None:
    args = args_for(folder / "recipe.yaml")
    with installed(args, core=True):
        run = Run(args)
        run.step()
        args.consumed_train_samples += SAMPLES
        with pytest.raises(StateMismatch, match="Megatron has consumed 16 samples, the data are at step 1, after 8"):
            run.step()


def test_another_number_of_microbatches_is_an_error(folder: Path) -> None:
    args = args_for(folder / "recipe.yaml")
    with installed(args, core=True) as modules:
        run = Run(args)
        run.step()
        modules["megatron.core.num_microbatches_calculator"].get_num_microbatches = lambda: 7  # type: ignore[attr-defined]
        with pytest.raises(StateMismatch, match="step 1 has 8 microbatches by the recipe, 7 by Megatron"):
            run.step()


def test_sizes_and_flags_are_checked_before_anything_is_opened(folder: Path) -> None:
    args = args_for(folder / "recipe.yaml", global_batch_size=16)
    with installed(args, core=True), pytest.raises(RecipeError, match="--global-batch-size is 16"):
        tmx.provider()
    args = args_for(folder / "recipe.yaml", eval_iters=3)
    with installed(args, core=True), pytest.raises(RecipeError, match="--eval-iters 3: the recipe has no validation"):
        tmx.provider()


class Machine:
    """Megatron's rerun state machine in a run without faults: a step is run once."""

    def __init__(self) -> None:
        self.num_asked = 0

    def should_run_forward_backward(self, data_iterator: Any) -> bool:
        self.num_asked += 1
        return self.num_asked % 2 == 1


def test_skipped_iterations_are_skipped_by_all_chunks(folder: Path) -> None:
    args, machine = args_for(folder / "recipe.yaml", iterations_to_skip=[1, 2]), Machine()
    with installed(args, core=True, machine=machine) as modules:
        run = Run(args, num_chunks=2)
        run.step()
        for _ in range(2):
            modules["megatron.training.training"].dummy_train_step(run.train)
            args.consumed_train_samples += SAMPLES
        assert run.step()[0] == (3, 0)
        assert machine.num_asked == 4


def test_flags_without_effect_and_another_seed_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--split", "99,1,0", "--num-workers=2", "--seed", "1234"])
    with installed(args_for(folder / "recipe.yaml", seed=1234), core=True, lines=(lines := Lines())):
        tmx.provider()
    assert lines[:2] == [
        " > torchmix: no effect with a recipe: --split, --num-workers",
        " > torchmix: the order of the data comes from the recipe's seed 5; --seed 1234 is the model's",
    ]


def test_losses_by_source_are_due_at_the_log_interval(folder: Path) -> None:
    args = args_for(folder / "split.yaml", eval_iters=2, log_interval=5)
    with installed(args, core=True):
        tmx.provider()
        assert losses_of_part["train"].names == ["prose", "tiny", "web"]
        due = []
        for args.curr_iteration in range(10):
            due.append(losses_of_part["train"].is_due())
        assert due == [False] * 4 + [True] + [False] * 4 + [True]
        assert [losses_of_part["validation"].is_due() for _ in range(4)] == [False, True, False, True]
        tmx.close()
        args.data_source_loss = False
        tmx.provider()
        assert losses_of_part == {}


def test_ids_are_compared_with_the_padded_vocabulary(folder: Path) -> None:
    with installed(args_for(folder / "recipe.yaml", padded_vocab_size=512), core=True):
        with pytest.raises(RecipeError, match=r"holds the token [0-9]+, but the model's padded vocabulary has 512"):
            tmx.provider([0, 0, 0])
        tmx.close()
    with installed(args_for(folder / "recipe.yaml", padded_vocab_size=50_304), core=True):
        assert tmx.provider([0, 0, 0])[0] is not None


def test_samples_that_do_not_divide_are_refused_also_where_loaders_are_elastic(folder: Path) -> None:
    for restarts, size in ((False, 3), (True, 3), (True, 16)):
        args = args_for(folder / "recipe.yaml", micro_batch_size=size, inprocess_restart=restarts)
        text = (
            f"of train has 8 samples from step 0 on, which do not divide by micro batches of {size} x 1 data-parallel"
        )
        with installed(args, core=True), pytest.raises(RecipeError, match=text):
            tmx.provider([0, 0, 0])
    args = args_for(folder / "split.yaml", inprocess_restart=True, eval_iters=1, eval_global_batch_size=6)
    args.eval_micro_batch_size = 4
    with installed(args, core=True), pytest.raises(RecipeError, match="a step of validation has 6 samples"):
        tmx.provider([0, 0, 0])


@pytest.mark.parametrize("is_installed", [True, False])
def test_loaders_are_elastic_where_megatron_can_restart_in_its_process(folder: Path, is_installed: bool) -> None:
    args = args_for(folder / "recipe.yaml", inprocess_restart=True)
    with installed(args, core=True) as modules:
        if not is_installed:  # Megatron warns then, and trains without restarts
            modules["megatron.training.inprocess_restart"].inprocess = None  # type: ignore[attr-defined]
        tmx.provider([0, 0, 0])
        assert [one.loader._shared.is_elastic for one in open_loaders._opened] == [is_installed]
