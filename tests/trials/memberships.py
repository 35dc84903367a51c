"""Jobs whose processes die, leave and come: what is learned is what a run learns that nothing befell.

    python -m tests.trials.memberships --seed 1 --count 100 --out memberships.json

A run has 2 to 16 ranks at a time, each a process forked from this one, over gloo: all in one process group, or in
replicas of 1 to 4 ranks that share none with each other, as those of torchft. At steps drawn from the seed some are
killed, in any part of a step or of a meeting, some leave, and others join; one process, or replica, stays throughout.
Whoever is of a replica that loses a rank ends, or waits until another process has its place. Must hold, of every run:
each step that was committed has the digest and the weights, bit for bit, of a job of one rank; its samples are those of
the plan, each once; a process that fell behind repeats no committed step. Published: what befell the runs, the longest
pause between two commits of a process in seconds of processor and in steps that others committed, and steps made twice.
Cost: a second of a processor for each process.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from tests.support.deadlines import stretched
from tests.support.elastic_rank import WIDTH, Script, gradient_of, rank_of, samples_of, updated
from tests.support.forked_ranks import ForkedRanks
from tests.support.loaders import write_job
from tests.support.trial import continued, trial_parser
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader

STEPS = 9
PLACES = ("step", "step", "commit", "border", "meeting", "new")
DEADLINE_S = 240.0
MOST_RANKS = 16
SIZES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (1, 3, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2)]
"""Of tensor-parallel ranks, stages and samples apart in a replica."""
Found = dict[str, Any]


def scripts_of(draw: random.Random, *, is_apart: bool) -> list[tuple[int, Script]]:
    """The processes of a run, each with the step at which it is started; founders have -1."""
    if not is_apart:
        return members_of(draw, draw.choice([2, 3, 4, 5, 6, 8, 11, MOST_RANKS]))
    tp, pp, dp = draw.choice(SIZES)
    size = tp * pp * dp
    found: list[tuple[int, Script]] = []
    lives: list[tuple[int, Script]] = []
    for step, one in members_of(draw, draw.randrange(2, MOST_RANKS // size + 1)):
        replica = msgspec.structs.replace(one, replica=one.name, tp=tp, pp=pp, dp=dp, is_filled=draw.random() < 0.5)
        dies = draw.randrange(size)
        for rank in range(size):
            is_dying = replica.dies_at >= 0 and rank == dies
            name, dies_at = f"{one.name}.{rank}", replica.dies_at if is_dying else -1
            script = msgspec.structs.replace(replica, rank=rank, name=name, dies_at=dies_at)
            found.append((step, script))
            if is_dying and script.is_filled:
                again = msgspec.structs.replace(script, life=1, dies_at=-1, name=f"{name}.1", replaces=name)
                lives.append((STEPS, again))
    return found + lives


def members_of(draw: random.Random, num_ranks: int) -> list[tuple[int, Script]]:
    """The members of a run, one process each, with the step at which it is started."""
    tp, where = draw.choice([1, 1, 2]), "node" if draw.random() < 0.15 else "in_process"
    founders = max(2, num_ranks - draw.randrange(num_ranks))
    begin, waits = [-1] * founders, dict[int, int]()
    late = num_ranks - founders + draw.randrange(3)
    for _ in range(late):
        begin.append(draw.randrange(1, STEPS - 2))
    begin.sort()
    for step in {*begin} - {-1}:
        waits[step] = sum(one <= step for one in begin)
    found = []
    for number, step in enumerate(begin):
        dies_at = leaves_at = -1
        place, fate = draw.choice(PLACES), draw.random()
        if number and fate < 0.4:
            dies_at = draw.randrange(max(0, step), STEPS - 1)
        elif number and fate < 0.6:
            leaves_at = draw.randrange(max(1, step + 1), STEPS - 1)
        found.append(
            (
                step,
                Script(
                    name=f"p{number:02d}",
                    founders=founders,
                    stop=STEPS,
                    dies_at=dies_at,
                    dies_in=place,
                    leaves_at=leaves_at,
                    waits_at=waits,
                    tp=tp,
                    where=where,
                ),
            )
        )
    return found


@cache
def expected(recipe: Path) -> tuple[list[str], list[str], list[Counter[str]]]:
    """Digest, weights and samples of each step, by one rank."""
    import hashlib

    digests, learned, samples, weights = [], [], [], torch.zeros(WIDTH, dtype=torch.int64)
    with build_loader(recipe, topology=Topology(), loaders="in_process", max_steps=STEPS) as loader:
        here, gradient = [], torch.zeros(WIDTH, dtype=torch.int64)
        for microbatch in loader:
            here.append(microbatch)
            gradient += gradient_of(microbatch)
            if microbatch.is_last_of_step:
                weights = updated(weights, gradient)
                digests.append(loader.order_digest)
                learned.append(hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
                samples.append(Counter(samples_of(here)))
                here, gradient = [], torch.zeros(WIDTH, dtype=torch.int64)
    return digests, learned, samples


def run(recipe: Path, folder: Path, scripts: list[tuple[int, Script]]) -> ForkedRanks:
    """Run all processes to their end, and one that hosts their store."""
    port, ended = folder / "port", folder / "ended"

    def host(_: int) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "writing").write_text(str(store.port))
        (folder / "writing").rename(port)
        while not ended.exists():
            time.sleep(0.02)

    def program(number: int) -> None:
        while not port.exists():
            time.sleep(0.01)
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False)
        rank_of(recipe, folder, store, scripts[number][1]).run()

    with ForkedRanks(partial(to_its_end, host), world_size=1, folder=folder / "host"):
        ranks = run_ranks(partial(to_its_end, program), folder, scripts)
        ended.touch()
    return ranks


def to_its_end(program: Callable[[int], None], number: int) -> None:
    """Run a program in a fork, which takes nothing apart that is its parent's."""
    code = 1
    try:
        program(number)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def run_ranks(program: Callable[[int], None], folder: Path, scripts: list[tuple[int, Script]]) -> ForkedRanks:
    """Start each process when its step has come, and wait for the ends of all."""
    founders = sum(step < 0 for step, _ in scripts)
    with ForkedRanks(program, world_size=founders, folder=folder) as ranks:
        waiting, deadline_s = [*range(founders, len(scripts))], time.monotonic() + stretched(DEADLINE_S)
        while ranks.running:
            now = int((folder / "step").read_text() or -1) if (folder / "step").exists() else -1
            ended = {scripts[number][1].name for number in ranks.code_of_rank if ranks.code_of_rank[number]}
            for number in [*waiting]:
                step, script = scripts[number]
                if script.replaces in ended if script.replaces else step <= now:
                    waiting.remove(number)
                    ranks.start(number)
            if time.monotonic() > deadline_s:
                ranks.await_ends(deadline_s=0.0)
                raise AssertionError(f"still running at the deadline: {ranks.running}\n{ranks.report()}")
            time.sleep(0.02)
    return ranks


