"""Training with torch's DDP, and nothing of Megatron's.

In: a recipe. Out: a line a step on rank 0: loss, norm of the gradient, seconds waited for data, digest of the order;
with --save a checkpoint of model, optimizer and loader; with --prometheus a file of figures for each rank. Must hold:
with any number of ranks, and across a resume at another number, the steps are those of one rank, up to the order of
float additions. Cost: that of a toy; it runs on a CPU.

    torchmix init --demo demo
    torchrun --nproc-per-node 2 examples/ddp/train_ddp.py demo/recipe.yaml --steps 4

With --endpoints and --keys it asks the loaders of torchmix serve, as the jobs in examples/kubernetes and examples/slurm
do.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_gpt import TinyGPT, loss_sum
from torch.nn.parallel import DistributedDataParallel

import torchmix


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=257)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint at the end, and resume from one")
    parser.add_argument("--accept-edit", metavar="CODE", help="the recipe was edited since the checkpoint")
    parser.add_argument("--prometheus", type=Path, metavar="FOLDER", help="write a file of figures for each rank")
    parser.add_argument("--endpoints", help="ask the loaders that register in this folder, or listen at this address")
    parser.add_argument("--keys", help="keys of a client of these loaders")
    arguments = parser.parse_args()
    recipe = torchmix.load_recipe(arguments.recipe)

    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if has_cuda else "gloo")
    torch.manual_seed(recipe.seed)
    model = DistributedDataParallel(TinyGPT(vocab=arguments.vocab, length=recipe.batch.length).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    asked = {"endpoints": arguments.endpoints, "keys": arguments.keys}
    asked = {name: value for name, value in asked.items() if value is not None}
    with torchmix.build_loader(
        arguments.recipe,
        micro_batch_size=arguments.micro_batch_size,
        loaders={"where": "remote", **asked} if asked else "in_process",
        max_steps=arguments.steps,
        accept_edit=arguments.accept_edit,
    ) as loader:
        if arguments.save is not None and arguments.save.exists():
            saved = torch.load(arguments.save, map_location=device, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict({"torchmix_state": bytes(saved["loader"].cpu().numpy())})
        step_loss = torch.zeros((), device=device)
        for microbatch in loader:
            microbatch = microbatch.to(device, non_blocking=True)
            # DDP averages gradients over ranks, so the sum over all tokens of the step is world_size times that.
            scale = dist.get_world_size() / microbatch.num_tokens_global
            with nullcontext() if microbatch.is_last_of_step else model.no_sync():
                logits = model(microbatch.tokens, microbatch.position_ids, microbatch.cu_seqlens_padded)
                loss = loss_sum(logits, microbatch.labels, microbatch.loss_mask)
                (loss * scale).backward()
            step_loss += loss.detach() / microbatch.num_tokens_global
            if not microbatch.is_last_of_step:
                continue
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(step_loss)
            stats = loader.stats()
            if dist.get_rank() == 0:
                print(
                    f"step {microbatch.step} loss {step_loss.item():.5f} norm {norm.item():.5f} "
                    f"wait {stats['data_wait_s']:.3f} s digest {loader.order_digest}",
                    flush=True,
                )
            if arguments.prometheus is not None:
                write_figures(arguments.prometheus / f"torchmix-{dist.get_rank()}.prom", stats)
            step_loss.zero_()
        if arguments.save is not None and dist.get_rank() == 0:
            state = torch.frombuffer(bytearray(loader.state_dict()["torchmix_state"]), dtype=torch.uint8)
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": state}
            torch.save(parts, arguments.save)
    dist.destroy_process_group()


def write_figures(path: Path, stats: dict[str, object]) -> None:
    """Replace a file that the textfile collector of node_exporter reads; it never sees half of one."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(torchmix.prometheus_text(stats, {"rank": dist.get_rank()}), encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    main()
