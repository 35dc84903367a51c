"""A rank of a job whose first leader notes what `build_loader` calls: `python -m tests.support.walk_rank RECIPE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.support.threaded_children import threaded_children
from tests.support.traced_calls import climbs, traced
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader


def main(recipe: Path) -> None:
    dist.init_process_group("gloo")
    topology = Topology.from_torchrun(tp=2)
    with threaded_children(), traced() as trace:
        loader = build_loader(recipe, topology=topology, loaders="node")
        found = trace.restart()
        loader.close()
    if topology.rank == 0:
        entered = [(file, name, time) for (file, name), time in found.entered.items()]
        times = {f"{file} {name}": count for (file, name), count in found.times.items()}
        (recipe.parent / "walk.json").write_text(
            json.dumps({"entered": entered, "times": times, "climbs": climbs(found)})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
