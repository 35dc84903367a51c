"""torchmix as a Lightning DataModule.

In: a recipe. Out: microbatches for `training_step`, on the module's device. Lightning fetches a batch ahead of the one
it trains on, so each batch brings its state, some kilobytes, and a checkpoint has that of the last one trained on.

    data = TorchmixData("recipe.yaml")
    Trainer(max_steps=1000, accumulate_grad_batches=data.accumulate(world_size)).fit(module, data)

Lightning divides the loss by `accumulate_grad_batches`, and DDP averages gradients over ranks; `loss_of` multiplies by
both, so that a step is the mean over all tokens of its global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

import torchmix


class TorchmixData(LightningDataModule):
    """Microbatches of a torchmix recipe."""

    def __init__(self, recipe: str | Path, *, micro_batch_size: int = 1, **options: Any) -> None:
        """`options` are those of `build_loader`, such as `max_steps` and `accept_edit`."""
        super().__init__()
        self._recipe, self._micro_batch_size, self._options = recipe, micro_batch_size, options
        self._loader: Any = None
        self._state: dict[str, Any] = {}

    def accumulate(self, world_size: int = 1) -> int:
        """Microbatches of each rank in a step: Lightning's `accumulate_grad_batches`."""
        recipe = torchmix.load_recipe(self._recipe)
        return torchmix.fixed_microbatches(recipe, dp=world_size, micro_batch_size=self._micro_batch_size)

    def train_dataloader(self) -> TorchmixData:
        """This object: an iterable, which Lightning takes as it is."""
        return self

    def __iter__(self) -> Iterator[Any]:
        trainer: Any = self.trainer
        if (wanted := self.accumulate(trainer.world_size)) != trainer.accumulate_grad_batches:
            raise ValueError(f"accumulate_grad_batches is {trainer.accumulate_grad_batches}: {wanted} are a step")
        self.teardown("fit")
        topology = torchmix.Topology(dp=trainer.world_size, rank=trainer.global_rank)
        options = {"topology": topology, "micro_batch_size": self._micro_batch_size, **self._options}
        self._loader = torchmix.build_loader(self._recipe, **options)
        if self._state:
            self._loader.load_state_dict(self._state)
        last = None
        for last in self._loader:
            yield last, self._loader.state_dict()
        trainer.should_stop |= last is None  # else Lightning begins epochs of nothing for ever, behind `max_steps`

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        microbatch, self._state = batch
        return microbatch.to(device, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict

    def teardown(self, stage: str) -> None:
        if self._loader is not None:
            self._loader.close()


def loss_of(module: LightningModule, logits: torch.Tensor, microbatch: Any) -> torch.Tensor:
    """The part of a step's loss that a microbatch has, as `training_step` returns it."""
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), microbatch.labels, reduction="none")
    mean = (losses * microbatch.loss_mask).sum() / microbatch.num_tokens_global
    return mean * module.trainer.world_size * module.trainer.accumulate_grad_batches
