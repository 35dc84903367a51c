"""Loaders that are killed and stopped, and roads to them that fail, while a client reads; as one JSON.

    python -m tests.trials.loader_chaos --seed 1 --count 200 --out chaos.json

In: a seed and a number of faults. Out: for each fault how long the worst read took, and what the client counted. Must
hold: every token is that of a reader of this process; nothing comes twice or is missing; afterwards no process and no
socket is left. A fault is one of: SIGKILL, SIGSTOP for a while, of one loader or of all; a road that is cut, that
delays, drops, repeats, reorders or flips bits. A run goes on where it stopped. Cost: about two seconds a fault.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.catalogs import World, random_world
from tests.support.faulty_road import FaultyRoad
from tests.support.fleets import fleet_of
from tests.support.reading import random_pieces, read_with_successors
from tests.support.trial import continued, trial_parser
from torchmix.boards.socket_folders import socket_folder
from torchmix.reader.reader import Reader
from torchmix.recipe.parts import part_of
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.main import LoaderStart
from torchmix.service.members import FleetPatience
from torchmix.service.pool import LoaderPool, starts_of

LOADERS = 3
FAULTS = ("kill", "kill all", "stop", "stop all", "cut", "delay", "flip", "repeat", "drop", "reorder")
READS = 6
"""Calls of the reader for each fault: before it, while it holds, and after it."""
PATIENCE = FleetPatience(silence_s=1.0, join_s=60.0, lost_s=600.0)


class Chaos:
    """Loaders behind roads, and a client."""

    def __init__(self, world: World, stack: ExitStack, seed: int) -> None:
        catalog = world.index()
        start = LoaderStart(
            parts={"train": part_of(world.recipe, "train")},
            base=str(world.directory),
            catalog_folder=str(world.directory / world.recipe.catalog),
            cache_bytes=1 << 20,
            bind=f"ipc://{stack.enter_context(socket_folder())}",
        )
        self.world, self.seed = world, seed
        self.pool = LoaderPool(starts_of(start, LOADERS))
        stack.callback(self.pool.close)
        self.roads = [FaultyRoad(endpoint, seed + k) for k, endpoint in enumerate(self.pool.endpoints)]
        for road in self.roads:
            stack.callback(road.close)
        hello_seed = world.recipe.seed
        self.here = Reader(catalog, world.directory, cache_bytes=1 << 24, seed=hello_seed)
        stack.callback(self.here.close)
        fleet = fleet_of(catalog, [road.endpoint for road in self.roads], patience=PATIENCE, seed=hello_seed)
        self.client = FleetReader(catalog, fleet)
        stack.callback(self.client.close)

    def one(self, number: int) -> dict[str, Any]:
        """One fault, in the middle of some reads."""
        draw = random.Random(f"{self.seed} {number}")
        fault, at = draw.choice(FAULTS), draw.randrange(LOADERS)
        rng, worst_s = np.random.default_rng([self.seed, number]), 0.0
        begins_s, ends_s = draw.random() * 0.05, 0.3 + draw.random() * 1.5

        def happen() -> None:
            time.sleep(begins_s)
            self.begin(fault, at)
            time.sleep(ends_s - begins_s)
            self.end()

        happening = threading.Thread(target=happen)  # one for both: however late, it begins before it ends
        happening.start()
        try:
            for _ in range(READS):
                asked = random_pieces(self.world, rng, 300)
                began_s = time.monotonic()
                found = read_with_successors(self.client, asked)
                worst_s = max(worst_s, time.monotonic() - began_s)
                np.testing.assert_array_equal(found, read_with_successors(self.here, asked), f"{fault}, {number}")
                time.sleep(draw.random() * 0.2)
        finally:
            happening.join()
        return {"fault": fault, "worst_s": round(worst_s, 3), **self.client.stats()}

    def begin(self, fault: str, at: int) -> None:
        """Let it happen."""
        word, _, is_all = fault.partition(" ")
        chosen = range(LOADERS) if is_all else [at]
        for k in chosen:
            if word in ("kill", "stop"):
                with suppress(ProcessLookupError):
                    os.kill(self.pool.pids[k], signal.SIGKILL if word == "kill" else signal.SIGSTOP)
            else:
                self.roads[k].fault = word
                if word == "cut":
                    self.roads[k].cut()

    def end(self) -> None:
        """Let it be over."""
        for pid in self.pool.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for road in self.roads:
            if road.fault in ("flip", "repeat", "drop", "reorder"):
                road.cut()  # what lies in it is damaged
            road.fault = "none"


@contextmanager
def chaos(seed: int) -> Iterator[Chaos]:
    """Loaders of a random world."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Chaos(random_world(Path(folder), seed), stack, seed)


def main() -> None:
    """Run the faults that are not in the file yet."""
    asked = trial_parser(__doc__, count=100).parse_args()
    with chaos(asked.seed) as running:
        continued(asked, lambda _, number: running.one(number))


if __name__ == "__main__":
    main()
