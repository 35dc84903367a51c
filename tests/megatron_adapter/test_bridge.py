"""A recipe as the dataset of Megatron-Bridge, in a job of one rank: batches, counts, state, what is refused."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
import torch
import torch.distributed as dist

from tests.support.fake_bridge import LENGTH, SAMPLES, configuration, data_of, groups_of, modules_of
from tests.support.fake_megatron import core_of
from tests.support.provider_jobs import job_of_one_rank, write_recipes
from tests.support.stand_ins import standing_in
from torchmix.errors import RecipeError, StateError, StateMismatch, TopologyError
from torchmix.parallel.topology import Order, Topology
from torchmix.stateful.open import build_loader

NAME = "torchmix.megatron_adapter.bridge"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipes(tmp_path_factory.mktemp("bridge"))


@pytest.fixture
def bridge() -> Iterator[Any]:
    """The adapter, upon a new stand-in of Bridge."""
    core = core_of(SimpleNamespace(global_batch_size=SAMPLES, micro_batch_size=1))
    modules = {**core, **modules_of()}
    counts: Any = modules["megatron.bridge.training.state"]
    with standing_in(modules), job_of_one_rank():
        found = importlib.import_module(NAME)
        try:
            yield SimpleNamespace(adapter=found, modules=modules, TrainState=counts.TrainState)
        finally:
            found.close()
            sys.modules.pop(NAME)


def train(iterator: Any, counts: Any, *, steps: int) -> list[list[int]]:
    """Take steps as Bridge's loop does; the tokens of each microbatch."""
    tokens = []
    for _ in range(steps):
        tokens += [next(iterator)["tokens"].flatten().tolist() for _ in range(SAMPLES)]
        counts.step += 1
        counts.consumed_train_samples += SAMPLES
    return tokens


def planned(recipe: Path, *, part: str = "train", steps: int, **options: Any) -> list[list[int]]:
    with build_loader(recipe, part=part, max_steps=steps, loaders="in_process", **options) as loader:
        return [microbatch.tokens.flatten().tolist() for microbatch in loader]  # type: ignore[union-attr]


def saved_and_loaded(bridge: Any, counts: Any) -> Any:
    """Counts as they come out of a file, on another rank than that which has read it."""
    file = io.BytesIO()
    torch.save(counts.state_dict(), file)
    file.seek(0)
    read = bridge.TrainState()
    read.load_state_dict(torch.load(file, weights_only=True))
    sent = bridge.TrainState()
    vars(sent).update(vars(read))
    return sent


def test_batches_are_the_plans_before_and_after_a_checkpoint(bridge: Any, folder: Path) -> None:
    recipe, counts = folder / "recipe.yaml", bridge.TrainState()
    dataset = bridge.adapter.RecipeDataset(recipe=str(recipe), loaders="in_process")
    iterator, validation, test = data_of(bridge.modules, configuration(dataset), counts)
    assert validation is None and test is None and dataset.seq_length == LENGTH
    expected = planned(recipe, steps=5)
    assert train(iterator, counts, steps=3) == expected[: 3 * SAMPLES]
    counts = saved_and_loaded(bridge, counts)
    bridge.modules["megatron.bridge.training.fault_tolerance"].shutdown(None)
    assert bridge.adapter._data is None
    iterator, _, _ = data_of(bridge.modules, configuration(dataset), counts)
    assert train(iterator, counts, steps=2) == expected[3 * SAMPLES :]


def test_a_step_that_is_saved_unfinished_comes_again(bridge: Any, folder: Path) -> None:
    recipe, counts = folder / "recipe.yaml", bridge.TrainState()
    dataset = bridge.adapter.RecipeDataset(recipe=str(recipe), loaders="in_process")
    iterator, _, _ = data_of(bridge.modules, configuration(dataset), counts)
    first = train(iterator, counts, steps=1)
    again = [next(iterator)["tokens"].flatten().tolist() for _ in range(SAMPLES)]  # and counts stay as they are
    counts = saved_and_loaded(bridge, counts)
    bridge.adapter.close()
    iterator, _, _ = data_of(bridge.modules, configuration(dataset), counts)
    assert train(iterator, counts, steps=1) == again != first


