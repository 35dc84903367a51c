"""Megatron-Bridge: a recipe as the `dataset` of its configuration.

Bridge hands a dataset neither its configuration nor its counts, and its checkpoints keep the place of one loader alone.
So torchmix looks in at four functions of Bridge, from when a `RecipeDataset` is made:

    function                                            for
    data.loaders.build_train_valid_test_data_loaders    the configuration, and the counts of a loaded checkpoint
    training.state.TrainState.state_dict                the state of the data, in each checkpoint beside those counts
    training.state.TrainState.load_state_dict           that state, of the very checkpoint that was loaded
    training.fault_tolerance.shutdown                   closing before the process groups end, when Bridge calls it

(And `as_one_row` at what finds its schedules, where packed samples pass pipeline stages.)

All else is Bridge's own, its `get_batch` among it: that takes whole samples, and cuts the slice of its context-parallel
rank itself. So the ranks of tp x cp are peers here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.data import loaders as bridge_loaders
from megatron.bridge.training import eval as bridge_eval
from megatron.bridge.training import fault_tolerance, gpt_step
from megatron.bridge.training import train as bridge_train
from megatron.bridge.training.config import DatasetProvider
from megatron.bridge.training.state import TrainState
from megatron.bridge.utils.common_utils import print_rank_0

from torchmix.constructor.fields import Microbatch, check_context_parallel
from torchmix.errors import RecipeError, StateError, TopologyError
from torchmix.megatron_adapter.batch import Needs, fields_of
from torchmix.megatron_adapter.batch_sizes import check_batch_sizes, check_training
from torchmix.megatron_adapter.checkpoint import ATTRIBUTE, ATTRIBUTE_BEFORE, LoadedCheckpoint
from torchmix.megatron_adapter.flags import check_refusals
from torchmix.megatron_adapter.microbatches import MicrobatchIterator, SharedMicrobatches, as_one_row
from torchmix.megatron_adapter.open_loaders import DataOfRun, OpenLoaders, telling_the_others
from torchmix.mixture.policies import function_of_step
from torchmix.parallel.place_tree import ClientPlaceTree, Role
from torchmix.parallel.topology import Topology
from torchmix.recipe.parts import has_part, part_of
from torchmix.recipe.ramp import lengths_of
from torchmix.recipe.sources import sources_with_resets
from torchmix.recipe.structs import Recipe

Batch = dict[str, Any]
"""What Bridge's `get_batch` takes from an iterator: tensors by name, None for what this stage does not need."""


# A dataclass: Bridge writes it into a checkpoint's run_config.yaml, and its command line sets the fields by name.
@dataclass(kw_only=True)
class RecipeDataset(DatasetProvider):  # type: ignore[misc]  # Bridge ships no types
    """Set it as `cfg.dataset`: the data of a run of Megatron-Bridge, by a recipe.

    All of a recipe that trains on text is served: files of Hugging Face, of Megatron, texts, chats, several parts. The
    forward step is that of `megatron.bridge.training.gpt_step`, for pretraining and for finetuning alike.
    """

    recipe: str = ""
    """The recipe's file."""
    loaders: str | None = None
    """Where data are planned and read, in the place of the recipe's `loaders`: `node`, `in_process`, and further keys
    as `node,memory=8GiB`."""
    leaders: str = "replica"
    """Which ranks read: one of each `replica`, one of each replica in each `node`, or one of each `stage`."""
    look_ahead: int = 2
    """Finished global batches that may wait on each rank, 1 or more."""
    patience_s: float | None = None
    """Seconds that a rank of another host, or the job's store, may be silent before it counts as lost; None is 11."""
    accept_edit: str | None = None
    """Go on with a recipe that was edited since the checkpoint: the code that the refusal, or torchmix diff, names."""
    start_fresh: bool = False
    """Load a checkpoint that has no state of torchmix: the data begin at the step that Bridge's counts say."""
    seq_length: int = 0
    """Tokens of a sample, for Bridge's log; taken from the model where it is 0."""
    dataloader_type: str | None = "external"
    """What a recipe is to Bridge; nothing else works."""
    skip_getting_attention_mask_from_dataset: bool = False
    """False lets Bridge's middle stages take their batches, too; there is no mask in them."""

    def __post_init__(self) -> None:
        look_in()

    def build_datasets(self, context: Any) -> tuple[Any | None, Any | None, Any | None]:
        """Iterators of one model chunk, for training, validation and test; None where there is none to be.

        Args:
            context: What Bridge says of the run.

        Raises:
            RecipeError: The configuration contradicts the recipe, or torchmix does not serve it.
            StateError: The loaded checkpoint has no state of the data, or another one than its weights.
            RankLost: Another rank failed before its loaders were built.
        """
        global _data
        if _data is None:
            if _run_at_hand is None or _run_at_hand[0].dataset is not self:
                raise StateError(
                    "RecipeDataset.build_datasets was called by something else than Bridge's data.loaders; let "
                    "megatron.bridge.training.pretrain or finetune build the data"
                )
            with telling_the_others(), _in_words_of_bridge():
                _data = _DataOfBridge(self, *_run_at_hand, groups=getattr(context, "pg_collection", None))
        return _data.new_iterators()


