"""Lost node workers: every step comes once, whatever is done to the process that reads.

    python -m tests.trials.worker_faults --seed 1 --count 200 [--out worker_faults-1.json]

Each run is a job of random sizes and sources, all its ranks in this process. At random microbatches the worker is
killed or stopped, at most twice a run. The tensors are compared with those of threads that read undisturbed. Run i
follows from the seed and i alone, so a trial that was stopped goes on where it was. Published: faults, wrong runs, and
the longest wait for a microbatch after a fault, with and without a spare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.support.loaders import Rank, run_job, write_job
from tests.support.node_rank import hash_of
from tests.support.processes import wait_until, workers_of_this_process
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader

LAYOUTS = ({}, {"dp": 2}, {"tp": 2, "dp": 2}, {"cp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"dp": 4})
METHODS = ("best_fit", "concat")
STEPS = 10
END_S = 30.0


class _Faults:
    """What is done to the worker, by one rank, and how long the next microbatch takes to come."""

    def __init__(self, draw: random.Random, num_microbatches: int) -> None:
        self.at = sorted(draw.sample(range(num_microbatches), draw.choice((1, 1, 2))))
        self.signals = {place: draw.choice((signal.SIGKILL, signal.SIGSTOP)) for place in self.at}
        self.longest_s = {"SIGKILL": 0.0, "SIGSTOP": 0.0}

    def strike(self, place: int, loader: StatefulDataLoader) -> str:
        """Do what is due at a microbatch; the signal's name."""
        if place not in self.signals:
            return ""
        os.kill(loader.dataset._node._host.pid, self.signals[place])
        return self.signals[place].name


def _program(faults: _Faults | None) -> Any:
    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        found, struck = hashlib.sha256(), ""
        iterator = iter(loader)
        for place in range(10**6):
            began_s = time.monotonic()
            microbatch = next(iterator, None)
            if faults is not None and struck:
                faults.longest_s[struck] = max(faults.longest_s[struck], time.monotonic() - began_s)
            if microbatch is None:
                break
            hash_of(microbatch, found)
            if faults is not None and loader._tree.topology.rank == 0:
                struck = faults.strike(place, loader) or struck
        rank.result = found.hexdigest(), loader.order_digest

    return program


def one_run(seed: int, number: int) -> dict[str, Any]:
    """A job with faults, and the same without."""
    draw = random.Random(f"{seed}/{number}")
    sizes, spares = draw.choice(LAYOUTS), draw.choice((0, 0, 1))
    options = {"max_steps": STEPS, "look_ahead": draw.choice((1, 2, 4))}
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_job(Path(folder), seed=draw.randrange(4), method=draw.choice(METHODS))
        topology = Topology(**sizes)
        expected = [rank.result for rank in run_job(recipe, topology, program=_program(None), **options)]
        faults = _Faults(draw, STEPS * 8 // topology.dp)
        loaders = {"where": "node", "spares": spares}
        ranks = run_job(recipe, topology, program=_program(faults), loaders=loaders, **options)
        wait_until(lambda: not workers_of_this_process(), deadline_s=END_S, what="end of the workers")
    return {
        "faults": len(faults.at),
        "wrong": [rank.result for rank in ranks] != expected,
        "spares": spares,
        "longest_s": faults.longest_s,
    }


def run_trial(*, seed: int, count: int, out: Path | None = None) -> dict[str, Any]:
    """Go on until `count` faults were made."""
    result: dict[str, Any] = {"seed": seed, "done": 0, "runs": 0, "wrong": [], "longest_s": {}}
    if out is not None and out.exists():
        result = json.loads(out.read_text())
    while result["done"] < count:
        number = result["runs"]
        try:
            found = one_run(seed, number)
        except Exception:
            found = {"faults": 0, "wrong": True, "spares": 0, "longest_s": {}, "error": traceback.format_exc()}
        if found["wrong"]:
            result["wrong"].append({"run": number, "error": found.get("error", "other tensors")})
        for name, seconds in found["longest_s"].items():
            key = f"{name}, {'a spare' if found['spares'] else 'cold'}"
            result["longest_s"][key] = max(result["longest_s"].get(key, 0.0), round(seconds, 2))
        result["done"] += found["faults"]
        result["runs"] = number + 1
        if out is not None:
            out.write_text(json.dumps(result, indent=1))
        if len(result["wrong"]) > 20:
            break
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="faults")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = run_trial(seed=arguments.seed, count=arguments.count, out=arguments.out)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
