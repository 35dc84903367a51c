"""One small model of texts, pictures, clips and sounds: each kind has an encoder over all ranks of torchrun.

    python examples/omni/make_items.py runs/omni
    torchmix index examples/omni/recipe.yaml
    torchrun --nproc-per-node 4 examples/omni/train_omni.py examples/omni/recipe.yaml --steps 300

Each rank encodes some items of each kind, wherever their texts are; the blocks and the language model are those of
`examples/vlm`. Before and after training the losses of held-out texts are printed by source, with their items and with
those of another row.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import torchmix
from torchmix.constructor.fields import Microbatch, ModuleBatch
from torchmix.parallel import HeldRows, Topology, route

sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "vlm"))

from train_vlm import LAYERS, WIDTH, Block, LanguageModel, same_segment, steps_of

VOCAB, MOST_PLACES = 266, 64
UNITS = {"vision": "pixel_values", "watching": "pixel_values_videos", "hearing": "input_features"}
VALUES = {"vision": 3 * 8 * 8, "watching": 3 * 2 * 8 * 8, "hearing": 2 * 16}
"""By module, the values of a unit."""
MERGE = {"vision": 4, "watching": 4, "hearing": 1}
"""Units of a row."""
SOURCES = ("clips", "pictures", "sounds", "texts")
"""In the order of `source_index`."""


class Encoder(nn.Module):
    """Units of one kind -> rows; a unit sees those of its segment."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(VALUES[module], WIDTH), nn.Embedding(MOST_PLACES, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.merge = nn.Linear(MERGE[module] * WIDTH, WIDTH)

    def forward(self, batch: ModuleBatch, units: torch.Tensor) -> torch.Tensor:
        """[rows, width]; no rows for a rank without such items."""
        borders = batch.cu_seqlens.long()
        place = torch.arange(len(units)) - borders[:-1].repeat_interleave(borders.diff())
        values = units.float() / 127.5 - 1 if units.dtype == torch.uint8 else units
        x = self.embed(values) + self.place(place)
        mask = same_segment(batch.cu_seqlens, len(x))
        for block in self.blocks:
            x = block(x, mask)
        rows: torch.Tensor = self.merge(x.reshape(-1, self.merge.in_features))
        return rows


def swapped(batch: ModuleBatch, units: torch.Tensor) -> torch.Tensor:
    """The units of each item replaced by those of another one of as many."""
    found, counts = units.clone(), batch.units.tolist()
    stops = [0, *batch.units.cumsum(0).tolist()]
    for count in set(counts):
        alike = [number for number, other in enumerate(counts) if other == count]
        for number, other in zip(alike, alike[1:] + alike[:1], strict=True):
            found[stops[number] : stops[number + 1]] = units[stops[other] : stops[other + 1]]
    return found


def of_sources(loss: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
    """Sums of losses, and numbers of tokens with a label, [2, sources]."""
    of = microbatch.source_index.flatten().long().clamp(min=0)
    has_label = (microbatch.labels_int32 >= 0).flatten().double()
    sums = [torch.zeros(len(SOURCES), dtype=torch.float64) for _ in range(2)]
    return torch.stack([one.index_add(0, of, part) for one, part in zip(sums, (loss.double(), has_label), strict=True)])


def held_out(
    recipe: str, topology: Topology, encoders: nn.ModuleDict, model: LanguageModel, steps: int
) -> list[list[float]]:
    """Mean losses of held-out texts by source: with their items, and with others."""
    sums = torch.zeros(2, 2, len(SOURCES), dtype=torch.float64)
    options = {"topology": topology, "part": "validation", "micro_batch_size": 2, "max_steps": steps}
    with torch.no_grad(), torchmix.build_loader(recipe, **options) as loader:
        for step in steps_of(loader):
            for way, change in enumerate((lambda _, units: units, swapped)):
                placed = []
                for name, encoder in encoders.items():
                    batch = step[0].modules[name]
                    rows = route(encoder(batch, change(batch, batch.arrays[UNITS[name]])), batch.routes)
                    placed.append((rows, batch.routes))
                for microbatch in step:
                    sums[way] += of_sources(model.losses(microbatch, *placed), microbatch)
    if dist.is_initialized():
        dist.all_reduce(sums)
    found: list[list[float]] = (sums[:, 0] / sums[:, 1]).tolist()
    return found


def train(
    recipe: str, topology: Topology, encoders: nn.ModuleDict, model: LanguageModel, steps: int
) -> Iterator[float]:
    """The loss of each step."""
    weights = [*encoders.parameters(), *model.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    with torchmix.build_loader(recipe, topology=topology, micro_batch_size=2, max_steps=steps) as loader:
        for step in steps_of(loader):
            optimizer.zero_grad()
            held = []
            for name, encoder in encoders.items():
                batch = step[0].modules[name]
                held.append((HeldRows(route(encoder(batch, batch.arrays[UNITS[name]]), batch.routes)), batch.routes))
            total = torch.zeros(())
            for microbatch in step:
                placed = [(one.rows, routes) for one, routes in held]
                loss = model.losses(microbatch, *placed).sum() / microbatch.num_tokens_global
                loss.backward()
                total += loss.detach()
            for one, _ in held:  # in one order on all ranks
                one.give_back()
            for weight in weights:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                if dist.is_initialized():
                    dist.all_reduce(weight.grad)  # a sum over ranks: each has its part of the global batch
            optimizer.step()
            if dist.is_initialized():
                dist.all_reduce(total)
            yield float(total)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--held-out-steps", type=int, default=2)
    asked = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    topology = Topology.from_torchrun()
    torch.manual_seed(1)
    encoders, model = nn.ModuleDict({name: Encoder(name) for name in UNITS}), LanguageModel(VOCAB)
    before = held_out(asked.recipe, topology, encoders, model, asked.held_out_steps)
    for number, loss in enumerate(train(asked.recipe, topology, encoders, model, asked.steps)):
        if topology.rank == 0 and (number % 20 == 0 or number == asked.steps - 1):
            print(f"step {number}: loss {loss:.4f}", flush=True)
    after = held_out(asked.recipe, topology, encoders, model, asked.held_out_steps)
    if topology.rank == 0:
        for number, source in enumerate(SOURCES):
            told = f"loss {before[0][number]:.4f} before, {after[0][number]:.4f} after"
            print(f"held out {source}: {told}, {after[1][number]:.4f} with other items", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
