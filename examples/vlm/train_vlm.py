"""A small vision-language model on the ranks of torchrun: images are encoded by all, text is trained on by replicas.

    python examples/vlm/make_pictures.py runs/pictures
    torchmix index examples/vlm/recipe.yaml
    torchrun --nproc-per-node 4 examples/vlm/train_vlm.py examples/vlm/recipe.yaml --steps 300

Every rank encodes some images of the step, wherever their text is; `route` brings their rows to the ranks that train on
the text, and brings the gradients back. Tensor-parallel ranks hold whole copies here, and do the same work.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchmix
from torchmix.constructor.fields import Microbatch, ModuleBatch
from torchmix.parallel import HeldRows, Topology, place_rows, route

WIDTH, HEADS, LAYERS = 64, 4, 2
PATCH, MERGE, VOCAB = 8, 2, 260
MOST_SIDE = 16
"""Patches of the side of the largest image."""


class Block(nn.Module):
    """Attention inside segments, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x [tokens, width], mask [tokens, tokens] of what attends to what."""
        q, k, v = self.qkv(self.norms[0](x)).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(0, 1).reshape(len(x), WIDTH))
        return x + self.mlp(self.norms[1](x))


def same_segment(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[tokens, tokens] whether two tokens are of one segment."""
    number = torch.searchsorted(cu_seqlens.long(), torch.arange(num_tokens), right=True)
    return number[:, None] == number[None, :]


class Encoder(nn.Module):
    """Patches -> a row for each block of MERGE x MERGE of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.row, self.column = nn.Embedding(MOST_SIDE, WIDTH), nn.Embedding(MOST_SIDE, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.merge = nn.Linear(MERGE * MERGE * WIDTH, WIDTH)

    def forward(self, batch: ModuleBatch, pixels: torch.Tensor) -> torch.Tensor:
        """[rows, width]; no rows for a rank without images."""
        places = [self._places(int(rows), int(columns)) for _, rows, columns in batch.arrays["grid_thw"].tolist()]
        place = torch.cat(places) if places else torch.zeros(0, 2, dtype=torch.long)
        x = self.embed(pixels.float() / 127.5 - 1) + self.row(place[:, 0]) + self.column(place[:, 1])
        mask = same_segment(batch.cu_seqlens, len(x))
        for block in self.blocks:
            x = block(x, mask)
        rows: torch.Tensor = self.merge(x.reshape(-1, MERGE * MERGE * WIDTH))
        return rows

    @staticmethod
    def _places(rows: int, columns: int) -> torch.Tensor:
        """Row and column of each patch, in the order in which patches come: by blocks."""
        grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
        blocks = grid.view(rows // MERGE, MERGE, columns // MERGE, MERGE, 2).transpose(1, 2)
        return blocks.reshape(-1, 2)


class LanguageModel(nn.Module):
    """A causal transformer over one microbatch at a time."""

    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, vocab)

    def loss(self, microbatch: Microbatch, rows: torch.Tensor, routes: Any) -> torch.Tensor:
        """Sum of the losses of the microbatch's tokens."""
        return self.losses(microbatch, (rows, routes)).sum()

    def losses(self, microbatch: Microbatch, *of_modules: tuple[torch.Tensor, Any]) -> torch.Tensor:
        """The loss of each token, 0 where it has no label, with the received rows of some modules."""
        embedded = self.embed(microbatch.tokens)
        for rows, routes in of_modules:
            embedded = place_rows(embedded, rows, routes, microbatch.index)
        x = (embedded + self.position(microbatch.position_ids)).flatten(0, 1)
        mask = same_segment(microbatch.cu_seqlens_padded, len(x)) & torch.ones(len(x), len(x)).tril().bool()
        for block in self.blocks:
            x = block(x, mask)
        labels = microbatch.labels_int32.long().flatten()
        return nn.functional.cross_entropy(self.head(x), labels, reduction="none")


