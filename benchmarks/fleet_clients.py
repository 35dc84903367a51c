"""Many clients on a fleet of loaders, with and without node workers between ranks and loaders.

    python -m benchmarks.fleet_clients --ranks 256 --loaders 16

In: numbers of ranks and loaders. Out: a JSON object for each way: connections, requests, bytes, pages decoded, and how
long the clients took. `ranks`: each rank asks for its own documents. `nodes`: a worker asks for those of 8 ranks, once.
All documents that all ranks ask for are the same in both ways, and are compared with the files. The loaders are threads
of this process, the clients of others, 8 of each asking at a time, and all share the machine: counts are exact, times
are not. This is the comparison of connections of MegaScale-Data (arXiv 2504.09844, Figure 20), without its GPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zmq
from numpy.typing import NDArray

from torchmix.boards.socket_folders import socket_folder
from torchmix.catalog.store import Catalog, open_part
from torchmix.indexing.scan import index_recipe
from torchmix.reader.protocol import WantedPieces
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.client import LoaderLinks
from torchmix.service.endpoints import Endpoints
from torchmix.service.fleet import LoaderFleet
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.members import FleetMembers, FleetPatience
from torchmix.service.messages import LoaderHello
from torchmix.service.served import PartToServe, ServedCatalogs, transforms_digest
from torchmix.service.server import LoaderServer

DOCUMENTS, TOKENS, PAGE_BYTES = 8192, 512, 64 << 10
RANKS_OF_NODE, DOCUMENTS_OF_RANK = 8, 8
AT_ONCE = 8
"""Clients of a process that ask at a time."""
WAYS = {"ranks": "ranks", "nodes": "node workers"}
"""What the table calls each."""
PATIENCE = FleetPatience(silence_s=600.0, join_s=600.0, lost_s=600.0)
"""Counts of a machine that is busy with the clients themselves, in which nobody is given up."""
RECIPE = {
    "version": 1,
    "seed": 1,
    "batch": {"samples": 8, "length": 512},
    "sources": {"web": {"path": "web.parquet", "tokens": "ids"}},
    "mixture": {"web": "100%"},
}


def write_world(folder: Path) -> NDArray[np.int32]:
    """One source and its catalog; its documents, [DOCUMENTS, TOKENS]."""
    ids = np.random.default_rng(1).integers(0, 1 << 20, (DOCUMENTS, TOKENS), np.int32)
    pq.write_table(
        pa.table({"ids": pa.array(list(ids))}), folder / "web.parquet", data_page_size=PAGE_BYTES, use_dictionary=False
    )
    index_recipe(check_recipe(RECIPE), folder)
    return ids


def catalog_in(folder: Path) -> Catalog:
    """The catalog of the source."""
    recipe = check_recipe(RECIPE)
    return open_part(folder / recipe.catalog, part_of(recipe, "train"))


@contextmanager
def loaders(folder: Path, count: int) -> Iterator[list[LoaderServer]]:
    """Loaders in threads."""
    with ExitStack() as stack:
        servers = []
        sockets = stack.enter_context(socket_folder())
        for number in range(count):
            part = PartToServe(catalog=catalog_in(folder), seed=1)
            served = ServedCatalogs({"train": part}, folder, cache_bytes=64 << 20)
            stack.callback(served.close)
            server = LoaderServer(served, bind=f"ipc://{sockets}/{number}")
            thread = threading.Thread(target=server.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.stop)
            servers.append(server)
        yield servers


def rows_of(client: int, step: int, ranks: int, ranks_of_client: int) -> NDArray[np.int64]:
    """The documents that a client asks for in a step: those of its ranks."""
    rows = np.random.default_rng(step).permutation(DOCUMENTS)[: ranks * DOCUMENTS_OF_RANK]
    each = ranks_of_client * DOCUMENTS_OF_RANK
    return np.sort(rows[client * each : (client + 1) * each])


class SharedContext:
    """One context of ZeroMQ for all clients of a process: each would have two threads of its own."""

    def __init__(self) -> None:
        self._context: Any = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))

    def socket(self, kind: int) -> Any:
        return self._context.socket(kind)

    def term(self) -> None:
        """Nothing: other clients use it."""

    def end(self) -> None:
        self._context.term()


def run_clients(asked: dict[str, Any], before: Callable[[], None] = lambda: None) -> list[Any]:
    """Some clients, all connected, of which AT_ONCE ask at a time.

    Args:
        asked: What `measure` says.
        before: Called when all are connected.

    Returns:
        Of each: seconds of each step, the sum of all ids, and its figures.
    """
    folder, clients = Path(asked["folder"]), asked["clients"]
    catalog = catalog_in(folder)
    waiting, found = deque(clients), dict[int, Any]()

    def reader_of(client: int) -> FleetReader:
        hello = LoaderHello(
            client=f"client {client}", catalog=catalog.fingerprint, transforms=transforms_digest(catalog, 1)
        )
        members = FleetMembers(Endpoints(fixed=tuple(asked["endpoints"])), LoaderLinks(), hello, patience=PATIENCE)
        return FleetReader(catalog, LoaderFleet(members))

    def ask_in_turn() -> None:
        while waiting:
            with suppress(IndexError):  # another thread has taken the last one
                client = waiting.popleft()
                found[client] = steps_of(client, readers[client], asked)

    shared = SharedContext()
    with mock.patch.object(zmq, "Context", lambda: shared):
        readers = {client: reader_of(client) for client in clients}
    before()
    threads = [threading.Thread(target=ask_in_turn) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for reader in readers.values():
        reader.close()
    shared.end()
    return [found[client] for client in clients]


def steps_of(client: int, reader: FleetReader, asked: dict[str, Any]) -> list[Any]:
    """What `run_clients` returns of a client."""
    took_s, total = [], 0
    for step in range(asked["steps"]):
        rows = rows_of(client, step, asked["ranks"], asked["ranks_of_client"])
        wanted = WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=np.full(len(rows), TOKENS))
        began_s = time.monotonic()
        read = reader.read(wanted)
        took_s.append(time.monotonic() - began_s)
        total += int(read.values.sum(dtype=np.int64))
    return [took_s, total, reader.stats()]


def _child() -> None:
    """Clients of a process of their own: settings in, a line when all are connected; a line in, results out."""

    def wait() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    print(json.dumps(run_clients(json.loads(sys.stdin.readline()), wait)), flush=True)


def measure(
    way: str, folder: Path, ids: NDArray[np.int32], *, ranks: int, num_loaders: int, steps: int, processes: int
) -> dict[str, Any]:
    """One way; with `processes` 0 the clients are threads of this process."""
    ranks_of_client = RANKS_OF_NODE if way == "nodes" else 1
    clients = list(range(ranks // ranks_of_client))
    with loaders(folder, num_loaders) as servers:
        asked = {
            "folder": str(folder),
            "endpoints": [server.endpoint for server in servers],
            "ranks": ranks,
            "ranks_of_client": ranks_of_client,
            "steps": steps,
        }
        parts = [clients[number :: max(1, processes)] for number in range(max(1, processes))]
        if processes:
            found = _in_processes([{**asked, "clients": part} for part in parts], servers, len(clients))
        else:
            found = run_clients({**asked, "clients": clients})
    figures: Counter[str] = Counter()
    for server in servers:  # which has ended: while it runs, a reply comes before it is counted
        figures.update(server.figures())
    every = np.concatenate([np.sort(rows_of(0, step, ranks, ranks)) for step in range(steps)])
    assert sum(total for _, total, _ in found) == int(ids[every].sum(dtype=np.int64)), "every document came once"
    asked_twice = sum(one["total_loader_reasked"] + one["total_loader_hedged"] for _, _, one in found)
    # A client may be gone before the second answer to what it has asked twice.
    assert figures["requests_bad_messages"] == 0 and figures["requests_dropped"] <= asked_twice
    of_client = np.array([sum(took_s) for took_s, _, _ in found])
    of_step = np.array([took_s for took_s, _, _ in found]).ravel()
    return {
        "clients": len(clients),
        "connections": figures["clients"],
        "connections_of_a_loader": figures["clients"] // num_loaders,
        "requests": figures["requests_accepted"],
        "MiB": round(figures["bytes_sent"] / 2**20, 1),
        "MiB_of_ids": round(len(every) * TOKENS * 4 / 2**20, 1),
        "decode_amplification": round(figures["decode_amplification"] / num_loaders, 2),
        "asked_twice": asked_twice,
        "slowest_client_over_median": round(float(of_client.max() / np.median(of_client)), 2),
        "p99_over_p50": round(float(np.quantile(of_step, 0.99) / np.median(of_step)), 2),
    }


def _in_processes(parts: Sequence[dict[str, Any]], servers: Sequence[LoaderServer], count: int) -> list[Any]:
    """Run clients in processes, which begin when all are connected."""
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fleet_clients", "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in parts
    ]
    try:
        for child, part in zip(children, parts, strict=True):
            assert child.stdin is not None
            print(json.dumps(part), file=child.stdin, flush=True)
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert all(server.figures()["clients"] >= count for server in servers), "more where one was made again"
        for child in children:
            print("go", file=child.stdin, flush=True)
        found = [one for child in children for one in json.loads(child.stdout.readline() if child.stdout else "[]")]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--loaders", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--processes", type=int, default=4, help="of clients")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child()
        return
    with tempfile.TemporaryDirectory() as name:
        rows: list[dict[str, Any]] = []
        ids = write_world(Path(name))
        print(
            "who asks | clients | connections | requests | asked twice | MiB sent over MiB of ids | "
            "pages decoded over pages | slowest client over median"
        )
        for way, title in WAYS.items():
            found = measure(
                way,
                Path(name),
                ids,
                ranks=options.ranks,
                num_loaders=options.loaders,
                steps=options.steps,
                processes=options.processes,
            )
            figures = [f"{found[key]:,}" for key in ("clients", "connections", "requests", "asked_twice")]
            figures.append(f"{found['MiB'] / found['MiB_of_ids']:.2f}")
            figures += [str(found[key]) for key in ("decode_amplification", "slowest_client_over_median")]
            rows.append({"way": way, **found})
            print(f"{title} | {' | '.join(figures)}", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
