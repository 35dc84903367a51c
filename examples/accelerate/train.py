"""Training with accelerate, without the Trainer.

In: a recipe. Out: a line a step: loss, digest of the order; with --save a checkpoint, with the loader in it.
Must hold: `accelerator.prepare` leaves the loader as it is, since each rank has its samples already; so a microbatch is
moved by hand. `accelerator.backward` divides by the microbatches of a step, and DDP by the ranks; the loss is
multiplied by both. Cost: that of a toy; it runs on a CPU.

    torchmix init --demo demo
    accelerate launch --cpu --num-processes 2 examples/accelerate/train.py demo/recipe.yaml --steps 4 --save step-4
    accelerate launch --cpu --num-processes 4 examples/accelerate/train.py demo/recipe.yaml --steps 8 --load step-4
"""

import argparse
import sys

import torch
from accelerate import Accelerator

sys.path.append(f"{sys.path[0]}/../ddp")
from tiny_gpt import TinyGPT, loss_sum

import torchmix


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--load", metavar="FOLDER", help="continue from a checkpoint")
    parser.add_argument("--save", metavar="FOLDER", help="write a checkpoint at the end")
    parser.add_argument("--accept-edit", metavar="CODE", help="the recipe was edited since the checkpoint")
    asked = parser.parse_args()
    recipe, accelerator = torchmix.load_recipe(asked.recipe), Accelerator()
    torchmix.fixed_microbatches(recipe, dp=accelerator.num_processes)  # or it is refused
    torch.manual_seed(recipe.seed)
    model = TinyGPT(vocab=257, length=recipe.batch.length)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torchmix.build_loader(
        asked.recipe,
        micro_batch_size=asked.micro_batch_size,
        max_steps=asked.steps,
        accept_edit=asked.accept_edit,
    )
    with loader:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        accelerator.gradient_accumulation_steps = loader.num_microbatches
        if asked.load:
            accelerator.load_state(asked.load)
        step_loss = torch.zeros((), device=accelerator.device)
        for microbatch in loader:
            microbatch = microbatch.to(accelerator.device, non_blocking=True)
            with accelerator.accumulate(model):
                logits = model(microbatch.tokens, microbatch.position_ids, microbatch.cu_seqlens_padded)
                loss = loss_sum(logits, microbatch.labels, microbatch.loss_mask) / microbatch.num_tokens_global
                accelerator.backward(loss * accelerator.num_processes * microbatch.num_microbatches)
                optimizer.step()
                optimizer.zero_grad()
            step_loss += loss.detach()
            if microbatch.is_last_of_step:
                total = accelerator.reduce(step_loss)
                accelerator.print(f"step {microbatch.step} loss {total:.5f} digest {loader.order_digest}", flush=True)
                step_loss.zero_()
        if asked.save:
            accelerator.save_state(asked.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
