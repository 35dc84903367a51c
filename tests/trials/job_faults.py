"""A job with loaders of its own, to which all that can happen does; as one JSON.

    python -m tests.trials.job_faults --seed 1 --count 200 --out job_faults-1.json

Each run is a job of two or four real ranks, with node workers and loaders: two nodes of two loaders each, with a spare
worker (*spare*) or without (*cold*), one node with one loader (*alone*), two hosts in network namespaces (*hosts*,
where such may be made), or two commands `torchmix serve` with two loaders each (*served*). Faults: SIGKILL and SIGSTOP
of a worker, of a loader, of all loaders, and so of all owners of every page; SIGSTOP of a rank, which keeps loaders and
a worker; SIGKILL of a rank, after which all others name it and end, and the job continues from its last state; SIGKILL
and SIGSTOP of a command, SIGKILL of both at once, after which they are started again; reads of a loader that give EIO
or are slow; roads to loaders that are cut, delay, drop, repeat, reorder or flip bits; a host's link that is down for a
while. Must hold: every rank has, for every step, the tensors of a run that reads in threads undisturbed, whenever it is
given that step, and the same digest at the end; no process, registration or file is left. Published: the longest wait
for a microbatch after a fault of each kind; what was asked twice, over all requests of all clients.
Run i follows from the seed and i alone, but for the clock; a trial that was stopped goes on where it was. Cost: some
five seconds a fault.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import PORT, Host, hosts
from tests.support.loaders import Rank, run_job, write_job
from tests.support.node_rank import hash_of
from tests.support.processes import COMMAND_LINE, Child, Processes, wait_until
from tests.support.told_reads import hooked
from torchmix.parallel.topology import Topology
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.steps.worker.keeper import MOST_LOSSES, WINDOW_S

PLACES = ("spare", "cold", "alone", "hosts", "served")
LOADERS = {
    "spare": "job,processes=2,spares=1",
    "cold": "job,processes=2",
    "alone": "job,processes=1",
    "hosts": "job,processes=2",
    "served": "remote,endpoints={endpoints}",
}
LAYOUTS = ({"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2})
SIGNALS = ("kill worker", "stop worker", "kill loader", "stop loader", "kill owners", "stop owners")
KEEPERS = ("stop keeper", "kill keeper")
SERVES = ("stop serve", "kill serve", "kill serves")
READS = ("eio", "slow")
ROADS = ("cut", "delay", "flip", "repeat", "drop", "reorder")
STEPS, PAUSE_S = 100, 0.3
LAST_STEPS = 5
"""So near to its end a job is not killed: it might end before."""
SAFE_STOP_S = 2.0
"""A rank that is stopped for three seconds is lost."""
DEADLINE_S = 300.0
WORKER, LOADER = "steps.worker.main", "service.main"


class Running:
    """A job that runs, and what is done to it."""

    def __init__(
        self,
        start: Callable[[int], list[Child]],
        serve: Callable[[], Child] | None,
        folder: Path,
        places: Sequence[Host],
        draw: random.Random,
        most_steps: int,
    ) -> None:
        """Start it, and wait for its first step; `start` takes how often it was started, `serve` starts loaders."""
        self._start, self._serve = start, serve
        self._folder, self._places, self._draw, self._most_steps = folder, places, draw, most_steps
        self.lives: list[list[Child]] = []
        self.serves = [] if serve is None else [serve(), serve()]
        self._begin()

    @property
    def ranks(self) -> list[Child]:
        """Those of now."""
        return self.lives[-1]

    def _begin(self) -> None:
        self.lives.append(self._start(len(self.lives)))
        before = [step for step, _ in steps_of(self.lives[-2][0])] if len(self.lives) > 1 else [-1]
        for rank in self.ranks:
            rank.wait_for_line("step ", deadline_s=DEADLINE_S)
            first, _ = steps_of(rank)[0]
            # Rank 0 saves after it has printed: it may have been killed between.
            assert first == before[-1] + 1 or first == before[-1] >= 0, f"step {first} after {before}\n{self._report()}"

    def pids(self, word: str) -> list[int]:
        """Processes of all ranks and commands whose command line has a word."""
        owners = [*self.ranks, *self.serves]
        return sorted(pid for owner in owners for pid, command in owner.session.items() if word in command)

    def steps(self) -> int:
        """Steps that all ranks have done."""
        return min(max((step for step, _ in steps_of(rank)), default=-1) for rank in self.ranks) + 1

    @property
    def has_ended(self) -> bool:
        return any(rank.returncode is not None for rank in self.ranks)

    def strike(self, fault: str) -> bool:
        """Let a fault begin, hold a while, and end; whether there was something to strike."""
        hold_s = 0.3 + 1.7 * self._draw.random()
        word, _, whom = fault.partition(" ")
        if whom == "keeper":
            return self._strike_keeper(word, hold_s)
        if whom.startswith("serve"):
            chosen = self.serves if whom == "serves" else [self._draw.choice(self.serves)]
            self._strike_serves(chosen, word, hold_s)
        elif whom:
            chosen = self.pids(WORKER if whom == "worker" else LOADER)
            if chosen and whom != "owners":
                chosen = [self._draw.choice(chosen)]
            if not chosen:
                return False
            _signal(chosen, signal.SIGKILL if word == "kill" else signal.SIGSTOP)
            if word == "stop":
                time.sleep(2 * hold_s)  # some are started again meanwhile, others go on
                _signal(chosen, signal.SIGCONT)
        elif fault in READS:
            loaders = self.pids(LOADER)
            places = [self._folder / f"read-{pid}" for pid in self._draw.sample(loaders, min(1, len(loaders)))]
            for place in places:
                place.write_text(fault)
            time.sleep(2 * hold_s)
            for place in places:
                place.unlink()
        elif fault == "link":
            host = self._draw.choice(self._places)
            link = ("ip", "-n", host.namespace, "link", "set", host.interface)
            subprocess.run([*link, "down"], check=True, timeout=60)
            time.sleep(hold_s)
            subprocess.run([*link, "up"], check=True, timeout=60)
        else:
            new = self._folder / "road.new"
            new.write_text(f"{fault} {self._draw.choice(('all', *range(4)))}")
            new.replace(self._folder / "road")
            time.sleep(hold_s)
            (self._folder / "road").unlink()
        return True

    def _strike_keeper(self, word: str, hold_s: float) -> bool:
        lost = self._draw.randrange(len(self.ranks))
        rank = self.ranks[lost]
        own = [pid for pid, command in rank.session.items() if "stall_rank" in command] or [rank.pid]
        if self.steps() > self._most_steps - LAST_STEPS:
            return False
        if word == "stop":
            began_s = time.monotonic()
            _signal(own, signal.SIGSTOP)
            time.sleep(min(hold_s, 1.0))
            _signal(own, signal.SIGCONT)
            if time.monotonic() - began_s < SAFE_STOP_S:
                return True
        # A rank that was stopped for longer, since this process was held up itself, may be lost: now it is.
        _signal(own, signal.SIGKILL)
        self._wait(lambda: all(one.returncode is not None for one in self.ranks), "end of all ranks")
        for one in self.ranks:
            self._wait(lambda one=one: not one.session, "end of all that a rank has started")
            assert one is rank or (one.returncode and f"rank {lost} lost: " in one.stderr()), self._report()
        self._begin()
        return True

    def _strike_serves(self, chosen: Sequence[Child], word: str, hold_s: float) -> None:
        _signal([child.pid for child in chosen], signal.SIGKILL if word == "kill" else signal.SIGSTOP)
        time.sleep(2 * hold_s)
        if word == "stop":
            _signal([child.pid for child in chosen], signal.SIGCONT)
            return
        for child in chosen:
            self._wait(lambda child=child: not child.session, "end of all that a command has started")
        assert self._serve is not None
        self.serves = [child for child in self.serves if child not in chosen]
        self.serves += [self._serve() for _ in chosen]

    def end_serves(self) -> None:
        """End the commands as a user does; nothing of them may be left."""
        for child in self.serves:
            child.send_signal(signal.SIGTERM)
        for child in self.serves:
            assert child.wait(deadline_s=DEADLINE_S) == 0, child.report()
            self._wait(lambda child=child: not child.session, "end of all that a command has started")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, deadline_s=DEADLINE_S, what=lambda: f"{what}\n{self._report()}")

    def _report(self) -> str:
        return "\n".join(one.report() for one in [*self.ranks, *self.serves])

    def go_on(self, steps: int) -> None:
        """Until all have done so many steps more, or end."""
        wanted = self.steps() + steps
        self._wait(lambda: self.has_ended or self.steps() >= wanted, f"step {wanted}")


def steps_of(rank: Child) -> list[tuple[int, str]]:
    """The steps that a rank was given, each with the hash of its tensors."""
    lines = [line.split() for line in rank.stdout().splitlines() if line.startswith("step ")]
    return [(int(line[1]), line[2]) for line in lines if len(line) == 3 and len(line[2]) == 64]


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def one_run(
    seed: int,
    number: int,
    *,
    where: Sequence[str] = PLACES,
    most: int = 1000,
    steps: int = STEPS,
    only: Sequence[str] | None = None,
    done: int = 0,
) -> dict[str, Any]:
    """A job with faults until it ends, `most` at most, beside the same without.

    Faults are of kinds `only`, one after another from place `done` on; any kind may come at any time without it.
    """
    draw = random.Random(f"{seed}/{number}")
    where_now, sizes = draw.choice(where), draw.choice(LAYOUTS)
    by_road = draw.random() < 0.5 and where_now != "served"  # where loaders come and go, roads do not follow them
    topology, num_ranks = Topology(**sizes), math.prod(sizes.values())
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "chaos").mkdir()
        recipe = write_job(
            folder / "job", seed=draw.randrange(4), samples=32, length=2048, extra="read: {cache: 256KiB}"
        )
        expected = [rank.result for rank in run_job(recipe, topology, program=_hashed, max_steps=steps)]
        endpoints = folder / "endpoints"
        places = stack.enter_context(hosts(2)) if where_now == "hosts" else []
        processes = stack.enter_context(Processes(folder))
        words = {
            "LOADERS": LOADERS[where_now].format(endpoints=endpoints),
            "ROADS": "1" if by_road else "",
            "NODES": {"hosts": "0", "alone": "1"}.get(where_now, "2"),
            "TMPDIR": str(folder / "tmp"),
            **hooked(folder / "chaos"),
        }
        sizes_of = (steps, PAUSE_S, draw.choice((1, 2)), topology.tp, topology.pp)
        program = ["-m", "tests.support.stall_rank", str(recipe), *map(str, sizes_of)]

        def start(life: int) -> list[Child]:
            if places:
                of_hosts = range(num_ranks)
                return [_on_host(processes, places, one, num_ranks, program, words, PORT + life) for one in of_hosts]
            return processes.start_ranks(*program, world_size=num_ranks, environment=words)

        def serve() -> Child:
            command = (*COMMAND_LINE, "serve", str(recipe), "--processes", "2", "--register", str(endpoints))
            child = processes.fork_python(*command, name="serve", environment=words)
            child.wait_for_line("listen at", deadline_s=DEADLINE_S)
            return child

        running = Running(start, serve if where_now == "served" else None, folder / "chaos", places, draw, steps)
        kinds = [*SIGNALS, *KEEPERS, *(SERVES * 2 if where_now == "served" else ())]
        kinds += [*(READS if where_now not in ("alone", "hosts") else ()), *(ROADS if by_road else ())]
        kinds += ["link"] * 6 if places else []
        asked = [kind for kind in only or () if kind in kinds]
        faults: list[tuple[float, str]] = []
        while not running.has_ended and len(faults) < most:
            fault = asked[(done + len(faults)) % len(asked)] if asked else draw.choice(kinds)
            time.sleep(draw.random())
            at_s = time.monotonic()
            of_workers = [then_s for then_s, one in faults if one.endswith("worker") and at_s - then_s < 2 * WINDOW_S]
            if fault.endswith("worker") and len(of_workers) + 1 == MOST_LOSSES:
                continue  # the third within a minute ends a job, by design
            if running.strike(fault):
                faults.append((at_s, fault))
            if draw.random() < 0.7:
                running.go_on(2)
        processes.wait_all(running.ranks, deadline_s=DEADLINE_S)
        for rank in running.ranks:
            wait_until(lambda rank=rank: not rank.session, deadline_s=DEADLINE_S, what="end of all of a rank")
        running.end_serves()
        found = [json.loads(rank.stdout().splitlines()[-1]) for rank in running.ranks]
        left = [str(path) for place in (folder / "tmp", endpoints) if place.exists() for path in place.iterdir()]
        waits = [
            line.split()[1:]
            for ranks in running.lives
            for rank in ranks
            for line in rank.stdout().splitlines()
            if line.startswith("wait ")
        ]
        given = [
            ({step for life in running.lives for step in steps_of(life[number])}, one["digest"])
            for number, one in enumerate(found)
        ]
    counts = sum((Counter({k: v for k, v in one.items() if k.startswith("total")}) for one in found), Counter[str]())
    return {
        "where": where_now,
        "by_road": by_road,
        "faults": [[fault, _longest(waits, at_s, until_s)] for (at_s, fault), until_s in _spans(faults)],
        "wrong": given != expected,
        "left": left + [str(pid) for one in found for pid in one["left"]],
        "counts": counts,
    }


def _on_host(
    processes: Processes,
    places: Sequence[Host],
    rank: int,
    num_ranks: int,
    program: Sequence[str],
    words: dict[str, str],
    port: int,
) -> Child:
    of_host = num_ranks // len(places)
    around = {
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % of_host),
        "LOCAL_WORLD_SIZE": str(of_host),
        "GLOO_SOCKET_IFNAME": places[0].interface,
    }
    command = places[rank // of_host].command(sys.executable, *program)
    return processes.start(command, name=f"rank-{rank}", environment={**words, **around})


def _hashed(loader: StatefulDataLoader, rank: Rank) -> None:
    found, steps = hashlib.sha256(), set[tuple[int, str]]()
    for microbatch in loader:
        hash_of(microbatch, found)
        if microbatch.is_last_of_step:
            steps.add((microbatch.step, found.hexdigest()))
            found = hashlib.sha256()
    rank.result = steps, loader.order_digest


def _spans(faults: Sequence[tuple[float, str]]) -> list[tuple[tuple[float, str], float]]:
    """Each fault, and when the next one began."""
    ends = [*(at_s for at_s, _ in faults[1:]), float("inf")]
    return list(zip(faults, ends[: len(faults)], strict=True))


def _longest(waits: Sequence[Sequence[str]], at_s: float, until_s: float) -> float:
    """The longest wait that ended between two moments, in seconds."""
    spans = [(float(began), float(waited)) for began, waited in waits]
    return max((waited for began, waited in spans if at_s <= began + waited < until_s), default=0.0)


def run_trial(*, seed: int, count: int, out: Path | None = None, **options: Any) -> dict[str, Any]:
    """Go on until `count` faults were made."""
    result: dict[str, Any] = {"seed": seed, "done": 0, "runs": 0, "wrong": [], "longest_s": {}, "counts": {}}
    if out is not None and out.exists():
        result = json.loads(out.read_text())
        assert result["seed"] == seed, "another seed's file"
    while result["done"] < count and len(result["wrong"]) < 10:
        number = result["runs"]
        try:
            found = one_run(seed, number, most=count - result["done"], done=result["done"], **options)
        except pytest.skip.Exception as reason:
            found = {"where": str(reason), "by_road": False, "faults": [], "wrong": False, "left": [], "counts": {}}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            found = {"where": "", "by_road": False, "faults": [], "wrong": True, "left": [], "counts": {}}
            found["error"] = traceback.format_exc()
        if found["wrong"] or found["left"]:
            result["wrong"].append(
                {"run": number, "where": found["where"], **{k: found.get(k) for k in ("left", "error")}}
            )
        for fault, longest_s in found["faults"]:
            table = result["longest_s"].setdefault(fault, {})
            table[found["where"]] = max(table.get(found["where"], 0.0), round(longest_s, 2))
            result["counts"][fault] = result["counts"].get(fault, 0) + 1
        for name, value in found["counts"].items():
            result[name] = result.get(name, 0) + value
        result["done"] += len(found["faults"])
        result["runs"] = number + 1
        if out is not None:
            new = out.with_suffix(".new")
            new.write_text(json.dumps(result, indent=1))
            new.replace(out)
            print(number, found["where"], len(found["faults"]), file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="faults")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--where", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--only", nargs="+", metavar="FAULT", help="these kinds in turn, as 'kill keeper'")
    arguments = parser.parse_args()
    result = run_trial(
        seed=arguments.seed, count=arguments.count, out=arguments.out, where=arguments.where, only=arguments.only
    )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
