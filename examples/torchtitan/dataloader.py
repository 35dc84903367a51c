"""torchmix as the dataloader of torchtitan: a class for `Trainer.Config(dataloader=TorchmixDataLoader.Config(...))`.

In: a recipe, and what torchtitan tells its dataloaders. Out: pairs of ({"input", "positions"}, labels), int64 tensors
with labels of -100 where there is no loss: [local batch, seq_len] for torchtitan 0.3, [tokens] for its main. Must hold:
a step of the recipe is a step there, so `batch.samples` is its `global_batch_size` (main: `num_tokens_per_train_step`
over `batch.length`), and `batch.length` is its `seq_len` (main: at most `max_context_length`). torchtitan cuts the
sequence for CP and chooses tensors for PP by itself, so all ranks of a replica receive the same. The state is the same
on every rank, and goes into torchtitan's checkpoint; a run may continue at another number of ranks. Written for
torchtitan 0.3.0, and for main of August 2026.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError:  # main, after 0.3
    from torchtitan.components.data.loader import BaseDataLoader

import torchmix
from torchmix.parallel import Role


class TorchmixDataLoader(BaseDataLoader):
    """Microbatches of a torchmix recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What a run says of its data."""

        recipe: str = "recipe.yaml"
        """File of the recipe."""
        pp: int = 1
        """Pipeline stages of the job: torchtitan numbers ranks with the stage slowest, and tells no dataloader."""
        max_steps: int | None = None
        """The step before which the data end."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **told: Any) -> None:
        """Open the loader of this rank; torchtitan calls this on all ranks."""
        torchmix.fixed_microbatches(torchmix.load_recipe(config.recipe), dp=dp_world_size)  # or it is refused
        length = torchmix.load_recipe(config.recipe).batch.length
        self._is_flat = "num_tokens_per_batch" in told
        if self._is_flat:
            size, rest = divmod(told["num_tokens_per_batch"], length)
            if rest or length > told["max_context_length"]:
                raise ValueError(
                    f"{config.recipe}: batch.length {length} does not divide the {told['num_tokens_per_batch']} tokens "
                    f"of a microbatch, or is above training.max_context_length {told['max_context_length']}"
                )
        else:
            size = told["local_batch_size"]
            if length != told["seq_len"]:
                raise ValueError(f"{config.recipe}: batch.length {length} is not training.seq_len {told['seq_len']}")
        world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        same = world_size // (dp_world_size * config.pp)  # ranks that differ in tp and cp alone
        topology = torchmix.Topology(tp=same, dp=dp_world_size, pp=config.pp, rank=rank)
        if topology.replica != dp_rank:
            raise ValueError(f"rank {rank} is data-parallel rank {dp_rank} here, not {topology.replica}: what is pp?")
        whole = {each: Role(stage="only", cp_rank=0) for each in range(world_size)}
        self._loader = torchmix.build_loader(
            config.recipe,
            topology=torchmix.ClientPlaceTree.from_topology(topology, roles=whole),
            micro_batch_size=size,
            max_steps=config.max_steps,
        )
        atexit.register(self._at_exit)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for microbatch in self._loader:
            labels = microbatch.labels.masked_fill(microbatch.loss_mask == 0, -100)
            tensors = [microbatch.tokens, microbatch.position_ids, labels]
            tokens, positions, labels = (each.flatten() for each in tensors) if self._is_flat else tensors
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

    def _at_exit(self) -> None:
        """End as `close`, which torchtitan 0.3 does not call; a rank that failed is left to be missed by the others."""
        if getattr(sys, "last_value", None) is None:
            self.close()
