"""torchmix as the data of VeOmni's trainers: a dataset and a dataloader in its registries, both named torchmix.

In: the folder of a recipe.yaml, as `data.train_path`. Out: the microbatches of each step, packed by VeOmni's own
collator: int64 ids, positions and labels, [1, tokens], with the boundaries of documents. Must hold: a step of the
recipe is a step there, so `batch.samples` is `train.global_batch_size`, `batch.length` is `data.max_seq_len`, and
`train.dyn_bsz` is off: the recipe packs. Ranks that share samples receive the same, and VeOmni cuts them. The state is
in VeOmni's checkpoint.

Import this file in tasks/train_text.py; `data.datasets_type` and `data.dataloader.type` are torchmix.
TORCHMIX_ACCEPT_EDIT in the environment accepts an edit of the recipe.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from veomni.data.data_loader import DATALOADER_REGISTRY
from veomni.data.dataset import DATASET_REGISTRY
from veomni.distributed.parallel_state import get_parallel_state

import torchmix


@DATASET_REGISTRY.register("torchmix")
def recipe_of(train_path: str, **_: Any) -> Path:
    """What VeOmni takes for the dataset: the recipe's file; a path that ends in .yaml means sources of its own."""
    return Path(train_path, "recipe.yaml")


@DATALOADER_REGISTRY.register("torchmix")
class TorchmixDataLoader:
    """The microbatches of each step."""

    def __init__(self, dataset: Path, *, micro_batch_size: int, collate_fn: Callable[..., Any], **told: Any) -> None:
        """Open the loader of this rank; VeOmni calls this on all ranks."""
        batch, self._collate = torchmix.load_recipe(dataset).batch, collate_fn
        wanted = {"global_batch_size": batch.samples, "max_seq_len": batch.length, "dyn_bsz": False}
        if wrong := {name: told[name] for name, value in wanted.items() if told[name] != value}:
            raise ValueError(f"{dataset} needs {wanted}; VeOmni's arguments have {wrong}")
        self._loader = torchmix.build_loader(
            dataset,
            topology=torchmix.parallel.whole_replicas(get_parallel_state().dp_rank),
            micro_batch_size=micro_batch_size,
            accept_edit=os.environ.get("TORCHMIX_ACCEPT_EDIT"),
        )
        atexit.register(lambda: None if hasattr(sys, "last_value") else self._loader.close())

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        step = []
        for microbatch in self._loader:
            ids, positions = microbatch.tokens.flatten(), microbatch.position_ids.flatten()
            shifted = microbatch.labels_int32.long().flatten()
            own = torch.cat([shifted.new_tensor([-100]), shifted[:-1]])  # VeOmni's labels are those of the token itself
            made = self._collate([{"input_ids": ids, "position_ids": positions, "labels": own}])
            if not get_parallel_state().sp_enabled:  # else the collator has shifted and cut them
                made["labels"] = made["shift_labels"] = shifted[None]
            step.append(made)
            if microbatch.is_last_of_step:
                yield step
                step = []

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step that was given."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume."""
        self._loader.load_state_dict(state_dict)