def lines_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each process has said."""
    return {
        path.stem.removeprefix("given-"): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("given-*.jsonl"))
    }


def judge(recipe: Path, lines: dict[str, list[dict[str, Any]]]) -> Found:
    """Compare what was committed with what one rank does; an AssertionError says what does not hold."""
    digests, learned, samples = expected(recipe)
    last_group: dict[int, int] = {}
    longest, behind, repeated, uneven = 0.0, 0, 0, 0
    for name, said in lines.items():
        before: dict[str, Any] | None = None
        for line in said:
            if "committed" not in line:
                continue
            step = line["committed"]
            assert (line["digest"], line["weights"]) == (digests[step], learned[step]), f"{name}: {line}"
            assert before is None or step > before["committed"], f"{name} has committed step {step} twice"
            if before is not None and before["group"] != line["group"]:
                longest = max(longest, line["cpu_s"] - before["cpu_s"])
                behind = max(behind, step - before["committed"] - 1)
            last_group[step] = max(last_group.get(step, 0), line["group"])
            before = line
    assert sorted(last_group) == list(range(STEPS)), f"committed: {last_group}"
    tried: dict[int, set[int]] = {}
    for said in lines.values():
        for line in said:
            if "given" in line:
                tried.setdefault(line["given"], set()).add(line["group"])
    for step, group in last_group.items():
        here = [
            line["samples"]
            for said in lines.values()
            for line in said
            if line.get("given") == step and line["group"] == group
        ]
        given = Counter(one for rank in here for one in rank)
        assert given == samples[step], f"step {step}, group {group}: {given - samples[step]}, {samples[step] - given}"
        repeated = max(repeated, len(tried[step]) - 1)
        uneven += len({len(rank) for rank in here if rank}) > 1
    sizes = [line["world_size"] for said in lines.values() for line in said if "begins" in line]
    groups = {line["group"] for said in lines.values() for line in said if "begins" in line}
    lost = sum("lost" in line for said in lines.values() for line in said)
    return {
        "groups": len(groups),
        "smallest": min(sizes),
        "largest": max(sizes),
        "losses_seen": lost,
        "longest_pause_cpu_s": round(longest, 3),
        "longest_pause_steps": behind,
        "most_tries_of_a_step": repeated + 1,
        "uneven_steps": uneven,
        "late": sum("late" in line for said in lines.values() for line in said),
        "broken": sum("broken" in line for said in lines.values() for line in said),
    }


def try_one(seed: int, number: int) -> Found:
    """One run; every second one has replicas."""
    draw = random.Random(f"memberships {seed} {number}")
    scripts = scripts_of(draw, is_apart=number % 2 == 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_job(folder, samples=draw.choice([5, 8, 12, 16, 24]), method=draw.choice(["best_fit", "concat"]))
        began_s = time.monotonic()
        ranks = run(recipe, folder / "run", scripts)
        lines = lines_of(folder / "run")
        try:
            for rank, (_, script) in enumerate(scripts):
                code = ranks.code_of_rank.get(rank, 0)
                assert code == 0 or (code == -9 and script.dies_at >= 0), f"{script.name} ended with {code}"
            found = judge(recipe, lines)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{scripts}\n{ranks.report()}") from error
    killed = sum(code == -9 for code in ranks.code_of_rank.values())
    left = sum(1 for _, script in scripts if script.leaves_at >= 0)
    came = sum(0 <= step < STEPS for step, _ in scripts)
    filled = sum(ranks.code_of_rank.get(number) == 0 for number, (_, one) in enumerate(scripts) if one.replaces)
    return {
        "ranks": len(scripts),
        "replica": max(one.tp * one.pp * one.dp for _, one in scripts) if scripts[0][1].replica else 0,
        "killed": killed,
        "leave": left,
        "come": came,
        "filled": filled,
        **found,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def main() -> None:
    """Run the trial."""
    asked = trial_parser(__doc__, count=100, out="memberships.json").parse_args()
    done = continued(asked, try_one)
    runs = [done[f"{asked.seed}/{number}"] for number in range(asked.count)]
    summed = ("killed", "leave", "come", "filled", "broken", "groups", "uneven_steps")
    totals = {name: sum(run[name] for run in runs) for name in summed}
    largest = ("replica", "longest_pause_cpu_s", "longest_pause_steps", "most_tries_of_a_step")
    most = {name: max(run[name] for run in runs) for name in largest}
    print(json.dumps({"runs": len(runs), **totals, **most}, indent=1))


if __name__ == "__main__":
    main()