def close() -> None:
    """Close what is open; all ranks do so alike. At the end of a run of Bridge it happens by itself."""
    global _data
    if _data is not None:
        job, _data = _data, None
        job.close()


# --- Where torchmix looks in.

_data: _DataOfBridge | None = None
_run_at_hand: tuple[Any, Any] | None = None
"""Bridge's configuration and counts, as they are when it asks for data."""


def look_in() -> None:
    """Look in at Bridge's functions from now on; doing it twice is doing it once.

    Raises:
        StateError: This Bridge lacks one of them.
    """
    for home, name, wrapped in (
        (bridge_loaders, "build_train_valid_test_data_loaders", _noting_the_run),
        (TrainState, "state_dict", _with_state),
        (TrainState, "load_state_dict", _keeping_state),
        (fault_tolerance, "shutdown", _closing_first),
    ):
        original = getattr(home, name, None)
        if original is None:
            raise StateError(
                f"this Megatron-Bridge has no {home.__name__}.{name}, at which torchmix looks in; it was built for "
                f"Bridge 0.3 and its branch main of August 2026"
            )
        if not hasattr(original, "__wrapped__"):
            setattr(home, name, wrapped(original))


def _noting_the_run(original: Callable[..., Any]) -> Callable[..., Any]:
    names = inspect.signature(original)

    @wraps(original)
    def build_train_valid_test_data_loaders(*arguments: Any, **named: Any) -> Any:
        global _run_at_hand
        given = names.bind(*arguments, **named).arguments
        if isinstance(given["cfg"].dataset, RecipeDataset):
            if given.get("eval_dp_group") not in (None, given["dp_group"]):
                raise TopologyError(
                    "validation has a context-parallel size of its own, and the recipe's validation is placed as its "
                    "training is; leave validation.eval_context_parallel_size out"
                )
            _run_at_hand = given["cfg"], given["train_state"]
        try:
            return original(*arguments, **named)
        finally:
            _run_at_hand = None

    return build_train_valid_test_data_loaders


def _with_state(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @wraps(original)
    def state_dict(train_state: Any) -> dict[str, Any]:
        held = {name: getattr(train_state, name, None) for name in (ATTRIBUTE, ATTRIBUTE_BEFORE)}
        texts = {
            name: torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8) for name, text in held.items() if text
        }
        return {**original(train_state), **texts}

    return state_dict


def _keeping_state(original: Callable[..., None]) -> Callable[..., None]:
    """As attributes of the object: on rank 0 alone it is loaded, and Bridge sends the object to the other ranks."""

    @wraps(original)
    def load_state_dict(train_state: Any, state_dict: Mapping[str, Any]) -> None:
        original(train_state, state_dict)
        for name in (ATTRIBUTE, ATTRIBUTE_BEFORE):
            text = state_dict.get(name)
            setattr(train_state, name, None if text is None else bytes(text.tolist()).decode("ascii"))

    return load_state_dict


