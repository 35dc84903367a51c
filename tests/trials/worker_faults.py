"""Faults of a node: every step comes once, whatever is done to the process that reads, to its disk, or to all.

    python -m tests.trials.worker_faults --seed 1 --count 200 [--out worker_faults-1.json]

Each run is a job of random sizes and sources, whose tensors are compared with those of threads that read undisturbed.

    worker    the ranks are threads here; the worker is killed or stopped at random microbatches, at most twice, while
              reads of it fail and pass, or are slow, and in some runs its disk has no room for ids of open documents
    lasting   from some read on the disk fails: the ranks raise an error that names the source and the file, and a new
              job goes on from the state after the last whole step
    killed    real ranks, all of whose processes are killed or interrupted at once, in some runs as they come together
              or with a worker that is stopped; a new job goes on, and after it nothing is left
    index     the disk is full before the ids that an index keeps fit

Run i follows from the seed and i alone, so a trial that was stopped goes on where it was. Published: faults by kind,
wrong runs, and the longest wait for a microbatch after a fault of the worker, with and without a spare.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.killed_jobs import KilledJob
from tests.support.loaders import Rank, run_job, write_job
from tests.support.processes import wait_until, workers_of_this_process
from tests.support.read_faults import ReadFaults
from tests.support.small_disk import FULL, on_small_disk
from tests.support.step_hashes import hashes_of_steps
from torchmix.constructor.fields import Microbatch
from torchmix.errors import RankLost, SourceUnreadable
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader

LAYOUTS = ({}, {"dp": 2}, {"tp": 2, "dp": 2}, {"cp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"dp": 4})
METHODS = ("best_fit", "concat")
STEPS = 24
LATEST = 16
"""The last step at which something is done, so that there are some after it."""
SMALL_CACHE = "read: {cache: 160KiB}"
"""Pages are read again and again."""
END_S = 120.0
MOST_WRONG = 3
"""Runs that end a trial, since one that is wrong makes no faults and would be tried for ever."""
KINDS = {"worker": 6, "lasting": 2, "killed": 1, "index": 1}
"""How many of 10 runs are of each kind."""

Found = dict[str, Any]
"""What a run gives: `faults` by kind, `wrong`, and with a worker that was lost, `spares` and `longest_s` by signal."""


class _Faults:
    """What is done to the worker, by one rank, and how long the next microbatch takes to come."""

    def __init__(self, draw: random.Random, num_microbatches: int) -> None:
        self.at = sorted(draw.sample(range(num_microbatches), draw.choice((1, 1, 2))))
        self.signals = {place: draw.choice((signal.SIGKILL, signal.SIGSTOP)) for place in self.at}
        self.longest_s = {"SIGKILL": 0.0, "SIGSTOP": 0.0}
        self.met = Counter[str]()
        self._place = 0
        self._struck, self._struck_s = "", 0.0

    def after(self, loader: StatefulDataLoader) -> None:
        """What is due at a microbatch."""
        if self._struck:
            self.longest_s[self._struck] = max(self.longest_s[self._struck], time.monotonic() - self._struck_s)
        if self._place in self.signals:
            with suppress(ProcessLookupError):  # it has just been ended, and another begins
                os.kill(loader.dataset._node._keeper.pid, self.signals[self._place])
                self._struck = self.signals[self._place].name
                self.met[self._struck] += 1
        self._place += 1
        self._struck_s = time.monotonic()


def _program(faults: _Faults | None = None) -> Any:
    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        def after(_: Microbatch) -> None:
            if faults is not None and loader._tree.topology.rank == 0:
                faults.after(loader)

        rank.result = hashes_of_steps(loader, after=after)

    return program


def _until_it_fails(states: list[dict[int, bytes]]) -> Any:
    """A program whose result is what came before an error, and its words; the states after each whole step."""

    def program(loader: StatefulDataLoader, rank: Rank) -> None:
        own: dict[int, bytes] = {}
        states.append(own)
        found: dict[int, str] = {}

        def microbatches() -> Any:
            try:
                yield from loader
            except (SourceUnreadable, RankLost) as error:  # peers are told what their leader met
                rank.result = found, str(error)

        rank.result = found, ""

        def after(microbatch: Microbatch) -> None:
            if microbatch.is_last_of_step:
                own[microbatch.step + 1] = loader.state_dict()["torchmix_state"]

        found.update(hashes_of_steps(microbatches(), after=after))

    return program


def _undisturbed(recipe: Path, topology: Topology, **options: Any) -> list[dict[int, str]]:
    return [rank.result for rank in run_job(recipe, topology, program=_program(), **options)]


def _workers_end() -> None:
    wait_until(lambda: not workers_of_this_process(), deadline_s=END_S, what="end of the workers")


def _of_worker(draw: random.Random, folder: Path) -> Found:
    sizes, spares = draw.choice(LAYOUTS), draw.choice((0, 0, 1))
    options = {"max_steps": STEPS, "look_ahead": draw.choice((1, 2, 4))}
    recipe = write_job(folder / "job", seed=draw.randrange(4), method=draw.choice(METHODS), extra=SMALL_CACHE)
    topology = Topology(**sizes)
    expected = _undisturbed(recipe, topology, **options)
    faults = _Faults(draw, LATEST * 8 // topology.dp)
    reads = ReadFaults(
        folder=str(folder / "faults"), seed=str(draw.random()), eio=0.01, slow=0.005, full=draw.random() < 0.3
    )
    with reads.in_children():
        loaders = {"where": "node", "spares": spares}
        ranks = run_job(recipe, topology, program=_program(faults), loaders=loaders, **options)
    _workers_end()
    return {
        "faults": faults.met + Counter(reads.met()),
        "wrong": [rank.result for rank in ranks] != expected,
        "spares": spares,
        "longest_s": faults.longest_s,
    }


def _of_lasting(draw: random.Random, folder: Path) -> Found:
    options = {"max_steps": STEPS, "look_ahead": draw.choice((1, 2, 4))}
    recipe = write_job(folder / "job", seed=draw.randrange(4), method=draw.choice(METHODS), extra=SMALL_CACHE)
    topology = Topology(**draw.choice(LAYOUTS))
    expected = _undisturbed(recipe, topology, **options)
    reads = ReadFaults(folder=str(folder / "faults"), seed="", lasting=draw.choice((0, 5, 15, 40)))
    states: list[dict[int, bytes]] = []
    with reads.in_children():
        loaders = {"where": "node"}
        first = run_job(recipe, topology, program=_until_it_fails(states), loaders=loaders, **options)
        before = [rank.result[0] for rank in first]
        said = {rank.result[1] for rank in first}
        whole = set.intersection(*map(set, states))
        begin = max(whole, default=0)
        state = {"torchmix_state": states[0][begin]} if whole else None
        second = run_job(recipe, topology, program=_program(), loaders=loaders, state=state, **options)
    _workers_end()
    together = [
        {**{step: found for step, found in one.items() if step < begin}, **rank.result}
        for one, rank in zip(before, second, strict=True)
    ]
    is_once = all(min(rank.result, default=begin) == begin for rank in second)
    # Pages that are read ahead and not needed yet fail nobody.
    is_named = said == {""} or all("source '" in text and ".parquet" in text and "start again" in text for text in said)
    return {
        "faults": Counter(reads.met()) and Counter({"lasting": 1}),
        "wrong": together != expected or not is_named or not is_once,
    }


def _of_killed(draw: random.Random, folder: Path) -> Found:
    recipe = write_job(folder / "job", seed=draw.randrange(4), method=draw.choice(METHODS), extra=SMALL_CACHE)
    topology = Topology(**draw.choice([sizes for sizes in LAYOUTS if sizes]))
    expected = _undisturbed(recipe, topology, max_steps=STEPS)
    job = KilledJob(recipe, folder / "ranks", topology, steps=STEPS)
    number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGINT))
    kill_at = None if number == signal.SIGKILL and draw.random() < 0.3 else draw.randrange(LATEST)
    stops_worker = kill_at is not None and draw.random() < 0.5
    found = job.steps_of_ranks(kill_at=kill_at, number=number, stops_worker=stops_worker)
    return {"faults": Counter({f"all processes, {signal.Signals(number).name}": 1}), "wrong": found != expected}


def _of_index(draw: random.Random, folder: Path) -> Found:
    seed, room_kib = draw.randrange(4), draw.choice((0, 8, 40, 120))
    [expected] = _undisturbed(write_job(folder / "job", seed=seed), Topology(), max_steps=STEPS)
    text = on_small_disk(folder / "disk", str(seed), str(room_kib), str(STEPS))
    found = json.loads(text)
    steps = {int(step): tensors for step, tensors in found["steps"].items()}
    is_named = any(words in text for words in FULL for text in (*found["said"], found["error"]))
    no_halves = all(name.endswith(".ids") for name in found["kept"])
    return {"faults": Counter({"full index": 1}), "wrong": steps != expected or not is_named or not no_halves}


RUNS = {"worker": _of_worker, "lasting": _of_lasting, "killed": _of_killed, "index": _of_index}


def one_run(seed: int, number: int, kinds: Sequence[str] = tuple(KINDS)) -> Found:
    """A job with faults, and the same without."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choices(kinds, [KINDS[kind] for kind in kinds])[0]
    with tempfile.TemporaryDirectory() as folder:
        try:
            return {"kind": kind, **RUNS[kind](draw, Path(folder))}
        except Exception:
            return {"kind": kind, "faults": Counter(), "wrong": True, "error": traceback.format_exc()}


