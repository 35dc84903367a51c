"""Ids through a shared loader, beside those through the queue of torch's DataLoader, per CPU-second.

    python -m benchmarks.loader_ids --mib 400

In: how much to move. Out: JSON: CPU-milliseconds a MiB of all processes together. Both move int32 ids from a process
that has them in memory to one that copies them to their place: a loader whose pages are kept, in replies of about
2 MiB; a DataLoader with one worker that gives tensors of a MiB, as its users do, and reads nothing. What the same reads
take in one process is measured too: a loader's figure less that is what the road costs. Roads: a socket of the same
host, and TCP with CURVE. Of each, `parts` says which thread used the time: the client's, the loader's that
reads, its one at the socket, and ZeroMQ's own on both sides. `wait` is the 99th percentile of steps over the median.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from torchmix.indexing.scan import index_recipe
from torchmix.reader.protocol import StepReader, WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.client import LoaderLinks
from torchmix.service.endpoints import Endpoints
from torchmix.service.fleet import LoaderFleet
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.keys import client_keys, write_keys
from torchmix.service.main import LoaderStart
from torchmix.service.members import FleetMembers
from torchmix.service.messages import LoaderHello
from torchmix.service.pool import LoaderPool
from torchmix.service.served import transforms_digest
from torchmix.service.server import new_pair

DOCUMENTS, TOKENS = 4096, 1024
STEP_DOCUMENTS = 1024
"""A step of 4 MiB."""


class Blocks(torch.utils.data.Dataset[torch.Tensor]):
    """Tensors of a MiB, each new, as a dataset that cuts samples makes them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._block = np.arange(1 << 18, dtype=np.int32)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._block.copy())


ROADS = {"host": "socket of the host", "curve": "TCP with CURVE"}
"""What the table calls each."""
PARTS = ("client", "loader's reading", "loader's socket", "ZeroMQ")
"""Columns of the table."""


def cpu_of(pid: int, parts: tuple[str, str]) -> Counter[str]:
    """CPU-seconds of a process so far: of its first thread, of its others, of ZeroMQ's; the first two have names."""
    found: Counter[str] = Counter()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        is_of_zeromq = (thread / "comm").read_text().startswith("ZMQ")
        name = "ZeroMQ" if is_of_zeromq else parts[thread.name != str(pid)]
        found[name] += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return found


def through_dataloader(mib: int) -> float:
    """CPU-seconds to move so much."""
    target = np.empty(1 << 18, np.int32)
    began = time.process_time()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    for block in torch.utils.data.DataLoader(Blocks(mib), batch_size=None, num_workers=1):
        target[:] = block.numpy()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
    return time.process_time() - began + taken


def through_loader(mib: int, road: str) -> tuple[Counter[str], float, float]:
    """CPU-seconds to move so much by part, those that reading alone takes, and the tail of steps over the median."""
    with_keys = road == "curve"

    def used() -> Counter[str]:
        return cpu_of(os.getpid(), ("client", "client")) + cpu_of(pool.pids[0], ("loader's socket", "loader's reading"))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = pa.array(list(np.random.default_rng(1).integers(0, 1 << 20, (DOCUMENTS, TOKENS), np.int32)))
        pq.write_table(pa.table({"ids": rows}), folder / "web.parquet")
        recipe = check_recipe(
            {
                "version": 1,
                "seed": 1,
                "batch": {"samples": 8, "length": 1024},
                "sources": {"web": {"path": "web.parquet", "tokens": "ids"}},
                "mixture": {"web": "100%"},
            }
        )
        catalog = index_recipe(recipe, folder)
        if with_keys:
            write_keys(folder / "keys", new_pair, num_clients=1)
        start = LoaderStart(
            parts={"train": part_of(recipe, "train")},
            base=name,
            catalog_folder=str(folder / recipe.catalog),
            cache_bytes=1 << 30,
            bind=f"ipc://{name}/socket" if road == "host" else "tcp://127.0.0.1:0",
            keys=str(folder / "keys") if with_keys else "",
        )
        pool = LoaderPool([start])
        hello = LoaderHello(
            client="benchmark", catalog=catalog.fingerprint, transforms=transforms_digest(catalog, recipe.seed)
        )
        links = LoaderLinks(client_keys(folder / "keys") if with_keys else None)
        reader = FleetReader(catalog, LoaderFleet(FleetMembers(Endpoints(fixed=pool.endpoints), links, hello)))
        try:
            rng = np.random.default_rng(2)
            took_s: list[float] = []
            tokens = np.full(STEP_DOCUMENTS, TOKENS)
            for step in range(4 + mib // 4):
                if step == 4:  # all pages are kept
                    began = used()
                at_s = time.monotonic()
                read(reader, rows_of_step(step, rng), tokens)
                took_s.append(time.monotonic() - at_s)
            taken = used() - began
            with_files = Reader(catalog, folder, cache_bytes=1 << 30)
            for step in range(4 + mib // 4):
                if step == 4:
                    began_s = time.process_time()
                read(with_files, rows_of_step(step, rng), tokens)
            reading = time.process_time() - began_s
            with_files.close()
        finally:
            reader.close()
            pool.close()
    steady = np.array(took_s[4:])
    return taken, reading, float(np.quantile(steady, 0.99) / np.median(steady))


def rows_of_step(step: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """All rows once in four steps, then any."""
    if step < 4:
        return np.arange(step * STEP_DOCUMENTS, (step + 1) * STEP_DOCUMENTS)
    return np.sort(rng.permutation(DOCUMENTS)[:STEP_DOCUMENTS])


def read(reader: StepReader, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Read whole documents."""
    reader.read(WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=tokens))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3, help="of each the one that took least counts")
    mib, rounds = (options := parser.parse_args()).mib, options.rounds
    torch.set_num_threads(1)
    queue = min(through_dataloader(mib) for _ in range(rounds))
    found: dict[str, Any] = {"dataloader_ms": round(1000 * queue / mib, 2)}
    for road in ROADS:
        runs = [through_loader(mib, road) for _ in range(rounds)]
        taken, reading, wait = min(runs, key=lambda run: run[0].total() - run[1])
        found[road] = {
            "ms": round(1000 * taken.total() / mib, 2),
            "reading_ms": round(1000 * reading / mib, 2),
            "road_over_dataloader": round((taken.total() - reading) / queue, 2),
            "parts_ms": {name: round(1000 * seconds / mib, 2) for name, seconds in sorted(taken.items())},
            "wait": round(wait, 1),
        }
    print("road | whole | reading alone | road over DataLoader | client | loader, reading | loader, socket | ZeroMQ")
    for road, title in ROADS.items():
        row = found[road]
        parts = " | ".join(f"{row['parts_ms'].get(part, 0):.2f}" for part in PARTS)
        print(f"{title} | {row['ms']:.2f} | {row['reading_ms']:.2f} | {row['road_over_dataloader']:.2f} | {parts}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