def _closing_first(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def shutdown(*arguments: Any, **named: Any) -> None:
        close()
        original(*arguments, **named)

    return shutdown


# --- Bridge's configuration in Megatron's words, and torchmix's errors in Bridge's.

_SECTIONS = {
    "train": (
        "micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed "
        "iterations_to_skip train_iters"
    ),
    "validation": "eval_iters eval_global_batch_size eval_micro_batch_size skip_train",
    "model": (
        "seq_length tensor_model_parallel_size context_parallel_size pipeline_model_parallel_size "
        "virtual_pipeline_model_parallel_size calculate_per_token_loss mtp_num_layers cuda_graph_impl cuda_graph_scope "
        "overlap_moe_expert_parallel_comm hybrid_context_parallel dynamic_context_parallel sequence_packing_scheduler"
    ),
    "dist": "use_tp_pp_dp_mapping",
}
"""Section of the configuration -> its fields that Megatron-LM has as flags. Versions may lack some."""
_WORDS = {
    "--data-start-fresh": "dataset.start_fresh",
    "--data-accept-edit": "dataset.accept_edit",
    "--data-recipe": "a recipe",
    "--finetune": "checkpoint.finetune",
    "--override-ckpt-iteration": "checkpoint.ckpt_step",
} | {
    f"--{name.replace('_', '-')}": f"{section}.{name}" for section, names in _SECTIONS.items() for name in names.split()
}


class _Arguments(SimpleNamespace):
    """Megatron's arguments, as far as the checks of this adapter ask."""

    def __init__(self, cfg: Any, train_state: Any, *, dp: int) -> None:
        """Take what a configuration says.

        Args:
            cfg: Bridge's configuration.
            train_state: Its counts; what changes in them is seen here.
            dp: Data-parallel size.
        """
        asked = {
            name: _of_section(cfg, section, name)
            for section, names in _SECTIONS.items()
            for name in names.split()
            if _of_section(cfg, section, name) is not None
        }
        dataset = cfg.dataset
        super().__init__(
            **{"rampup_batch_size": None, "eval_iters": 0, "skip_train": False, **asked},
            data_parallel_size=dp,
            dataloader_type=dataset.dataloader_type,
            data_start_fresh=dataset.start_fresh,
            data_accept_edit=dataset.accept_edit,
            data_leaders=dataset.leaders,
        )
        self._counts = train_state

    @property
    def iteration(self) -> int:
        """Steps that Bridge has counted."""
        return int(self._counts.step)

    @property
    def consumed_train_samples(self) -> int:
        """Samples of training that Bridge has counted."""
        return int(self._counts.consumed_train_samples)

    @property
    def consumed_valid_samples(self) -> int:
        """Samples of validation that Bridge has counted."""
        return int(self._counts.consumed_valid_samples)


def _of_section(cfg: Any, section: str, name: str) -> Any:
    """A field; earlier versions have those of validation in the section of training."""
    found = getattr(getattr(cfg, section, None), name, None)
    return getattr(cfg.train, name, None) if found is None and section == "validation" else found


@contextmanager
def _in_words_of_bridge() -> Iterator[None]:
    """Errors name fields of the configuration where they name Megatron's flags."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(_reworded(error.message), error.where, error.line, error.file) from error
    except (StateError, TopologyError) as error:
        raise type(error)(_reworded(str(error))) from error


def _reworded(text: str) -> str:
    return re.sub(r"--[a-z][a-z-]*[a-z]", lambda found: _WORDS.get(found[0], found[0]), text)


# --- Where this rank stands.


def tree_of_groups(groups: Any, cfg: Any) -> ClientPlaceTree:
    """The place tree of a job of Bridge; ranks of tp x cp are given the same.

    Args:
        groups: Megatron core's `ProcessGroupCollection`.
        cfg: Bridge's configuration.

    Raises:
        TopologyError: Ranks are numbered in an order that torchmix does not know.
    """
    sizes = {axis: getattr(groups, axis).size() for axis in ("tp", "cp", "pp", "dp")}
    ranks = {axis: getattr(groups, axis).rank() for axis in sizes}
    mapped = getattr(cfg.dist, "use_tp_pp_dp_mapping", False)
    topology = Topology(
        tp=sizes["tp"] * sizes["cp"], pp=sizes["pp"], dp=sizes["dp"], order="tp-cp-pp-dp" if mapped else "tp-cp-dp-pp"
    )
    text = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    if topology.world_size != dist.get_world_size():
        raise TopologyError(f"{text} makes {topology.world_size} ranks, the job has {dist.get_world_size()}")
    topology = topology.with_rank(dist.get_rank())
    place = topology.coordinates
    expected, found = (
        (place.tp, place.pp, place.dp),
        (ranks["tp"] + sizes["tp"] * ranks["cp"], ranks["pp"], ranks["dp"]),
    )
    if found != expected:
        raise TopologyError(
            f"rank {topology.rank} is at (tp + cp, pp, dp) = {found} for Bridge, and at {expected} where ranks of "
            f"{text} are numbered {topology.order}; torchmix knows this order and that of dist.use_tp_pp_dp_mapping"
        )
    roles = _prediction_roles(topology, cfg.model)
    return ClientPlaceTree.from_topology(topology, leaders=cfg.dataset.leaders, roles=roles)


def _prediction_roles(topology: Topology, model: Any) -> dict[int, Role]:
    """The ranks of stages with multi-token prediction, which need tokens and labels; with one stage all have both."""
    if not getattr(model, "mtp_num_layers", None) or topology.pp == 1:
        return {}
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks

    stages = set(get_mtp_ranks(list(range(topology.pp)), model))
    both = Role(stage="only", cp_rank=0)
    ranks = range(topology.world_size)
    return {rank: both for rank in ranks if topology.with_rank(rank).coordinates.pp in stages}


def _padded_vocab_size(model: Any, *, tp: int) -> int | None:
    """Rows of the embedding; None where the model does not say."""
    size = getattr(model, "vocab_size", None)
    if size is None or not getattr(model, "should_pad_vocab", False):
        return size
    multiple = int(getattr(model, "make_vocab_size_divisible_by", 128)) * tp
    return -(-int(size) // multiple) * multiple


# --- What Bridge iterates over.


class BatchIterator:
    """Microbatches as Bridge's `get_batch` takes them. It has no length and no end of its own."""

    def __init__(self, iterable: MicrobatchIterator, needs: Needs) -> None:
        """Give batches.

        Args:
            iterable: Whose items are given.
            needs: What the stage of this rank works with.
        """
        self.iterable = iterable
        self._needs = needs

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        return batch_of(next(self.iterable), self._needs)


def batch_of(item: dict[str, Any], needs: Needs) -> Batch:
    """A microbatch by Bridge's names, on the device that trains.

    Boundaries are those with padding, of queries and keys alike; the adapter for Megatron-LM does likewise, and says
    why.

    Args:
        item: From an iterator of `microbatches.py`.
        needs: What the stage works with.
    """
    fields = fields_of(item, needs)
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    batch = {name: fields.get(name) for name in names}
    if "cu_seqlens_padded" not in fields:
        return batch
    ends, longest = fields["cu_seqlens_padded"], fields["max_seqlen"]
    if _takes_ends_of_queries():
        queries = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        return {**batch, **queries}
    count = torch.tensor([len(ends)], dtype=torch.int32)  # on the CPU: Bridge cuts there without waiting for a device
    return {**batch, "cu_seqlens": ends.unsqueeze(0), "cu_seqlens_argmin": count, "max_seqlen": longest}


def _takes_ends_of_queries() -> bool:
    """Whether boundaries have the names of core's PackedSeqParams; until Bridge 0.3 they are `cu_seqlens`."""
    return hasattr(gpt_step, "_has_packed_sequence_metadata")


class _DataOfBridge(DataOfRun):
    """What a run of Bridge in this process has of its data."""

    def __init__(self, dataset: RecipeDataset, cfg: Any, train_state: Any, *, groups: Any) -> None:
        if groups is None:  # Bridge 0.3 does not pass them
            from megatron.core.process_groups_config import ProcessGroupCollection

            groups = ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(_Arguments(cfg, train_state, dp=groups.dp.size()), dataset.recipe, OpenLoaders())
        self._counts = train_state
        cp, pp = groups.cp.size(), groups.pp.size()
        _check_served(self._recipe, self._args, pp=pp)
        check_refusals(self._args, self._recipe, cp=cp, pp=pp)
        check_batch_sizes(self._args, self._recipe.batch)
        for length in lengths_of(self._recipe.batch):
            check_context_parallel(
                cp,
                length=length,
                packing=self._recipe.packing,
                resetting=list(sources_with_resets(self._recipe.sources)),
            )
        if self._is_packed and pp > 1:
            for home in (bridge_train, bridge_eval):
                home.get_forward_backward_func = as_one_row(home.get_forward_backward_func)
        self._tree = tree_of_groups(groups, cfg)
        self._options = {
            "loaders": dataset.loaders,
            "look_ahead": dataset.look_ahead,
            "patience_s": dataset.patience_s,
            "padded_vocab_size": _padded_vocab_size(cfg.model, tp=groups.tp.size()),
        }
        role = self._tree.role
        self._needs = Needs(tokens=role.is_first_stage, labels=role.is_last_stage)
        dataset.seq_length = dataset.seq_length or int(self._args.seq_length)
        self._shared: list[SharedMicrobatches | None] = [None, None, None]
        if not self._args.skip_train:
            self._shared[0] = self._open_train()
        if self._args.eval_iters > 0:
            parts = ("validation", "test")
            self._shared[1:] = [
                self._share_evaluation(part) if has_part(self._recipe, part) else None for part in parts
            ]
        self._close_at_exit()

    def new_iterators(self) -> tuple[BatchIterator | None, BatchIterator | None, BatchIterator | None]:
        """Iterators for one more chunk."""
        train, validation, test = (
            None if shared is None else BatchIterator(shared.new_iterator(), self._needs) for shared in self._shared
        )
        return train, validation, test

    def _open_train(self) -> SharedMicrobatches:
        args, batch = self._args, part_of(self._recipe, "train").batch
        loaded = LoadedCheckpoint()
        if self._counts.step or args.consumed_train_samples:
            loaded.note(self._counts)
        loader = self._open_where_it_stands(loaded, self._counts, print_rank_0)

        def on_microbatch(microbatch: Microbatch) -> None:
            if microbatch.index == 0:
                with _in_words_of_bridge():
                    check_training(args, batch, dp=self._tree.topology.dp, step=microbatch.step)

        return self._share_training(loader, self._counts, on_microbatch)


def _check_served(recipe: Recipe, args: Any, *, pp: int) -> None:
    """Refuse what other trainers are given by torchmix, and Bridge is not."""
    if recipe.balance.context is not None:
        message = "Bridge's schedules have one context-parallel size; leave it out, and pack by best_fit"
        raise RecipeError(message, "balance.context")
    if recipe.modules:
        message = "Bridge's forward step of GPT encodes nothing; a recipe for Bridge has text alone"
        raise RecipeError(message, "modules")
    dynamic = part_of(recipe, "train").dynamic
    if dynamic is not None and function_of_step(dynamic) is None:
        message = "a policy needs the loss of each source, which Bridge's own loss function does not tell; leave it out"
        raise RecipeError(message, "dynamic")
    if pp <= 2:
        return
    if not hasattr(gpt_step, "_middle_pp_stage_needs_batch"):
        raise TopologyError(
            f"{pp} pipeline stages: middle stages of this Megatron-Bridge take no batches, so they would not know "
            f"where documents end, nor would their loaders go on; use 2 stages, or Bridge's branch main"
        )
    if getattr(args, "iterations_to_skip", None):
        raise RecipeError(
            f"train.iterations_to_skip with {pp} pipeline stages: Bridge passes over the batches of the first and the "
            f"last stage alone, and the middle ones would train on other steps; deny the rows, or use 2 stages"
        )
