"""Trial: many clients of two loaders, that come and go, most over ipc and some over TCP with keys; as one JSON.

    python -m tests.trials.many_clients --seed 1 --clients 256 --steps 20000 --out clients.json

The clients come in waves. A wave is some processes with the same number of clients each; all are connected before any
asks. Every second process ends by SIGKILL, with no goodbye. Each answer is compared with the documents written. Must
hold: a loader has no more descriptors than connections and a few; it closes those of clients that are gone; after the
first wave its memory does not grow by more than a bound. Published: p50 and p99 of a request, descriptors and memory of
each loader after each wave. The bounds are the trial's, `run` asserts them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zmq

from benchmarks.fleet_clients import AT_ONCE, DOCUMENTS, RECIPE, TOKENS, SharedContext, catalog_in, write_world
from tests.support.fleets import PATIENT, fleet_of
from tests.support.processes import wait_until
from torchmix.reader.protocol import WantedPieces
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.keys import client_keys, write_keys
from torchmix.service.main import LoaderStart
from torchmix.service.pool import LoaderPool, starts_of
from torchmix.service.server import new_pair

LOADERS, PROCESSES, WAVES, DOCUMENTS_OF_STEP = 2, 4, 4, 8
MORE_DESCRIPTORS = 16
"""What a loader may have open beside one descriptor a connection and what it had before any client."""
MORE_BYTES = 24 << 20
"""What a loader may grow by after its first wave."""


def memory(pid: int) -> int:
    """Bytes of a process that it shares with no file."""
    words = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def ask(asked: dict[str, Any]) -> None:
    """A process of clients: `ready` when all are connected; after a line, their steps, and the times in seconds."""
    folder = Path(asked["folder"])
    catalog, ids = catalog_in(folder), np.load(folder / "ids.npy", mmap_mode="r")
    keys = client_keys(folder / "keys" / "client-0.secret")
    turns, took_s, faults = deque[int](), list[float](), list[str]()
    turns.extend(client for _ in range(asked["steps"]) for client in range(asked["clients"]))
    shared = SharedContext()
    with mock.patch.object(zmq, "Context", lambda: shared):
        readers = [
            FleetReader(
                catalog,
                fleet_of(
                    catalog,
                    asked["far"] if client % 4 == 0 else asked["near"],
                    keys=keys if client % 4 == 0 else None,
                    patience=PATIENT,
                    seed=RECIPE["seed"],  # type: ignore[arg-type]
                ),
            )
            for client in range(asked["clients"])
        ]
    locks = [threading.Lock() for _ in readers]

    def steps() -> None:
        with suppress(IndexError):
            while not faults:
                client = turns.popleft()
                chance = np.random.default_rng([asked["seed"], asked["number"], len(turns)])
                rows = np.sort(chance.choice(DOCUMENTS, DOCUMENTS_OF_STEP, replace=False))
                wanted = WantedPieces.end_to_end(
                    source=0, row=rows, epoch=0, start=0, tokens=np.full(len(rows), TOKENS)
                )
                with locks[client]:
                    began_s = time.monotonic()
                    found = readers[client].read(wanted)
                    took_s.append(time.monotonic() - began_s)
                if not np.array_equal(found.values, ids[rows].ravel()):
                    faults.append(f"client {client} has other tokens than the files at rows {rows.tolist()}")

    print("ready", flush=True)
    sys.stdin.readline()
    threads = [threading.Thread(target=steps) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"took_s": took_s, "faults": faults}), flush=True)
    sys.stdin.readline()
    if asked["is_killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
    for reader in readers:
        reader.close()
    shared.end()


def run(folder: Path, seed: int, *, clients: int, steps: int, waves: int = WAVES, processes: int = PROCESSES) -> Any:
    """All waves; the note. `clients` and `steps` are shared out evenly, and rounded up."""
    np.save(folder / "ids.npy", write_world(folder))
    write_keys(folder / "keys", new_pair, num_clients=1)
    (folder / "near").mkdir(mode=0o700)
    recipe = check_recipe(RECIPE)
    start = LoaderStart(
        parts={"train": part_of(recipe, "train")},
        base=str(folder),
        catalog_folder=str(folder / recipe.catalog),
        cache_bytes=8 << 20,
        bind="tcp://127.0.0.1:0",
        keys=str(folder / "keys"),
        near=f"ipc://{folder}/near",
    )
    each = -(-clients // processes)
    steps_each = -(-steps // (waves * processes * each))
    took_s: list[float] = []
    note: dict[str, Any] = {"seed": seed, "clients": each * processes, "waves": []}
    with ExitStack() as stack:
        pool = LoaderPool(starts_of(start, LOADERS))
        stack.callback(pool.close)
        pids, idle = list(pool.pids), [descriptors(pid) for pid in pool.pids]
        note["descriptors_before"] = idle
        asked = {"folder": str(folder), "seed": seed, "clients": each, "steps": steps_each, "far": pool.endpoints}
        asked["near"] = [f"ipc://{folder}/near/{number}" for number in range(LOADERS)]
        for wave in range(waves):
            children = []
            for number in range(processes):
                words = [sys.executable, "-m", "tests.trials.many_clients", "--child"]
                child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                stack.callback(child.wait)
                stack.callback(child.kill)
                children.append(child)
                one = {**asked, "number": wave * processes + number, "is_killed": number % 2 == 0}
                _say(child, json.dumps(one))
            for child in children:
                assert child.stdout is not None and child.stdout.readline() == "ready\n", "a client has not connected"
            for child in children:
                _say(child, "go")
            for child in children:
                found = json.loads(child.stdout.readline() if child.stdout else "")
                assert not found["faults"], found["faults"][0]
                assert len(found["took_s"]) == each * steps_each, "a step has no answer"
                took_s += found["took_s"]
            open_now = [descriptors(pid) for pid in pids]
            for child in children:
                _say(child, "end")
                child.communicate()
            wait_until(
                lambda: all(
                    descriptors(pid) <= before + MORE_DESCRIPTORS for pid, before in zip(pids, idle, strict=True)
                ),
                deadline_s=120,
                what="loaders to close what clients had that are gone",
            )
            note["waves"].append(
                {
                    "descriptors": open_now,
                    "descriptors_after": [descriptors(pid) for pid in pids],
                    "memory_mib": [memory(pid) >> 20 for pid in pids],
                }
            )
        assert list(pool.pids) == pids, "a loader was started again"
    note |= {"steps": len(took_s)}
    note |= {f"p{q}_ms": round(float(np.quantile(took_s, q / 100)) * 1e3, 2) for q in (50, 99)}
    for number, before in enumerate(idle):
        for one in note["waves"]:
            limit = before + each * processes + MORE_DESCRIPTORS
            assert one["descriptors"][number] <= limit, f"more than {limit} descriptors: {note}"
            grown = one["memory_mib"][number] - note["waves"][0]["memory_mib"][number]
            assert grown <= MORE_BYTES >> 20, f"the memory of loader {number} grows: {note}"
    return note


def _say(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    print(line, file=child.stdin, flush=True)


def main() -> None:
    """Run the trial, and write its note."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20000, help="of all clients together")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        ask(json.loads(sys.stdin.readline()))
        return
    with tempfile.TemporaryDirectory() as folder:
        note = run(Path(folder), arguments.seed, clients=arguments.clients, steps=arguments.steps)
    text = json.dumps(note, indent=1)
    if arguments.out:
        arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
