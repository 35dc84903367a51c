"""One real rank that consumes a recipe with images, and writes what came.

    RANK=.. WORLD_SIZE=.. MASTER_..=.. python -m tests.support.image_rank RECIPE OUT TP CP PP STEPS LOADERS LOG MROPE

Out: OUT/RANK.npz, the arrays of `image_record.py`; if MROPE is 1, with positions in three dimensions. Images that this
process decodes itself are noted in LOG.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import torchmix
from tests.support.decode_log import install
from tests.support.image_record import Record
from torchmix.parallel import HeldRows, Topology, route


def main(arguments: list[str]) -> None:
    recipe, out = arguments[0], Path(arguments[1])
    tp, cp, pp, steps = map(int, arguments[2:6])
    loaders: Any = arguments[6]
    install(arguments[7])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    topology = Topology.from_torchrun(tp=tp, cp=cp, pp=pp)
    record = Record(topology=topology, with_mrope=arguments[8] == "1")
    with torchmix.build_loader(recipe, topology=topology, max_steps=steps, loaders=loaders) as loader:
        step = []
        for microbatch in loader:
            step.append(microbatch)
            if not microbatch.is_last_of_step:
                continue
            rows, routes = record.encode(step)
            record.embed(step, HeldRows(route(rows, routes)).rows, routes)
            step = []
    np.savez(out / f"{topology.rank}.npz", **record.arrays())
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
