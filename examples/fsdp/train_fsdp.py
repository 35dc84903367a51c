"""Training with torch's FSDP2 and tensor parallelism from one DeviceMesh, and nothing of Megatron's.

In: a recipe. Out: a line a step on rank 0: loss and digest of the order; with --save a folder of torch's distributed
checkpoint with model, optimizer and loader, from which a job with another mesh continues. The steps are those of one
rank, up to the order of float additions, at any mesh and across a change of it. It runs on CPUs.

    torchmix init --demo demo
    torchrun --nproc-per-node 4 examples/fsdp/train_fsdp.py demo/recipe.yaml --tp 2 --steps 4 --save step-4
    torchrun --nproc-per-node 4 examples/fsdp/train_fsdp.py demo/recipe.yaml --tp 1 --steps 8 --load step-4
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import torchmix

HIDDEN, HEAD, LAYERS = 64, 16, 2
TP_PLAN: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
TP_PLAN |= {"out": RowwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    """Attention inside documents and a feed-forward layer; under tensor parallelism each rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """x: [tokens, HIDDEN], end to end; lengths: tokens of each document."""
        y = self.norm1(x)
        heads = [part(y).unflatten(-1, (-1, HEAD)).transpose(0, 1) for part in (self.q, self.k, self.v)]
        documents = zip(*(tensor.split(lengths, dim=1) for tensor in heads), strict=True)
        seen = [scaled_dot_product_attention(*document, is_causal=True) for document in documents]
        x = x + self.out(torch.cat(seen, dim=1).transpose(0, 1).flatten(1))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embeddings, blocks, logits."""

    def __init__(self, *, vocab: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, HIDDEN), nn.Embedding(length, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, vocab)

    def forward(self, tokens: Tensor, position_ids: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        """tokens, position_ids: int64 [samples, length] -> [samples * length, vocab]."""
        lengths = [length for length in cu_seqlens_padded.diff().tolist() if length]
        x = (self.token(tokens) + self.position(position_ids)).flatten(0, 1)
        for block in self.blocks:
            x = block(x, lengths)
        logits: Tensor = self.head(self.norm(x))
        return logits


def parallel(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Divide the blocks over the mesh's "tp", then shard all over its "dp_shard"."""
    for block in model.blocks:
        if mesh["tp"].size() > 1:
            parallelize_module(block, mesh["tp"], TP_PLAN)
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    return model


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--steps", type=int, default=10, help="stop before this step, counted from the run's beginning")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=257)
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="resume from this checkpoint")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write a checkpoint at the end")
    parser.add_argument("--accept-edit", metavar="CODE", help="the recipe was edited since the checkpoint")
    arguments = parser.parse_args()
    recipe = torchmix.load_recipe(arguments.recipe)

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dp = int(os.environ["WORLD_SIZE"]) // arguments.tp
    mesh = init_device_mesh(kind, (dp, arguments.tp), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(recipe.seed)  # every rank begins with the same weights and keeps its shards of them
    model = parallel(Transformer(vocab=arguments.vocab, length=recipe.batch.length).to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # parameters lie on two meshes

    places = torchmix.ClientPlaceTree.from_device_mesh(mesh)
    with torchmix.build_loader(
        arguments.recipe,
        topology=places,
        micro_batch_size=arguments.micro_batch_size,
        max_steps=arguments.steps,
        accept_edit=arguments.accept_edit,
    ) as loader:

        def parts() -> dict[str, Any]:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            return {"model": model_state, "optimizer": optimizer_state, "loader": loader.state_dict()}

        if arguments.load is not None:
            saved = parts()
            dcp.load(saved, checkpoint_id=arguments.load)
            set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
            loader.load_state_dict(saved["loader"])
        step_loss = torch.zeros((), device=device)
        for microbatch in loader:
            microbatch = microbatch.to(device, non_blocking=True)
            logits = model(microbatch.tokens, microbatch.position_ids, microbatch.cu_seqlens_padded)
            losses = cross_entropy(logits, microbatch.labels.flatten(), reduction="none")
            loss = torch.sum(losses * microbatch.loss_mask.flatten()) / microbatch.num_tokens_global
            model.set_requires_gradient_sync(microbatch.is_last_of_step)
            (loss * dp).backward()  # FSDP averages gradients over its ranks, and the sum is wanted
            step_loss += loss.detach()
            if not microbatch.is_last_of_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(step_loss, group=mesh["dp_shard"].get_group())
            if dist.get_rank() == 0:
                print(f"step {microbatch.step} loss {step_loss.item():.5f} digest {loader.order_digest}", flush=True)
            step_loss.zero_()
        if arguments.save is not None:
            dcp.save(parts(), checkpoint_id=arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
