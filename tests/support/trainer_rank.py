"""A rank that trains with the example of Lightning, Hugging Face's Trainer or accelerate, and saves what it trained on.

In: which of them, a recipe, a folder for checkpoints, samples of a microbatch, steps, the step of the checkpoint to go
on from (0: none), a file for the inputs, and the code of an edit. The model has one token of context.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.example import EXAMPLE, example_module

VOCABULARY = 257


class Toy(torch.nn.Module):
    """A table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(VOCABULARY, 8), torch.nn.Linear(8, VOCABULARY)
        self.seen: list[torch.Tensor] = []

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        self.seen.append(input_ids)
        return {"logits": self.head(self.table(input_ids))}


def lightning_model(module: Any) -> Any:
    """A model of Lightning's; `module` is the example, whose loss it has."""
    import lightning.pytorch as lightning

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.toy = Toy()

        def training_step(self, microbatch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = module.loss_of(self, self.toy(microbatch.tokens)["logits"], microbatch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


def lightning_trainer(**options: Any) -> Any:
    """A Trainer of Lightning's on CPUs that says and writes nothing by itself."""
    import lightning.pytorch as lightning

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(accelerator="cpu", **quiet, **options)


def by_lightning(recipe: str, folder: Path, size: int, steps: int, start: int, code: str | None) -> list[torch.Tensor]:
    """Train with Lightning."""
    module = example_module("data_module", EXAMPLE.parent / "lightning")
    world_size = int(os.environ["WORLD_SIZE"])
    model, data = lightning_model(module), module.TorchmixData(recipe, micro_batch_size=size, accept_edit=code)
    trainer = lightning_trainer(
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        max_steps=steps,
        accumulate_grad_batches=data.accumulate(world_size),
        default_root_dir=folder,
    )
    trainer.fit(model, data, ckpt_path=folder / f"{start}.ckpt" if start else None)
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    seen: list[torch.Tensor] = model.toy.seen
    return seen


def by_hugging_face(
    recipe: str, folder: Path, size: int, steps: int, start: int, code: str | None
) -> list[torch.Tensor]:
    """Train with transformers' Trainer."""
    import transformers

    module = example_module("trainer", EXAMPLE.parent / "huggingface")
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=size,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = Toy()
    trainer = module.TorchmixTrainer(recipe, model=model, args=args, accept_edit=code)
    trainer.train(resume_from_checkpoint=bool(start))  # the latest
    return model.seen


def by_accelerate(recipe: str, folder: Path, size: int, steps: int, start: int, code: str | None) -> list[torch.Tensor]:
    """Run the script, with accelerate alone."""
    module = example_module("train", EXAMPLE.parent / "accelerate")
    model = Toy()
    model.forward = lambda tokens, *_: Toy.forward(model, tokens)["logits"]  # type: ignore[method-assign]
    module.TinyGPT = lambda **_: model
    words = ["train.py", recipe, "--steps", str(steps), "--micro-batch-size", str(size), "--save", f"{folder}/{steps}"]
    words += ["--load", f"{folder}/{start}"] if start else []
    sys.argv = words + (["--accept-edit", code] if code else [])
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu` sets it
    module.main()
    return model.seen


TRAINERS = {"lightning": by_lightning, "huggingface": by_hugging_face, "accelerate": by_accelerate}


def main(trainer: str, recipe: str, folder: str, size: str, steps: str, start: str, out: str, code: str) -> None:
    """Train, and save the inputs."""
    seen = TRAINERS[trainer](recipe, Path(folder), int(size), int(steps), int(start), code or None)
    torch.save(seen, f"{out}-{os.environ['RANK']}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