def test_an_edit_is_accepted_by_the_field_that_its_refusal_names(bridge: Any, folder: Path) -> None:
    recipe, edited = folder / "recipe.yaml", folder / "edited.yaml"
    edited.write_text(recipe.read_text() + "schedule: [{from: 3 steps, set: {web: 20%}}]\n")
    counts = bridge.TrainState()
    dataset = bridge.adapter.RecipeDataset(recipe=str(recipe), loaders="in_process")
    iterator, _, _ = data_of(bridge.modules, configuration(dataset), counts)
    train(iterator, counts, steps=2)
    bridge.adapter.close()
    dataset = bridge.adapter.RecipeDataset(recipe=str(edited), loaders="in_process")
    with pytest.raises(StateMismatch, match=r"with this edit, give dataset\.accept_edit \w{16}; nothing") as refused:
        data_of(bridge.modules, configuration(dataset), counts)
    dataset.accept_edit = str(refused.value).split("dataset.accept_edit ")[1][:16]
    iterator, _, _ = data_of(bridge.modules, configuration(dataset), counts)
    assert train(iterator, counts, steps=2) == planned(edited, steps=4)[2 * SAMPLES :]


@pytest.mark.parametrize("is_old", [False, True])
def test_ends_of_documents_have_the_names_of_the_version(bridge: Any, folder: Path, is_old: bool) -> None:
    if is_old:
        del bridge.modules["megatron.bridge.training.gpt_step"]._has_packed_sequence_metadata
    dataset = bridge.adapter.RecipeDataset(recipe=str(folder / "recipe.yaml"), loaders="in_process")
    iterator, _, _ = data_of(bridge.modules, configuration(dataset), bridge.TrainState())
    batch = next(iterator)
    assert {batch[name].shape for name in ("tokens", "labels", "loss_mask", "position_ids")} == {(1, LENGTH)}
    assert batch["attention_mask"] is None
    ends = batch["cu_seqlens"][0] if is_old else batch["cu_seqlens_q"]
    assert ends[0] == 0 and ends[-1] == LENGTH and ends.dtype == torch.int32
    longest = int(ends.diff().max())
    if is_old:
        assert batch["cu_seqlens_argmin"].tolist() == [len(ends)] and batch["max_seqlen"].tolist() == [longest]
    else:
        assert batch["cu_seqlens_kv"] is ends
        assert batch["max_seqlen_q"].tolist() == batch["max_seqlen_kv"].tolist() == [longest]


def test_evaluation_goes_on_where_counts_say(bridge: Any, folder: Path) -> None:
    recipe, counts = folder / "split.yaml", bridge.TrainState(consumed_valid_samples=SAMPLES)
    dataset = bridge.adapter.RecipeDataset(recipe=str(recipe), loaders="in_process")
    _, validation, test = data_of(bridge.modules, configuration(dataset, validation__eval_iters=2), counts)
    taken = [next(validation)["tokens"].flatten().tolist() for _ in range(SAMPLES)]
    assert taken == planned(recipe, part="validation", steps=2, start_step=1)
    assert next(test)["tokens"].flatten().tolist() == planned(recipe, part="test", steps=1)[0]
    with pytest.raises(StateMismatch, match="has evaluated 0 samples"):
        next(validation)


def test_other_counts_than_the_plans_end_the_run(bridge: Any, folder: Path) -> None:
    counts = bridge.TrainState()
    dataset = bridge.adapter.RecipeDataset(recipe=str(folder / "recipe.yaml"), loaders="in_process")
    iterator, _, _ = data_of(bridge.modules, configuration(dataset), counts)
    train(iterator, counts, steps=1)
    counts.consumed_train_samples += 1
    with pytest.raises(StateMismatch, match="has consumed 9 samples"):
        next(iterator)


def test_a_checkpoint_without_state_is_an_error_that_names_the_way(bridge: Any, folder: Path) -> None:
    recipe = folder / "recipe.yaml"
    dataset = bridge.adapter.RecipeDataset(recipe=str(recipe), loaders="in_process")
    counts = bridge.TrainState(step=2, consumed_train_samples=2 * SAMPLES)
    with pytest.raises(StateError, match=r"give dataset\.start_fresh once"):
        data_of(bridge.modules, configuration(dataset), counts)
    dataset.start_fresh = True
    iterator, _, _ = data_of(bridge.modules, configuration(dataset), counts)
    assert train(iterator, counts, steps=1) == planned(recipe, steps=3)[2 * SAMPLES :]


