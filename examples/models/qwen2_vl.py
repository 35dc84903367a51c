"""Qwen2-VL of transformers on torchmix's batches: each rank runs the tower on its images, and the model on its texts.

    torchmix index recipe.yaml
    torchrun --nproc-per-node 4 examples/models/qwen2_vl.py recipe.yaml models/Qwen2-VL-2B --steps 100

Qwen2.5-VL is the same with its class, and with videos whose positions count seconds. docs/models.md goes through it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

import torchmix
from torchmix.constructor.fields import Microbatch, ModuleBatch
from torchmix.parallel import HeldRows, Routes, Topology, place_rows, route

GRIDS = ("grid_thw", "video_grid_thw")
Rows = Mapping[str, tuple[torch.Tensor, Routes]]
"""By module, the rows that this rank got for its texts, and where they go."""


def encoded(model: Any, batch: ModuleBatch, tower: Callable[[ModuleBatch], torch.Tensor]) -> torch.Tensor:
    """Rows of the images or videos that this rank encodes, [rows, width]; there may be none."""
    visual = model.model.visual
    pixels = tower(batch)
    if not len(pixels):  # the rank takes part in the exchange all the same, forth and back
        return sum(weight.sum() for weight in visual.parameters()) * pixels.new_zeros(0, model.lm_head.in_features)
    [grid] = [batch.arrays[name] for name in GRIDS if name in batch.arrays]
    rows: torch.Tensor = visual(pixels.to(visual.dtype), grid_thw=grid.long()).pooler_output
    return rows


def logits_of(
    model: Any, microbatch: Microbatch, rows: Rows, *, tokens_per_second: float | None = None
) -> torch.Tensor:
    """Logits of a microbatch, [B, T, vocabulary]: documents do not see each other."""
    embeddings = model.get_input_embeddings()(microbatch.tokens)
    for received, routes in rows.values():
        embeddings = place_rows(embeddings, received, routes, microbatch.index)
    places = microbatch.mrope_position_ids(*rows, tokens_per_second=tokens_per_second, past_time=False)
    # The first of four begins at 0 in each document, and tells transformers where attention stops.
    positions = torch.cat([microbatch.position_ids[None], places])
    text = model.model.language_model(inputs_embeds=embeddings, position_ids=positions, use_cache=False)
    logits: torch.Tensor = model.lm_head(text.last_hidden_state)
    return logits


def loss_of(logits: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
    """This microbatch's part of the mean loss of the whole step."""
    labels = microbatch.labels_int32.long().flatten()
    summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum")
    return summed / microbatch.num_tokens_global


def steps_of(loader: Iterable[Microbatch]) -> Iterator[list[Microbatch]]:
    """Microbatches by step."""
    step: list[Microbatch] = []
    for microbatch in loader:
        step.append(microbatch)
        if microbatch.is_last_of_step:
            yield step
            step = []


def train(model: Any, recipe: str, topology: Topology, *, steps: int, rate: float = 1e-4) -> list[float]:
    """Train, and give the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    names = [
        name for name, module in torchmix.load_recipe(recipe).modules.items() if module.items in ("image", "video")
    ]
    towers = {name: torchmix.open_tower(recipe, name) for name in names}
    losses = []
    with torchmix.build_loader(recipe, topology=topology, max_steps=steps) as loader:
        for step in steps_of(loader):
            batches = {name: step[0].modules[name] for name in names}
            held = {
                name: HeldRows(route(encoded(model, batch, towers[name]), batch.routes))
                for name, batch in batches.items()
            }
            total = torch.zeros(())
            for microbatch in step:
                rows = {name: (one.rows, batches[name].routes) for name, one in held.items()}
                loss = loss_of(logits_of(model, microbatch, rows), microbatch)
                loss.backward()
                total += loss.detach()
            for one in held.values():
                one.give_back()
            for weight in model.parameters():
                if dist.is_initialized():
                    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                    dist.all_reduce(weight.grad)
            if dist.is_initialized():
                dist.all_reduce(total)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(total))
    return losses


def main() -> None:
    """Train a model of a folder."""
    from transformers import AutoModelForImageTextToText

    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    topology = Topology(rank=int(os.environ.get("RANK", "0")), dp=world)
    model = AutoModelForImageTextToText.from_pretrained(asked.model, dtype=torch.float32, attn_implementation="eager")
    for number, loss in enumerate(train(model, asked.recipe, topology, steps=asked.steps)):
        if topology.rank == 0:
            print(f"step {number}: loss {loss:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
