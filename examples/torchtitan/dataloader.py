"""torchmix as the dataloader of torchtitan: a class for `Trainer.Config(dataloader=TorchmixDataLoader.Config(...))`.

In: a recipe, and what torchtitan tells its dataloaders. Out: pairs of ({"input", "positions"}, labels), int64 tensors
with labels of -100 where there is no loss: [local batch, seq_len] for torchtitan 0.3, [tokens] for its main. Must hold:
a step of the recipe is a step there, so `batch.samples` is its `global_batch_size` (main: `num_tokens_per_train_step`
over `batch.length`), and `batch.length` is its `seq_len` (main: at most `max_context_length`). torchtitan cuts the
sequence for CP and chooses tensors for PP by itself, so all ranks of a replica receive the same. The state is the same
on every rank, and goes into torchtitan's checkpoint; a run may continue at another number of ranks.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError:  # main, after 0.3
    from torchtitan.components.data.loader import BaseDataLoader

import torchmix


class TorchmixDataLoader(BaseDataLoader):
    """Microbatches of a torchmix recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What a run says of its data."""

        recipe: str = "recipe.yaml"
        """File of the recipe."""
        max_steps: int | None = None
        """The step before which the data end."""
        accept_edit: str | None = None
        """The code of an edit of the recipe since the checkpoint."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **told: Any) -> None:
        """Open the loader of this rank; torchtitan calls this on all ranks."""
        recipe = torchmix.load_recipe(config.recipe)
        torchmix.fixed_microbatches(recipe, dp=dp_world_size)  # or it is refused
        length, self._is_flat = recipe.batch.length, "num_tokens_per_batch" in told
        size = told["num_tokens_per_batch"] // length if self._is_flat else told["local_batch_size"]
        if self._is_flat and (size * length != told["num_tokens_per_batch"] or length > told["max_context_length"]):
            told_of = {name: told[name] for name in ("num_tokens_per_batch", "max_context_length")}
            raise ValueError(f"{config.recipe}: batch.length {length} does not suit {told_of}")
        if not self._is_flat and length != told["seq_len"]:
            raise ValueError(f"{config.recipe}: batch.length {length} is not training.seq_len {told['seq_len']}")
        self._loader = torchmix.build_loader(
            config.recipe,
            topology=torchmix.parallel.whole_replicas(dp_rank),
            micro_batch_size=size,
            max_steps=config.max_steps,
            accept_edit=config.accept_edit,
        )
        atexit.register(lambda: None if hasattr(sys, "last_value") else self.close())  # 0.3 does not call close

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for microbatch in self._loader:
            tensors = microbatch.tokens, microbatch.position_ids, microbatch.labels_int32.long()
            tokens, positions, labels = (each.flatten() if self._is_flat else each for each in tensors)
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        """The state after the last microbatch, the same on every rank."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state; torchtitan gives an empty one where a checkpoint has none."""
        if state_dict:
            self._loader.load_state_dict(state_dict)

    def close(self) -> None:
        """End the loader's threads and processes."""
        self._loader.close()