def permuted(batch: ModuleBatch) -> torch.Tensor:
    """The pixels of each image replaced by those of another one of the same size."""
    pixels, stops = batch.arrays["pixel_values"].clone(), batch.cu_seqlens.tolist()
    grids = [tuple(grid) for grid in batch.arrays["grid_thw"].tolist()]
    for grid in set(grids):
        alike = [number for number, other in enumerate(grids) if other == grid]
        for number, other in zip(alike, alike[1:] + alike[:1], strict=True):
            pixels[stops[number] : stops[number + 1]] = batch.arrays["pixel_values"][stops[other] : stops[other + 1]]
    return pixels


def steps_of(loader: Any) -> Any:
    """Microbatches by step."""
    step: list[Microbatch] = []
    for microbatch in loader:
        step.append(microbatch)
        if microbatch.is_last_of_step:
            yield step
            step = []


def held_out_losses(recipe: str, topology: Topology, encoder: Encoder, model: LanguageModel) -> list[float]:
    """Mean losses of a few held-out steps: with their images, and with others."""
    sums, num_tokens = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    with torch.no_grad(), torchmix.build_loader(recipe, topology=topology, part="validation", max_steps=2) as loader:
        for step in steps_of(loader):
            batch = step[0].modules["vision"]
            for number, pixels in enumerate((batch.arrays["pixel_values"], permuted(batch))):
                rows = route(encoder(batch, pixels), batch.routes)
                for microbatch in step:
                    sums[number] += model.loss(microbatch, rows, batch.routes).double()
            num_tokens += sum((microbatch.labels_int32 >= 0).sum() for microbatch in step)
    if dist.is_initialized():
        dist.all_reduce(sums)
        dist.all_reduce(num_tokens)
    return (sums / num_tokens).tolist()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--save", type=Path, help="file of the checkpoint, written after the last step")
    parser.add_argument("--load", type=Path, help="checkpoint to resume from")
    asked = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    topology = Topology.from_torchrun(tp=asked.tp)
    torch.manual_seed(1)
    encoder, model = Encoder(), LanguageModel()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *model.parameters()], lr=3e-3)
    with torchmix.build_loader(asked.recipe, topology=topology, micro_batch_size=2, max_steps=asked.steps) as loader:
        if asked.load is not None:
            saved = torch.load(asked.load, weights_only=True)
            encoder.load_state_dict(saved["encoder"])
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["data"])
        for step in steps_of(loader):
            batch = step[0].modules["vision"]
            optimizer.zero_grad()
            held = HeldRows(route(encoder(batch, batch.arrays["pixel_values"]), batch.routes))
            loss = torch.zeros(())
            for microbatch in step:
                part = model.loss(microbatch, held.rows, batch.routes) / microbatch.num_tokens_global
                part.backward()
                loss += part.detach()
            held.give_back()
            for parameter in (*encoder.parameters(), *model.parameters()):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                if dist.is_initialized():
                    dist.all_reduce(parameter.grad)  # a sum over ranks: each has its part of the global batch
            for parameter in model.parameters():
                parameter.grad /= asked.tp  # TP ranks hold copies here, and each had the same gradient
            optimizer.step()
            if dist.is_initialized():
                dist.all_reduce(loss)
            if topology.rank == 0 and (step[0].step % 20 == 0 or step[0].step == asked.steps - 1):
                print(f"step {step[0].step}: loss {float(loss) / asked.tp:.6f}", flush=True)
        if asked.save is not None and topology.rank == 0:
            states = {"encoder": encoder.state_dict(), "model": model.state_dict(), "data": loader.state_dict()}
            torch.save({**states, "optimizer": optimizer.state_dict()}, asked.save)
    seen, blind = held_out_losses(asked.recipe, topology, encoder, model)
    if topology.rank == 0:
        print(f"held out: loss {seen:.4f}, with other images {blind:.4f}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
