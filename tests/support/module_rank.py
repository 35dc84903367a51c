"""One real rank that trains a backbone and an encoder of some documents, in float64, for one pass over a few steps.

    RANK=.. WORLD_SIZE=.. MASTER_..=.. python -m tests.support.module_rank RECIPE OUT TP CP PP STEPS

In: a recipe with a module `query`. Out: OUT/RANK.npz with the gradients of this rank, summed over the steps: `encoder`,
`embedding`, and the two matrices of the MLP; a TP rank has a part of each matrix. Rows of the encoder replace
embeddings.
A pipeline has two stages, which send activations by microbatch; each microbatch has its own backward.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import torchmix
from torchmix.constructor.fields import Microbatch, ModuleBatch
from torchmix.parallel import HeldRows, Topology, place_rows, route

VOCAB, WIDTH, INNER = 1000, 8, 12


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        total = gradients[0].clone()
        dist.all_reduce(total, group=context.group)
        return total, None


class Training:
    """The parameters of one rank, and the forward of its stage."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        place = topology.coordinates
        generator = torch.Generator().manual_seed(1)

        def parameter(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.embedding = parameter(VOCAB, WIDTH).requires_grad_()
        self.encoder = (parameter(WIDTH, WIDTH) / 4).requires_grad_()
        shard = slice(place.tp * INNER // topology.tp, (place.tp + 1) * INNER // topology.tp)
        self.inner = parameter(WIDTH, INNER)[:, shard].clone().requires_grad_()
        self.outer = parameter(INNER, WIDTH)[shard].clone().requires_grad_()
        self.head = parameter(WIDTH, VOCAB)
        self.table = parameter(VOCAB, WIDTH)
        self.tp_group = None
        for replica in range(topology.world_size // topology.tp if topology.tp > 1 else 0):
            ranks = list(range(replica * topology.tp, (replica + 1) * topology.tp))
            group = dist.new_group(ranks)
            if topology.rank in ranks:
                self.tp_group = group

    def encode(self, batch: ModuleBatch) -> torch.Tensor:
        """A row for each token, which depends on its whole document."""
        values = self.table[batch.arrays["tokens"].long()]
        document = torch.repeat_interleave(torch.arange(len(batch.units)), batch.units)
        sums = torch.zeros(len(batch.units), WIDTH, dtype=torch.float64).index_add(0, document, values)
        return torch.tanh((values + sums[document]) @ self.encoder)

    def embed(self, microbatch: Microbatch, rows: torch.Tensor, batch: ModuleBatch, index: int) -> torch.Tensor:
        """Embeddings of a first stage."""
        assert microbatch.tokens is not None
        return place_rows(self.embedding[microbatch.tokens], rows, batch.routes, index)

    def loss(self, hidden: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        """The part of the step's loss that this rank has."""
        assert microbatch.labels_int32 is not None
        inner = hidden if self.tp_group is None else _SumBackward.apply(hidden, self.tp_group)
        change = torch.tanh(inner @ self.inner) @ self.outer
        change = change if self.tp_group is None else _SumForward.apply(change, self.tp_group)
        labels = microbatch.labels_int32.long().view(-1)
        scores = ((hidden + change) @ self.head).view(-1, VOCAB)
        return torch.nn.functional.cross_entropy(scores, labels, reduction="sum") / microbatch.num_tokens_global


def train_step(training: Training, step: list[Microbatch]) -> None:
    """One step: the encoder before the schedule, its gradients after it; or both in each microbatch."""
    batch = step[0].modules["query"]
    if any(microbatch.modules["query"] is not batch for microbatch in step):
        for microbatch in step:
            batch = microbatch.modules["query"]
            rows = route(training.encode(batch), batch.routes)
            training.loss(training.embed(microbatch, rows, batch, microbatch.index), microbatch).backward()
        return
    held = HeldRows(route(training.encode(batch), batch.routes))
    topology, place = training.topology, training.topology.coordinates
    if topology.pp == 1:
        for microbatch in step:
            training.loss(training.embed(microbatch, held.rows, batch, microbatch.index), microbatch).backward()
    else:
        other = topology.rank_at(tp=place.tp, cp=place.cp, dp=place.dp, pp=1 - place.pp)
        sent = []
        for microbatch in step:
            if place.pp == 0:
                hidden = training.embed(microbatch, held.rows, batch, microbatch.index)
                sent.append(hidden)
                dist.send(hidden.detach().contiguous(), other)
            else:
                assert microbatch.labels_int32 is not None
                hidden = torch.empty(*microbatch.labels_int32.shape, WIDTH, dtype=torch.float64)
                dist.recv(hidden, other)
                hidden.requires_grad_()
                training.loss(hidden, microbatch).backward()
                sent.append(hidden)
        for hidden in sent:
            if place.pp == 0:
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, other)
                hidden.backward(gradient)
            else:
                assert hidden.grad is not None
                dist.send(hidden.grad.contiguous(), other)
    held.give_back()


def main(arguments: list[str]) -> None:
    recipe, out = arguments[0], Path(arguments[1])
    tp, cp, pp, steps = map(int, arguments[2:])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    topology = torchmix.Topology.from_torchrun(tp=tp, cp=cp, pp=pp)
    training = Training(topology)
    items = 0
    with torchmix.build_loader(recipe, topology=topology, max_steps=steps) as loader:
        step: list[Microbatch] = []
        for microbatch in loader:
            step.append(microbatch)
            if microbatch.is_last_of_step:
                batches = {id(each.modules["query"]): each.modules["query"] for each in step}
                items += sum(len(batch.units) for batch in batches.values())
                train_step(training, step)
                step = []
    names = ("encoder", "embedding", "inner", "outer")
    gradients = {name: getattr(training, name).grad for name in names}
    np.savez(
        out / f"{topology.rank}.npz",
        items=items,
        **{name: np.zeros(0) if value is None else value.numpy() for name, value in gradients.items()},
    )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
