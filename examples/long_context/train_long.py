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
from collections import Counter
from pathlib import Path
from typing import Any

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
    """What each token of a rank attends to among the tokens of its bin."""

    def __init__(self, microbatch: Microbatch, run: ContextGroup) -> None:
        padded, true = microbatch.cu_seqlens_padded.long(), microbatch.cu_seqlens.long()
        slices = [places_of_slice(padded, microbatch.tokens_int32.numel(), index) for index in range(len(run.ranks))]
        mine, all_places = slices[run.index], torch.cat(slices)
        document = torch.searchsorted(padded, all_places, right=True) - 1
        is_real = all_places - padded[document] < true.diff()[document]
        of_mine = torch.searchsorted(padded, mine, right=True) - 1
        before = (of_mine[:, None] == document[None, :]) & (all_places[None, :] <= mine[:, None])
        # Padding attends to itself, so that no row is without a key.
        self.mask = (before & is_real[None, :]) | (all_places[None, :] == mine[:, None])
        self.run = run


class Block(nn.Module):
    """Causal attention inside documents, over the ranks of a run, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, seen: Seen) -> torch.Tensor:
        """x [T, width] of this rank."""
        qkv = self.qkv(self.norms[0](x)).view(len(x), 3, HEADS, -1)
        query = qkv[:, 0].transpose(0, 1)
        key, value = gathered(qkv[:, 1:], seen.run).permute(1, 2, 0, 3)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen.mask)
        x = x + self.out(attended.transpose(0, 1).reshape(len(x), WIDTH))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A causal transformer over a rank's slice of a bin."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def loss(self, microbatch: Microbatch, run: ContextGroup) -> torch.Tensor:
        """Sum of the losses of the rank's tokens."""
        x = (self.embed(microbatch.tokens) + self.position(microbatch.position_ids)).flatten(0, 1)
        seen = Seen(microbatch, run)
        for block in self.blocks:
            x = block(x, seen)
        return nn.functional.cross_entropy(self.head(x), microbatch.labels_int32.long().flatten(), reduction="sum")


def train_step(model: Model, microbatches: list[Microbatch], groups: ContextGroups) -> torch.Tensor:
    """Gradients of a step, summed over all ranks; returns the mean loss of the global batch."""
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for microbatch in microbatches:
        part = model.loss(microbatch, groups[microbatch.cp_ranks]) / microbatch.num_tokens_global
        part.backward()
        loss += part.detach()
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
