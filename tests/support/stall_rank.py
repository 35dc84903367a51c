"""A rank that notes how long it waits, while others do things to what reads for it.

    python -m tests.support.stall_rank RECIPE STEPS PAUSE_S LOOK_AHEAD TP PP

LOADERS stands in the place of the recipe's `loaders`; NODES is the number of nodes that the ranks of this machine stand
for. With ROADS=1 all that it asks loaders goes over faulty roads, to which the file `road` in the folder CHAOS says
what to do: a fault, and the number of a loader or `all`. It pauses after each step, as training would. Rank 0 saves a
state in the folder CHAOS after each step, and all continue from it if there is one.
Prints `step N HASH` after each step, with a hash of its tensors, and `wait BEGAN_S SECONDS` (monotonic) after each wait
that is long; as the last line JSON: the digest, and the sums of the figures of all its workers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchmix
from tests.support.faulty_road import FaultyRoad
from tests.support.node_rank import hash_of
from tests.support.processes import workers_of_this_process
from torchmix.service import open_job
from torchmix.service.open_fleet import FleetSettings

LONG_WAIT_S = 0.1


class Roads:
    """What stands between this rank's worker and all loaders, and does what the file says."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "road"
        self._roads: list[FaultyRoad] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        self._settings = open_job.fleet_settings
        open_job.fleet_settings = self._over_roads

    def _over_roads(self, *arguments: Any) -> FleetSettings:
        settings = self._settings(*arguments)
        roads = {endpoint: FaultyRoad(endpoint, number) for number, endpoint in enumerate(settings.endpoints)}
        self._roads += roads.values()
        return replace(
            settings,
            endpoints=tuple(roads[endpoint].endpoint for endpoint in settings.endpoints),
            server_of={roads[endpoint].endpoint: key for endpoint, key in settings.server_of.items()},
            near_of={},
        )

    def _follow(self) -> None:
        said = ""
        while not self._is_over.wait(0.05):
            now = self._file.read_text() if self._file.exists() else ""
            if now == said:
                continue
            fault, _, which = now.partition(" ")
            for number, road in enumerate(self._roads):
                if not now and road.fault in ("flip", "repeat", "drop", "reorder"):
                    road.cut()  # what lies in it is damaged
                road.fault = fault if which in ("all", str(number)) else "none"
                if road.fault == "cut":
                    road.cut()
            said = now

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        for road in self._roads:
            road.close()


def main(recipe: str, steps: int, pause_s: float, look_ahead: int, tp: int, pp: int) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if nodes := int(os.environ.get("NODES", "0")):
        os.environ["TORCHMIX_NODE"] = str(int(os.environ["RANK"]) * nodes // int(os.environ["WORLD_SIZE"]))
    roads = Roads(Path(os.environ["CHAOS"])) if os.environ.get("ROADS") else None
    dist.init_process_group("gloo")
    topology = torchmix.Topology.from_torchrun(tp=tp, pp=pp)
    saved = Path(os.environ["CHAOS"]) / "state"
    found, sums, before = hashlib.sha256(), Counter[str](), Counter[str]()
    with torchmix.build_loader(
        recipe, topology=topology, loaders=os.environ["LOADERS"], max_steps=steps, look_ahead=look_ahead
    ) as loader:
        if saved.exists():
            loader.load_state_dict({"torchmix_state": saved.read_bytes()})
        began_s = time.monotonic()
        for microbatch in loader:
            if (waited_s := time.monotonic() - began_s) > LONG_WAIT_S:
                print(f"wait {began_s:.3f} {waited_s:.3f}", flush=True)
            hash_of(microbatch, found)
            if microbatch.is_last_of_step:
                dist.all_reduce(torch.tensor([microbatch.step]))
                # Before it is saved: what is saved is then printed, whenever this rank is killed.
                print(f"step {microbatch.step} {found.hexdigest()}", flush=True)
                found = hashlib.sha256()
                dist.barrier()
                if dist.get_rank() == 0:
                    saved.with_suffix(".new").write_bytes(loader.state_dict()["torchmix_state"])
                    saved.with_suffix(".new").replace(saved)
                now = Counter(
                    {name: value for name, value in loader.stats().items() if name.startswith("total_loader")}
                )
                is_new = any(now[name] < value for name, value in before.items())  # of another worker
                sums.update(now if is_new else now - before)
                before = now
                time.sleep(pause_s)
            began_s = time.monotonic()
        digest = loader.order_digest
    if roads is not None:
        roads.close()
    left = [*workers_of_this_process(), *workers_of_this_process("service.main")]
    print(json.dumps({"digest": digest, "left": left, **sums}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
