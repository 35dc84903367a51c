"""torchmix as the data of Hugging Face's Trainer.

In: a recipe, a causal model of transformers, TrainingArguments. Out: a Trainer whose batches have `input_ids`,
`position_ids` and `labels`, which are shifted already, so the loss is `loss_of` and not the model's own. The Trainer
counts the tokens of a step over all microbatches and ranks. `gradient_accumulation_steps` follows from the recipe. The
state lies in each checkpoint's folder, as bytes. `position_ids` begin at 0 in each document; which kernels heed that is
the model's affair.

    TorchmixTrainer("recipe.yaml", model=model, args=TrainingArguments("out", max_steps=1000)).train()
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import torchmix

STATE = "torchmix_state.bin"


def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """The losses of a microbatch, over the tokens of the whole step; labels of -100 have none."""
    losses = torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return losses / num_items_in_batch


class TorchmixTrainer(Trainer):
    """Trains on a recipe."""

    def __init__(
        self, recipe: str | Path, *, args: TrainingArguments, accept_edit: str | None = None, **options: Any
    ) -> None:
        args.gradient_accumulation_steps = torchmix.fixed_microbatches(
            torchmix.load_recipe(recipe), dp=args.world_size, micro_batch_size=args.per_device_train_batch_size
        )
        args.ignore_data_skip = True  # the loader resumes from its state, and has no batches to skip
        super().__init__(args=args, compute_loss_func=loss_of, **options)
        self.batches = _Batches(recipe, args, accept_edit)
        self.add_callback(_SaveState(self.batches))

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        found = resume_from_checkpoint
        found = get_last_checkpoint(self.args.output_dir) if found is True else found
        if found:
            self.batches.state = {"torchmix_state": (Path(found) / STATE).read_bytes()}
        return super().train(resume_from_checkpoint=found or resume_from_checkpoint, **options)

    def get_train_dataloader(self) -> Any:
        return self.batches


class _Batches:
    def __init__(self, recipe: str | Path, args: TrainingArguments, accept_edit: str | None) -> None:
        self.recipe, self.args, self.accept_edit, self.state, self.loader = recipe, args, accept_edit, {}, None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        topology = torchmix.Topology(dp=self.args.world_size, rank=self.args.process_index)
        options = {"micro_batch_size": self.args.per_device_train_batch_size, "accept_edit": self.accept_edit}
        with torchmix.build_loader(self.recipe, topology=topology, **options) as self.loader:
            if self.state:
                self.loader.load_state_dict(self.state)
            for microbatch in self.loader:
                labels = microbatch.labels_int32.long()  # -100 where there is no loss
                yield {"input_ids": microbatch.tokens, "position_ids": microbatch.position_ids, "labels": labels}


class _SaveState(TrainerCallback):
    def __init__(self, batches: _Batches) -> None:
        self.batches = batches

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if args.should_save:
            (folder / STATE).write_bytes(self.batches.loader.state_dict()["torchmix_state"])
