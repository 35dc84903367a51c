"""A rank whose leader reads through the worker of its node: `python -m tests.support.node_rank RECIPE STEPS TP CP PP`.

The environment's FAULTS, as `3:SIGKILL 7:SIGSTOP`, has the host send these signals to its worker as it comes to these
microbatches; LOADER_FAULTS as much to a loader that this rank has started. LOADERS stands in the place of the recipe's
`loaders`; NODES is the number of nodes that the ranks of this machine stand for. STEPS 0 is one pass. Prints, as the
last line, JSON: a hash of every tensor, the digest, the workers and loaders that this rank started, and the figures of
the loader.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import torchmix
from tests.support.deadlines import LONG_S, stretched
from tests.support.loaders import FIELDS
from tests.support.processes import children_of_this_process, workers_of_this_process

LOOK_EVERY = 4
"""Microbatches from one look at the processes to the next: a look costs more than a microbatch does."""


def hash_of(microbatch: torchmix.Microbatch, into: hashlib._Hash) -> None:
    """Add every tensor of a microbatch."""
    for name in FIELDS:
        tensor = getattr(microbatch, name)
        into.update(name.encode() if tensor is None else tensor.contiguous().numpy().tobytes())
    for name, lists in sorted(microbatch.rows.items()):
        for part in (lists.values, lists.lengths, lists.places):
            into.update(name.encode() + part.numpy().tobytes())


def main(recipe: str, steps: int, tp: int, cp: int, pp: int) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    faults = dict(fault.split(":") for fault in os.environ.get("FAULTS", "").split())
    loader_faults = dict(fault.split(":") for fault in os.environ.get("LOADER_FAULTS", "").split())
    if nodes := int(os.environ.get("NODES", "0")):
        os.environ["TORCHMIX_NODE"] = str(int(os.environ["RANK"]) * nodes // int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo")
    topology = torchmix.Topology.from_torchrun(tp=tp, cp=cp, pp=pp)
    found, started, hit, shared = hashlib.sha256(), set[int](), set[int](), set[int]()
    options = {"one_pass": True} if not steps else {"max_steps": steps}
    loaders = os.environ.get("LOADERS", "node")
    with torchmix.build_loader(recipe, topology=topology, loaders=loaders, patience_s=LONG_S, **options) as loader:
        for number, microbatch in enumerate(loader):
            dist.all_reduce(torch.tensor([number]))
            hash_of(microbatch, found)
            if number % LOOK_EVERY and str(number) not in {*faults, *loader_faults}:
                continue
            children = children_of_this_process()
            started |= {pid for pid, command in children.items() if "steps.worker.main" in command}
            living_loaders = {pid for pid, command in children.items() if "service.main" in command}
            shared |= living_loaders
            if str(number) in loader_faults and living_loaders:
                os.kill(min(living_loaders), getattr(signal, loader_faults[str(number)]))
            if str(number) in faults and started:
                # The steps at hand may have been made before the fault before: then a new worker comes yet.
                deadline = time.monotonic() + stretched(60)
                while not (living := set(workers_of_this_process()) - hit) and time.monotonic() < deadline:
                    time.sleep(0.05)
                started |= living
                hit |= living
                for worker in living:
                    os.kill(worker, getattr(signal, faults[str(number)]))
        started |= set(workers_of_this_process())
        shared |= set(workers_of_this_process("service.main"))
        stats = {name: value for name, value in loader.stats().items() if isinstance(value, int | float)}
        digest = loader.order_digest
    left = [*workers_of_this_process(), *workers_of_this_process("service.main")]
    counts = {"started": len(started), "loaders": len(shared), "left": left}
    print(json.dumps({"hash": found.hexdigest(), "digest": digest, **counts, **stats}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
