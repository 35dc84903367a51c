"""One real rank that runs a step of images and text by megatron-core's own schedule.

    RANK=.. WORLD_SIZE=.. MASTER_..=.. python -m tests.support.megatron_image_rank RECIPE OUT TP PP STEPS

The language model is core's GPT, and the encoder one matrix on the mean of each block of patches. Out: OUT/RANK.npz
with the losses of each step on last stages, and the gradient of the encoder on this rank, summed over the steps.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.support.megatron_model import HIDDEN, build_chunks

import torchmix
from tests.support.example import example_module
from torchmix.constructor.fields import ModuleBatch
from torchmix.megatron_adapter.batch import fields_of, params_of_boundaries
from torchmix.megatron_adapter.microbatches import SharedMicrobatches, place_images, with_images
from torchmix.parallel import Topology
from torchmix.recipe.load import load_recipe

MERGED = 4
"""Patches of a block."""


def encoded(batch: ModuleBatch, weight: Tensor) -> Tensor:
    """A row for each block of patches."""
    pixels = batch.arrays["pixel_values"].to(torch.float32) / 255
    return pixels.reshape(-1, MERGED, pixels.shape[-1]).mean(1) @ weight


def loss_of(loss_mask: Tensor, output: Tensor, *, losses: list[float]) -> Any:
    total = (output.float() * loss_mask.float()).sum()
    losses.append(float(total))
    return total, loss_mask.sum().to(torch.int), {"lm loss": total.detach()}


def forward_step(data_iterator: Any, chunk: Any, *, losses: list[float]) -> Any:
    """Like that of a script of Megatron's; the embeddings are made here, so that images can stand among them."""
    item = next(data_iterator)
    needs: Any = SimpleNamespace(tokens=chunk.pre_process, labels=chunk.post_process)
    fields = fields_of(item, needs)
    padded = fields["cu_seqlens_padded"]
    embeddings = None
    if chunk.pre_process:
        embedded = chunk.embedding(input_ids=fields["tokens"], position_ids=fields["position_ids"])
        embeddings = place_images(embedded, data_iterator)
    output = chunk(
        fields.get("tokens"),
        fields.get("position_ids"),
        None,
        decoder_input=embeddings,
        labels=fields.get("labels"),
        loss_mask=fields.get("loss_mask"),
        packed_seq_params=params_of_boundaries(padded, padded, int(fields["max_seqlen"])),
    )
    return output, partial(loss_of, fields.get("loss_mask"), losses=losses)


def main(arguments: list[str]) -> None:
    recipe, out = arguments[0], Path(arguments[1])
    tp, pp, steps = map(int, arguments[2:5])
    example_module("cpu").enable()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, pp)
    torch.manual_seed(1)
    from megatron.core.tensor_parallel import random

    random.model_parallel_cuda_manual_seed = lambda *_: None  # there is no CUDA, and no dropout
    length = load_recipe(Path(recipe)).batch.length
    [chunk] = build_chunks(layers=2, length=length, packed=True, vp=None)
    weight = torch.linspace(-1, 1, 48 * HIDDEN).reshape(48, HIDDEN).sin().div(4).requires_grad_()
    topology = Topology.from_torchrun(tp=tp, pp=pp)
    losses: list[float] = []
    by_step: list[float] = []
    schedule = with_images(get_forward_backward_func(), partial(encoded, weight=weight), module="vision")
    with torchmix.build_loader(recipe, topology=topology, max_steps=steps, loaders="in_process") as loader:
        iterator = SharedMicrobatches(iter(loader), part="train", packed=True).new_iterator()
        for _ in range(steps):
            schedule(
                forward_step_func=partial(forward_step, losses=losses),
                data_iterator=iterator,
                model=[chunk],
                num_microbatches=8 // topology.dp,
                seq_length=length,
                micro_batch_size=1,
                forward_only=False,
            )
            by_step.append(sum(losses))
            losses.clear()
    assert weight.grad is not None
    place = topology.coordinates
    np.savez(
        out / f"{topology.rank}.npz",
        place=np.array([place.dp, place.pp, place.tp]),
        losses=np.array(by_step),
        gradient=weight.grad.numpy(),
    )
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
