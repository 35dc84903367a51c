"""One real rank of a job in which something is wrong: `python -m tests.support.chaos_rank RECIPE CHAOS`.

Started with torchrun's environment, one by one. Every microbatch ends in an all-reduce, as a training step would. It
prints `step S digest D` after each step, `end` when the data ends, and does what CHAOS says:

    other-sizes   rank 1 has another micro_batch_size
    no-recipe     rank 1 finds no recipe
    dies-early    rank 1 is killed while the groups are made
    bad-step      rank 1 leads, and cannot read step 3
    forks         every rank forks a child after two steps, which ends inside of the `with` as a script does
    two-loaders   all train with one loader and validate with another; the default group is bound to a device
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import torchmix
from torchmix.errors import CorruptPage
from torchmix.stateful import open as opening
from torchmix.steps import replica_steps as making


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_at_step_3(settings: Any, plan: Any, *rest: Any, **options: Any) -> Any:
    if plan.step == 3:
        raise CorruptPage("page 7 does not decode")
    return modules_of_step(settings, plan, *rest, **options)


modules_of_step = making.modules_of_step


def train(loader: torchmix.StatefulDataLoader, steps: int) -> None:
    for microbatch in loader:
        dist.all_reduce(torch.tensor([microbatch.step]))
        if microbatch.is_last_of_step:
            print(f"step {microbatch.step} digest {loader.order_digest}", flush=True)
            if microbatch.step + 1 == steps:
                return
    print("end", flush=True)


def main(recipe: str, chaos: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    rank, options = dist.get_rank(), {"loaders": "in_process"}
    sizes = {"two-loaders": {"pp": 3}, "forks": {"tp": 2}}
    topology = torchmix.Topology.from_torchrun(**sizes.get(chaos, {}))
    if rank == 1 and chaos == "other-sizes":
        options["micro_batch_size"] = 2
    if rank == 1 and chaos == "no-recipe":
        recipe = "/nowhere/recipe.yaml"
    if rank == 1 and chaos == "dies-early":
        opening.open_fan_out = die  # type: ignore[assignment]
    if rank == 1 and chaos == "bad-step":
        making.modules_of_step = fail_at_step_3
    if chaos == "two-loaders":
        # As init_process_group("nccl", device_id=...) does, which needs a GPU per rank.
        dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
    with torchmix.build_loader(recipe, topology=topology, **options) as loader:
        if chaos == "two-loaders":
            with torchmix.build_loader(recipe, topology=topology, **options) as valid:
                start = valid.state_dict()
                for steps in (2, 4):
                    train(loader, steps)
                    train(valid, 2)
                    valid.load_state_dict(start)
        else:
            if chaos == "forks":
                train(loader, 2)
                if not (child := os.fork()):
                    sys.exit(0)
                assert os.waitpid(child, 0)[1] == 0
            train(loader, 40)
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
