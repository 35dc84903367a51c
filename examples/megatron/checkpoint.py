"""Checkpoints: model, optimizer and data state in one folder, published by a rename, loadable at any layout.

In: a folder that all ranks see, and what to save. Out: `step_00000020/` in Megatron's distributed format, and
`latest`, a text file with the name of the newest complete checkpoint.

    DIR/latest                      "step_00000020\n"
    DIR/step_00000020/              torch_dist: tensors by name and place in the whole, not by rank
    DIR/step_00000030.writing/      left by a killed save; removed by the next one

Must hold: a checkpoint is complete before it has its name, and has its name before `latest` says so. A kill at any
moment leaves the previous checkpoint, and `latest` pointing at it. The data state is bytes to Megatron, the same on
every rank.

Cost: one file per rank of its share, written and synced before training continues.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.utils import unwrap_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a checkpoint holds besides the weights, which `load` puts in place."""

    step: int
    """Steps trained when it was saved."""
    data_state: bytes
    """State of the loader, as it was given to `save`."""


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint of a folder, None if there is none yet."""
    pointer = directory / "latest"
    return directory / pointer.read_text().strip() if pointer.exists() else None


def save(directory: Path, *, step: int, model: list[Any], optimizer: Any, data_state: bytes) -> None:
    """Write a checkpoint aside, then give it its name. Called by all ranks at the same step.

    Args:
        directory: Folder of checkpoints, seen by all ranks; made if missing.
        step: Steps trained.
        model: The chunks of Megatron's schedules.
        optimizer: Megatron's optimizer of these chunks.
        data_state: State of the loader after `step` steps, equal on all ranks.
    """
    name = f"step_{step:08d}"
    aside = directory / f"{name}.writing"
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob("step_*.writing"):
            shutil.rmtree(leftover)
        aside.mkdir()
    dist.barrier()
    content = _sharded_state(model, optimizer, step=step, is_loading=False)
    content["step"] = step
    content["data_state"] = data_state
    dist_checkpointing.save(content, str(aside), sharded_strategy=_InProcess("torch_dist", 1))
    dist.barrier()
    if dist.get_rank() == 0:
        for path in sorted(aside.rglob("*")):
            _sync(path)
        # A run that continued from an older checkpoint saves the same step again: under a free name, so that `latest`
        # always points at something whole.
        earlier = [path for path in directory.glob(f"{name}*") if path != aside]
        final = next(path for n in count() if not (path := directory / (f"{name}.{n}" if n else name)).exists())
        aside.rename(final)
        pointer = directory / "latest.writing"
        pointer.write_text(f"{final.name}\n")
        _sync(pointer)
        pointer.replace(directory / "latest")
        _sync(directory)
        for path in earlier:
            shutil.rmtree(path)
    dist.barrier()


def load(path: Path, *, model: list[Any], optimizer: Any) -> Restored:
    """Put a checkpoint's weights and optimizer state in place, whatever layout it was saved at. Called by all ranks."""
    step = dist_checkpointing.load_common_state_dict(str(path))["step"]
    content = dist_checkpointing.load(_sharded_state(model, optimizer, step=step, is_loading=True), str(path))
    unwrap_model(model[0]).load_state_dict(content["model"])
    if "optimizer" in content:
        optimizer.load_state_dict(content["optimizer"])
    return Restored(step=step, data_state=content["data_state"])


def _sharded_state(model: list[Any], optimizer: Any, *, step: int, is_loading: bool) -> dict[str, Any]:
    """The tensors of this rank, each with its name and its place in the whole tensor."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }
    weights = unwrap_model(model[0]).sharded_state_dict(metadata=metadata)
    if step == 0:  # Adam has no moments before its first step
        return {"model": weights}
    moments = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": moments}


class _InProcess(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by the rank itself through PyTorch's own writer of that format.

    Megatron's writer keeps a manager process for its results and forks another at each save. When a rank is killed they
    stay behind, and a fork beside threads that hold locks can hang.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        by_name, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(by_name, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def _sync(path: Path) -> None:
    """Let a file or folder survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