def run_trial(*, seed: int, count: int, out: Path | None = None, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, Any]:
    """Go on until `count` faults were made."""
    result: dict[str, Any] = {"seed": seed, "done": 0, "runs": {}, "faults": {}, "wrong": [], "longest_s": {}}
    if out is not None and out.exists():
        result = json.loads(out.read_text())
    while result["done"] < count and len(result["wrong"]) < MOST_WRONG:
        number = sum(result["runs"].values())
        found = one_run(seed, number, kinds)
        if found["wrong"]:
            result["wrong"].append({"run": number, "kind": found["kind"], "error": found.get("error", "other tensors")})
        for name, seconds in found.get("longest_s", {}).items():
            key = f"{name}, {'a spare' if found['spares'] else 'cold'}"
            result["longest_s"][key] = max(result["longest_s"].get(key, 0.0), round(seconds, 2))
        for name, times in found["faults"].items():
            result["faults"][name] = result["faults"].get(name, 0) + times
        result["done"] = sum(result["faults"].values())
        result["runs"][found["kind"]] = result["runs"].get(found["kind"], 0) + 1
        if out is not None:
            out.write_text(json.dumps(result, indent=1))
        if len(result["wrong"]) > 20:
            break
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="faults")
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = run_trial(seed=arguments.seed, count=arguments.count, out=arguments.out, kinds=arguments.kinds)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
