"""One real rank of a job that consumes data and trains nothing.

    RANK=.. WORLD_SIZE=.. MASTER_..=.. python -m tests.support.loader_rank RECIPE SAVES TP CP PP WORKERS AHEAD STEPS

It continues from the state in the folder SAVES if there is one, and saves one there after each step, aside and renamed.
It prints `tensors S H`, with a hash of what it was given, and `step S digest D` after each step, `opened PATH` for each
data file it opened, and `done` at the end. Every microbatch ends in an all-reduce over all ranks on the default group,
as a training step would. Rank 0 goes no further than the step in the variable HOLD_AT of the environment: a job that is
to be killed does not end before.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchmix
from tests.support.node_rank import hash_of


def watch_opened_files() -> set[str]:
    """Names of Parquet files and catalog arrays that this process opens from now on."""
    opened: set[str] = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            if str(path).endswith((".parquet", ".npy")):
                opened.add(str(path))

    sys.addaudithook(hook)
    return opened


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    recipe, saves = arguments[0], Path(arguments[1])
    tp, cp, pp, look_ahead, steps = map(int, arguments[3:])
    opened = watch_opened_files()
    dist.init_process_group("gloo")
    topology = torchmix.Topology.from_torchrun(tp=tp, cp=cp, pp=pp)
    saved = saves / "state"
    with torchmix.build_loader(
        recipe, topology=topology, loaders=arguments[2], look_ahead=look_ahead, max_steps=steps
    ) as loader:
        if saved.exists():
            loader.load_state_dict({"torchmix_state": saved.read_bytes()})
        found = hashlib.sha256()
        for microbatch in loader:
            hash_of(microbatch, found)
            dist.all_reduce(torch.tensor([microbatch.step]))
            if microbatch.is_last_of_step:
                print(f"tensors {microbatch.step} {found.hexdigest()}", flush=True)
                found = hashlib.sha256()
                # Before it is saved: what is saved is then printed, whenever this rank is killed.
                print(f"step {microbatch.step} digest {loader.order_digest}", flush=True)
                if topology.rank == 0:
                    aside = saves / "state.tmp"
                    aside.write_bytes(loader.state_dict()["torchmix_state"])
                    aside.replace(saved)
                    if os.environ.get("HOLD_AT") == str(microbatch.step):
                        time.sleep(600)
                dist.barrier()
    for path in sorted(opened):
        print(f"opened {path}", flush=True)
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