POLICY = "dynamic: {policy: odm, every: 2 steps, lag: 1 step}"
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, int], type[Exception], str]] = {
    "another batch": ("", {"train__global_batch_size": 16}, {}, RecipeError, r"train\.global_batch_size is 16"),
    "another length": ("", {"model__seq_length": 128}, {}, RecipeError, r"model\.seq_length is 128"),
    "slices of what is not aligned": ("", {}, {"cp": 8}, TopologyError, "set align_tokens: 16"),
    "no validation": ("", {"validation__eval_iters": 3}, {}, RecipeError, r"or Megatron validation\.eval_iters 0"),
    "skipped steps of middle stages": (
        "",
        {"train__iterations_to_skip": [1]},
        {"pp": 4},
        RecipeError,
        "4 pipeline stages",
    ),
    "losses for a policy": (
        "dynamic: {policy: odm, every: 2 steps, lag: 1 step}",
        {},
        {},
        RecipeError,
        "loss function",
    ),
    "masked samples": ("", {"train__micro_batch_size": 3}, {}, RecipeError, "8 samples from step 0 on, which do not"),
    "an axis of ranks": ("", {}, {"dp": 2}, TopologyError, "makes 2 ranks, the job has 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_in_words_of_bridge(bridge: Any, folder: Path, tmp_path: Path, name: str) -> None:
    extra, changes, sizes, error, message = REFUSED[name]
    recipe = folder / f"{name.replace(' ', '-')}.yaml"
    recipe.write_text((folder / "recipe.yaml").read_text() + extra + "\n")
    dataset = bridge.adapter.RecipeDataset(recipe=str(recipe), loaders="in_process")
    with pytest.raises(error, match=message):
        data_of(bridge.modules, configuration(dataset, **changes), bridge.TrainState(), groups_of(**sizes))


def test_schedules_exchange_packed_samples_as_one_row(bridge: Any, folder: Path) -> None:
    dataset = bridge.adapter.RecipeDataset(recipe=str(folder / "recipe.yaml"))
    cfg = configuration(dataset, train__micro_batch_size=2)
    with pytest.raises(TopologyError, match="makes 2 ranks"):
        data_of(bridge.modules, cfg, bridge.TrainState(), groups_of(pp=2))
    for name in ("train", "eval"):
        schedule = bridge.modules[f"megatron.bridge.training.{name}"].get_forward_backward_func()
        assert schedule(seq_length=64, micro_batch_size=2, decoder_seq_length=None, num_microbatches=3) == {
            "seq_length": 128,
            "micro_batch_size": 1,
            "decoder_seq_length": None,
            "num_microbatches": 3,
        }


@pytest.mark.parametrize("order", get_args(Order))
def test_ranks_of_tp_and_cp_are_given_the_same(bridge: Any, monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    job = Topology(tp=2, cp=2, pp=2, dp=2, order=order)
    cfg = configuration(bridge.adapter.RecipeDataset(), dist__use_tp_pp_dp_mapping=order == "tp-cp-pp-dp")
    monkeypatch.setattr(dist, "get_world_size", lambda: job.world_size)
    for rank in range(job.world_size):
        place = job.coordinates_of(rank)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        tree = bridge.adapter.tree_of_groups(groups_of(place, tp=2, cp=2, pp=2, dp=2), cfg)
        assert (tree.topology.tp, tree.topology.cp, tree.topology.rank) == (4, 1, rank)
        assert tree.role.stage == ("first", "last")[place.pp] and tree.replica_of_rank[rank] == place.dp
    swapped = msgspec.structs.replace(place, dp=0)
    with pytest.raises(TopologyError, match="rank 15 is at"):
        bridge.adapter.tree_of_groups(groups_of(swapped, tp=2, cp=2, pp=2, dp=2), cfg)


def test_middle_stages_need_a_bridge_that_gives_them_batches(bridge: Any, folder: Path) -> None:
    del bridge.modules["megatron.bridge.training.gpt_step"]._middle_pp_stage_needs_batch
    dataset = bridge.adapter.RecipeDataset(recipe=str(folder / "recipe.yaml"))
    with pytest.raises(TopologyError, match="middle stages of this Megatron-Bridge take no batches"):
        data_of(bridge.modules, configuration(dataset), bridge.TrainState(), groups_of(pp=4))


def test_validation_with_a_layout_of_its_own_is_refused(bridge: Any, folder: Path) -> None:
    dataset = bridge.adapter.RecipeDataset(recipe=str(folder / "recipe.yaml"))
    with pytest.raises(TopologyError, match="eval_context_parallel_size"):
        data_of(bridge.modules, configuration(dataset), bridge.TrainState(), eval_dp_group=object())


def test_other_datasets_are_left_alone(bridge: Any) -> None:
    bridge.adapter.look_in()
    other = SimpleNamespace(build_datasets=lambda context: ("a", "b", "c"))
    assert data_of(bridge.modules, configuration(other), bridge.TrainState()) == ("a", "b", "c")
    assert set(bridge.TrainState().state_dict()) == {"step", "consumed_train_samples", "consumed_valid_samples"}


def test_a_bridge_that_lacks_a_function_is_named(bridge: Any) -> None:
    del bridge.modules["megatron.bridge.training.fault_tolerance"].shutdown
    with pytest.raises(StateError, match=r"has no megatron\.bridge\.training\.fault_tolerance\.shutdown"):
        bridge.adapter.RecipeDataset(recipe="recipe.yaml")
