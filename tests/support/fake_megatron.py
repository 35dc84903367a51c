"""A stand-in for `megatron.training`, which is not on PyPI: the few names that the adapter uses, and no more.

In: arguments. Out: modules in `sys.modules`, faithful to Megatron-LM core 0.16 and 0.20 where the adapter looks. Of
`megatron.core`, which takes seconds to import, there is a stand-in for one rank; single files of the real one can be
had by `file_of_core()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.stand_ins import standing_in

NEWER_KEYS = [
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "hybrid_cp_group",
    "labels",
    "local_cp_size",
    "loss_mask",
    "max_seqlen",
    "position_ids",
    "tokens",
]
"""BATCH_KEYS of pretrain_gpt.py in core 0.20."""


def default_args(**changes: Any) -> SimpleNamespace:
    """Megatron's arguments after validation, as core 0.16 has them, with the adapter's own flags."""
    args: dict[str, Any] = {
        "data_recipe": "recipe.yaml",
        "data_loaders": "in_process",
        "data_accept_edit": None,
        "data_leaders": "replica",
        "data_look_ahead": 2,
        "data_patience": None,
        "data_start_fresh": False,
        "data_source_loss": True,
        "dataloader_type": "external",
        "create_attention_mask_in_dataloader": False,
        "data_path": None,
        "mock_data": False,
        "sft": False,
        "fim_data": False,
        "hybrid_context_parallel": False,
        "phase_transition_iterations": None,
        "multiple_validation_sets": False,
        "full_validation": False,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "seed": 5,
        "calculate_per_token_loss": True,
        "decrease_batch_size_if_needed": False,
        "rampup_batch_size": None,
        "cuda_graph_impl": "none",
        "cuda_graph_scope": [],
        "mtp_num_layers": None,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 1,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "seq_length": 64,
        "eval_iters": 0,
        "eval_interval": 1000,
        "log_interval": 100,
        "iterations_to_skip": [],
        "skip_train": False,
        "load": None,
        "iteration": 0,
        "curr_iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "exit_signal_handler": False,
    }
    return SimpleNamespace(**{**args, **changes})


class Lines(list[str]):
    """What was written to the log of the first and the last rank."""


def modules_of(args: SimpleNamespace, *, lines: Lines | None = None, writer: Any = None) -> dict[str, ModuleType]:
    """The modules, by name.

    Args:
        args: What `get_args` returns.
        lines: Where `print_rank_0` and `print_rank_last` write; nowhere if not given.
        writer: TensorBoard's.
    """
    names = ("", ".checkpointing", ".training", ".global_vars", ".utils", ".arguments", ".inprocess_restart")
    modules = {name: ModuleType(f"megatron.training{name}") for name in names}
    written = Lines() if lines is None else lines
    modules[""].get_args = lambda: args  # type: ignore[attr-defined]
    modules[".checkpointing"].check_checkpoint_args = _check_checkpoint_args  # type: ignore[attr-defined]
    modules[".checkpointing"].get_args = lambda: args  # type: ignore[attr-defined]
    modules[".training"].dummy_train_step = _dummy_train_step  # type: ignore[attr-defined]
    modules[".training"].get_forward_backward_func = _not_to_be_called  # type: ignore[attr-defined]
    modules[".training"].HybridCPDataLoaderWrapper = _not_to_be_called  # type: ignore[attr-defined]
    modules[".training"].wrap_data_iterator = _not_to_be_called  # type: ignore[attr-defined]
    modules[".global_vars"].get_tensorboard_writer = lambda: writer  # type: ignore[attr-defined]
    modules[".global_vars"].get_wandb_writer = lambda: None  # type: ignore[attr-defined]
    modules[".utils"].print_rank_0 = modules[".utils"].print_rank_last = written.append  # type: ignore[attr-defined]
    modules[".arguments"].core_transformer_config_from_args = _config  # type: ignore[attr-defined]
    modules[".inprocess_restart"].inprocess = object()  # type: ignore[attr-defined]  # None without its package
    for name in names[1:]:
        setattr(modules[""], name[1:], modules[name])
    return {f"megatron.training{name}": module for name, module in modules.items()}


def core_of(args: SimpleNamespace, *, machine: Any = None) -> dict[str, ModuleType]:
    """`megatron.core` of a job of one rank, by name.

    Args:
        args: Where sizes are read.
        machine: The rerun state machine.
    """
    state = ModuleType("megatron.core.parallel_state")
    for axis in ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel", "data_parallel"):
        setattr(state, f"get_{axis}_world_size", lambda: 1)
        setattr(state, f"get_{axis}_rank", lambda: 0)
    state.is_pipeline_first_stage = state.is_pipeline_last_stage = lambda **_: True  # type: ignore[attr-defined]
    state.get_data_parallel_group = lambda with_context_parallel: None  # type: ignore[attr-defined]
    calculator = ModuleType("megatron.core.num_microbatches_calculator")
    calculator.get_num_microbatches = lambda: args.global_batch_size // args.micro_batch_size  # type: ignore[attr-defined]
    reruns = ModuleType("megatron.core.rerun_state_machine")
    reruns.get_rerun_state_machine = lambda: machine  # type: ignore[attr-defined]
    params = ModuleType("megatron.core.packed_seq_params")
    params.PackedSeqParams = PackedSeqParams  # type: ignore[attr-defined]
    core = ModuleType("megatron.core")
    for module in (state, calculator, reruns, params):
        setattr(core, module.__name__.rpartition(".")[2], module)
    return {module.__name__: module for module in (ModuleType("megatron"), core, state, calculator, reruns, params)}


@dataclass
class PackedSeqParams:
    """The fields of core 0.16."""

    qkv_format: str | None = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None


@contextmanager
def installed(
    args: SimpleNamespace, *, core: bool = False, machine: Any = None, **options: Any
) -> Iterator[dict[str, ModuleType]]:
    """While inside, `megatron.training` is the stand-in, and with `core` so is `megatron.core`."""
    modules = {**(core_of(args, machine=machine) if core else {}), **modules_of(args, **options)}
    with standing_in(modules):
        yield modules


def file_of_core(name: str) -> ModuleType:
    """A module of the real `megatron.core` that needs no other, without the seconds that its package takes."""
    package = find_spec("megatron")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("megatron-core is not installed")
    (folder,) = package.submodule_search_locations
    spec = spec_from_file_location(f"tests.{name}", Path(folder) / "core" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIELDS_OF_CORE = {
    "0.16": ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "packed_seq_params"),
    "0.18": tuple(NEWER_KEYS),
    "0.20": tuple(NEWER_KEYS),
    "dev": ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", "packed_seq_params", "padding_mask"),
}
"""What `forward_step` takes from `get_batch`, in order."""


def script_of(layout: str, loss_func: Callable[..., Any] | None = None) -> dict[str, Any]:
    """`globals()` of a pretrain_gpt.py, as far as the adapter looks: of core "0.16", "0.18", "0.20", or "dev"."""
    script: dict[str, Any] = {"get_batch": _get_batch, "forward_step": _FORWARD_STEPS[layout]}
    if layout == "0.20":
        script["BATCH_KEYS"] = list(NEWER_KEYS)  # core 0.18 has this name inside its get_batch alone
    if loss_func is not None:
        script["loss_func"] = loss_func
    return script


def _get_batch(data_iterator: Any, vp_stage: int | None = None) -> Any:
    raise AssertionError("the script's own get_batch is not to be called")


get_batch: Callable[..., Any] = _get_batch
"""Under the name that the functions below call; nothing calls them."""


def _forward_step_016(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    with model.stimer(bdata=True):
        vp_stage = model.vp_stage
        tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = get_batch(data_iterator, vp_stage)
    return model(tokens, position_ids, attention_mask, labels, loss_mask, packed_seq_params)


def _forward_step_018(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    with model.stimer(bdata=True):
        vp_stage = model.vp_stage
        (
            attention_mask,
            cu_seqlens,
            cu_seqlens_padded,
            hybrid_cp_group,
            labels,
            local_cp_size,
            loss_mask,
            max_seqlen,
            position_ids,
            tokens,
        ) = get_batch(data_iterator, vp_stage)
    boundaries = (cu_seqlens, cu_seqlens_padded, max_seqlen, hybrid_cp_group, local_cp_size)
    return model(tokens, position_ids, attention_mask, labels, loss_mask, boundaries)


def _forward_step_dev(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    with model.stimer(bdata=True):
        vp_stage = model.vp_stage
        tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params, padding_mask = get_batch(
            data_iterator, vp_stage
        )
    return model(tokens, position_ids, attention_mask, labels, loss_mask, packed_seq_params, padding_mask)


_FORWARD_STEPS: dict[str, Callable[..., Any]] = {
    "0.16": _forward_step_016,
    "0.18": _forward_step_018,
    "0.20": _forward_step_018,
    "dev": _forward_step_dev,
}


def _check_checkpoint_args(checkpoint_args: Any, skip_args: set[str] | None = None) -> None:
    """Megatron compares sizes of the model here."""


def _dummy_train_step(data_iterator: Any) -> None:
    raise AssertionError("Megatron's own dummy_train_step is not to be called")


def _not_to_be_called(*_: Any, **__: Any) -> None:
    raise AssertionError("what gathers lengths and sends samples is not to be called")


def _config(args: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        mtp_num_layers=args.mtp_num_layers,
        pipeline_model_parallel_layout=getattr(args, "pipeline_model_parallel_layout", None),
    )
