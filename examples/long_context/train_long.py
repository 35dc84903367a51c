"""A small transformer on documents of any length: each microbatch says how many ranks share its documents.

    python examples/long_context/make_texts.py runs/texts
    torchmix index examples/long_context/recipe.yaml
    torchrun --nproc-per-node 8 examples/long_context/train_long.py examples/long_context/recipe.yaml --steps 40

The runs of ranks were planned before a byte was read, so no rank asks another how long its documents are. Attention
gathers keys and values of the run's other ranks, and brings their gradients back; all other layers need nothing of
another rank.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn

import torchmix
from torchmix.constructor.fields import Microbatch, places_of_slice
from torchmix.parallel import ContextGroup, ContextGroups, Topology, context_groups

WIDTH, HEADS, LAYERS = 64, 4, 2
VOCAB = 260


class _Gathered(torch.autograd.Function):
    """[T, ...] of each rank of a run -> [T * ranks, ...] of all, by slice; gradients are summed and cut again."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, run: ContextGroup) -> torch.Tensor:
        ctx.run = run
        parts = [torch.empty_like(own) for _ in run.ranks]
        dist.all_gather(parts, own.contiguous(), group=run.group)
        return torch.cat([parts[place] for place in run.place_of_slice])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.run.group)
        return total.chunk(len(ctx.run.ranks))[ctx.run.index], None


def gathered(own: torch.Tensor, run: ContextGroup) -> torch.Tensor:
    """What all ranks of the run have, by slice."""
    return own if run.group is None else _Gathered.apply(own, run)


class Seen:
    """Which tokens of its document each token of a rank attends to; all ranks have equally many of a document."""

    def __init__(self, microbatch: Microbatch, run: ContextGroup) -> None:
        padded, ranks = microbatch.cu_seqlens_padded.long(), len(run.ranks)
        own_tokens = microbatch.tokens_int32.numel()
        slices = torch.stack([places_of_slice(padded, own_tokens, index) for index in range(ranks)])
        self.run, self.parts = run, (padded.diff() // ranks).tolist()
        ends = (padded[:-1] + microbatch.cu_seqlens.long().diff()).tolist()
        self.masks = []
        for places, end in zip(slices.split(self.parts, dim=1), ends, strict=True):
            mine, others = places[run.index][:, None], places.flatten()[None, :]
            # Padding attends to itself, so that no row is without a key.
            self.masks.append((others <= mine) & (others < end) | (others == mine))


class Block(nn.Module):
    """Causal attention inside documents, over the ranks of a run, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, seen: Seen) -> torch.Tensor:
        """x [T, width] of this rank."""
        qkv = self.qkv(self.norms[0](x)).view(len(x), 3, HEADS, -1)
        keys = gathered(qkv[:, 1:], seen.run).unflatten(0, (len(seen.run.ranks), len(x)))
        attended = []
        for query, pair, mask in zip(
            qkv[:, 0].split(seen.parts), keys.split(seen.parts, dim=1), seen.masks, strict=True
        ):
            key, value = pair.flatten(0, 1).permute(1, 2, 0, 3)
            of_document = nn.functional.scaled_dot_product_attention(query.transpose(0, 1), key, value, attn_mask=mask)
            attended.append(of_document.transpose(0, 1).flatten(1))
        x = x + self.out(torch.cat(attended))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A causal transformer over a rank's slice of a bin."""

    def __init__(self, length: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(LAYERS)])
        self.head = nn.Linear(width, VOCAB)

    def loss(self, microbatch: Microbatch, run: ContextGroup) -> torch.Tensor:
        """Sum of the losses of the rank's tokens."""
        x = (self.embed(microbatch.tokens) + self.position(microbatch.position_ids)).flatten(0, 1)
        seen = Seen(microbatch, run)
        for block in self.blocks:
            x = block(x, seen)
        return nn.functional.cross_entropy(self.head(x), microbatch.labels_int32.long().flatten(), reduction="sum")


def train_step(
    model: Model, microbatches: list[Microbatch], groups: ContextGroups, timings: TextIO | None = None
) -> torch.Tensor:
    """Gradients of a step, summed over all ranks; returns the mean loss of the global batch.

    `timings` is a file for the processor's seconds of each microbatch.
    """
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for microbatch in microbatches:
        began = time.process_time()
        part = model.loss(microbatch, groups[microbatch.cp_ranks]) / microbatch.num_tokens_global
        part.backward()
        loss += part.detach()
        if timings is not None:
            lengths = " ".join(map(str, microbatch.cu_seqlens.diff().tolist()))
            spent, first = time.process_time() - began, microbatch.cp_ranks.start
            print(
                f"{lengths},{spent:.6f},{microbatch.cp_size},{microbatch.step},{microbatch.index},{first}", file=timings
            )
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        dist.all_reduce(loss)
    return loss


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cp", type=int, default=1, help="only how ranks are numbered: runs are of all ranks")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    parser.add_argument("--save", type=Path, help="file of the checkpoint, written after the last step")
    parser.add_argument("--load", type=Path, help="checkpoint to resume from")
    asked = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    topology = Topology.from_torchrun(cp=asked.cp)
    recipe = torchmix.load_recipe(asked.recipe)
    groups = context_groups(topology, recipe.balance.context.sizes)
    torch.manual_seed(1)
    model = Model(int(recipe.batch.length))
    model = model.double() if asked.double else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    runs: Counter[int] = Counter()
    with torchmix.build_loader(asked.recipe, topology=topology, max_steps=asked.steps) as loader:
        if asked.load is not None:
            saved = torch.load(asked.load, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["data"])
        step: list[Microbatch] = []
        for microbatch in loader:
            step.append(microbatch)
            runs[microbatch.cp_size] += 1
            if microbatch.is_last_of_step:
                optimizer.zero_grad()
                loss = train_step(model, step, groups)
                optimizer.step()
                if topology.rank == 0:
                    print(f"step {microbatch.step}: {len(step)} microbatches, loss {float(loss):.9f}", flush=True)
                step = []
        if asked.save is not None and topology.rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}
            torch.save(states, asked.save)
    if topology.rank == 0:
        shown = ", ".join(f"{count} of {size}" for size, count in sorted(runs.items()))
        print(f"rank 0 has shared microbatches among so many ranks: {shown}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
