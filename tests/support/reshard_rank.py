"""A real rank that goes from layout to layout: `python -m tests.support.reshard_rank RECIPE WHERE STEPS TP...`

It takes STEPS steps at each tensor-parallel size, what is left of the job being data-parallel, and changes its layout
by `reshard` between them. For each step it prints `tp TP step S digest D tensors H`. The trainer's collectives use the
default group meanwhile. With "refuse" in the place of the last size, one rank asks for another step than the others.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

import torchmix
from torchmix.constructor.fields import Microbatch


def digest_of(microbatches: Sequence[Microbatch]) -> str:
    """A hash of what a rank was handed."""
    digest = hashlib.sha256()
    for microbatch in microbatches:
        for name in ("tokens", "labels", "position_ids", "cu_seqlens_padded"):
            tensor = getattr(microbatch, name)
            digest.update(b"none" if tensor is None else tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def main(arguments: list[str]) -> None:
    recipe, where, steps, *sizes = arguments
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with torchmix.build_loader(
        recipe, topology=torchmix.Topology.from_torchrun(tp=int(sizes[0])), loaders=where
    ) as loader:
        for place, text in enumerate(sizes):
            at_step = place * int(steps)
            if text == "refuse":
                try:
                    loader.reshard(torchmix.Topology.from_torchrun(), at_step + (rank == 1))
                except torchmix.TorchmixError as error:
                    print(f"refused {type(error).__name__}", flush=True)
                break
            if place:
                loader.reshard(torchmix.Topology.from_torchrun(tp=int(text)), at_step)
            microbatches = []
            for microbatch in loader:
                dist.all_reduce(torch.tensor([microbatch.step]))
                microbatches.append(microbatch)
                if microbatch.is_last_of_step:
                    print(
                        f"tp {text} step {microbatch.step} digest {loader.order_digest} "
                        f"tensors {digest_of(microbatches)}",
                        flush=True,
                    )
                    microbatches.clear()
                    if microbatch.step + 1 == at_step + int(steps):
                        break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
