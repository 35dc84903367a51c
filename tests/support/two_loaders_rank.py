"""One real rank of a job that trains and validates in turn, with a loader of each.

    RANK=.. WORLD_SIZE=.. MASTER_..=.. python -m tests.support.two_loaders_rank RECIPE TP STEPS VICTIM

After each training step it takes one step of validation. It prints `PART S digest D` after each of both, how many
threads watch the others, and `done` at the end. The rank VICTIM (-1: none) fails inside its validation loader after
step 1, while the others wait for their next training step.
"""

from __future__ import annotations

import sys
import threading
import time

import torch.distributed as dist

import torchmix
from torchmix.stateful.loader import StatefulDataLoader


def take_step(loader: StatefulDataLoader, part: str) -> int:
    stream = iter(loader)
    for _ in range(loader.num_microbatches):
        microbatch = next(stream)
    print(f"{part} {microbatch.step} digest {loader.order_digest}", flush=True)
    return int(microbatch.step)


def main(recipe: str, tp: int, steps: int, victim: int) -> None:
    dist.init_process_group("gloo")
    topology = torchmix.Topology.from_torchrun(tp=tp)
    options = {"topology": topology, "loaders": "in_process"}
    with torchmix.build_loader(recipe, **options) as train:
        for step in range(steps):
            take_step(train, "train")
            if step == 0:
                validation = torchmix.build_loader(recipe, part="validation", **options)
            if step == 1 and victim == topology.rank:
                with validation:
                    raise ValueError("a mistake in the evaluation")
            if victim < 0 or step == 0:
                take_step(validation, "validation")
            elif step == 2:
                time.sleep(60)  # far ahead of the victim: what was prepared is used up
        watching = sum(thread.name == "torchmix-pulse" for thread in threading.enumerate())
        print(f"watching {watching}", flush=True)
        validation.close()
        take_step(train, "train")
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
