"""Forged states: each is refused by an error of torchmix, or is valid, and the loader goes on.

    python -m tests.trials.forged_states --seed 1 --count 2000 [--out forged_states-1.json]

Each state is one of a real run, with some of its values, its shape or its bytes changed and a digest that fits. A
process of its own loads it and takes a step and a microbatch more; it has a limit of memory, and one of time for each
state. Forged state i follows from the seed and i alone, so a trial that was stopped goes on where it was, and any one
can be looked at again:

    python -m tests.trials.forged_states --seed 1 --only 17
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.support.judge_process import JudgeProcess
from tests.support.loaders import open_job, write_job
from torchmix.errors import TorchmixError
from torchmix.parallel.topology import Topology
from torchmix.steps.state import decode_state

Tree = dict[str, Any]
MODULE = "tests.trials.forged_states"
TIME_S = 60.0
"""For one state. What is meant to be bounded takes a tenth of a second, also where two cores are shared by fifty."""
MEMORY_BYTES = 1 << 30
"""For all states of a process, beyond what it has when it has loaded the first one."""
HEAD_BYTES = 15
"""Before the digest: a magic word and the version."""
FAR_STEP = 300
"""Beyond it a step that is named alone is planned for long, as it says, and is not waited for."""

JOBS: dict[str, dict[str, Any]] = {
    "best fit": {},
    "concat": {"method": "concat", "seed": 6, "samples": "[{from_step: 0, samples: 4}, {from_step: 3, samples: 12}]"},
    "one sample": {"samples": 2, "length": 32, "seed": 8},
    "truncate": {"overflow": "truncate", "seed": 7, "extra": "split: [80, 10, 10]"},
}
NUMBERS = [0, 1, -1, 7, 255, 10**9, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
VALUES: list[Any] = [None, True, "", "0", "\0", "web", b"", b"12345678", 0.5, float("nan"), float("inf"), [], {}, [0]]


def leaves_of(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values that are neither a list nor a map."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [leaf for key, value in items for leaf in leaves_of(value, (*path, key))]
    return [path]


def lists_of(tree: Any) -> list[list[Any]]:
    """All lists in a tree, the tree's own first."""
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [tree] * isinstance(tree, list) + [found for value in items for found in lists_of(value)]


def change_number(tree: Tree, chance: random.Random) -> None:
    paths = [path for path in leaves_of(tree) if isinstance(value_at(tree, path), int)]
    # The pool has most numbers; the others are as likely, all together.
    in_pool = chance.random() < 0.5
    paths = [path for path in paths if (path[0] == "pool") == in_pool] or paths
    path = chance.choice(paths)
    value = value_at(tree, path)
    near = [value + 1, value - 1, 2 * value, -value, value + chance.randrange(1000), chance.getrandbits(62)]
    set_at(tree, path, chance.choice([*near, chance.choice(NUMBERS)]))


def change_type(tree: Tree, chance: random.Random) -> None:
    set_at(tree, chance.choice(leaves_of(tree)), chance.choice(VALUES))


def change_list(tree: Tree, chance: random.Random) -> None:
    found = chance.choice(lists_of(tree))
    at = chance.randrange(len(found) + 1)
    change = chance.randrange(4)
    if change == 0:
        found[at : at + 1] = []
    elif change == 1:
        found[at:at] = found[at : at + 1] or [chance.choice(VALUES)]
    elif change == 2:
        found += found[: chance.choice([1, 10, 100_000])]
    else:
        chance.shuffle(found)


def change_key(tree: Tree, chance: random.Random) -> None:
    key = chance.choice(sorted(tree))
    value = tree.pop(key)
    if chance.random() < 0.5:
        tree[key.upper()] = value


def change_pool(tree: Tree, chance: random.Random) -> None:
    """A pool whose columns fit each other."""
    columns = tree["pool"]
    change, size = chance.randrange(4), len(columns[0])
    if change == 0:
        columns[:] = [column * 2 for column in columns]
    elif change == 1:
        columns[6] = [value + chance.choice([1, 100, 2**31]) for value in columns[6]]
    elif change == 2:
        order = chance.sample(range(size), size)
        columns[:] = [[column[at] for at in order] for column in columns]
    else:
        count = chance.choice([1, 50, 20_000])
        columns[0] += [chance.randrange(3) for _ in range(count)]
        columns[1] += [0] * chance.choice([0, count])
        columns[2] += [0] * count
        columns[3] += [chance.randrange(1000) for _ in range(count)]
        columns[4] += [0] * count
        columns[5] += [chance.randrange(1, 64) for _ in range(count)]
        columns[6] += [0] * count


def change_decisions(tree: Tree, chance: random.Random) -> None:
    steps = [0, tree["step"] - 1, tree["step"], tree["step"] + 1, 2**31, 2**62]
    names = [*(stream[0] for stream in tree["streams"]), "none", "x" * 500]
    kinds, count = ["ran_out", "ran_out", "stage", "x"], chance.choice([1, 2, 5000])
    tree["decisions"] += [[chance.choice(steps), chance.choice(kinds), chance.choice(names)] for _ in range(count)]


def change_rows(tree: Tree, chance: random.Random) -> None:
    """What is known of a stream's rows: their fingerprint, their era, the sources that they lie in."""
    stream = chance.choice(tree["streams"])
    change = chance.randrange(3)
    if change == 0:
        stream[6] = chance.choice(["", "0" * 16, stream[6][::-1], "x" * 200])
    elif change == 1:
        stream[7] = chance.choice([1, -1, 2**62])
    else:
        names = [stream[0] for stream in tree["streams"]]
        tree["sources"] = chance.choice([names, names[::-1], ["none"], [*names, "none"], []])
        tree["pool"][1] = chance.choice([[], list(tree["pool"][0]), [len(names)] * len(tree["pool"][0])])


def change_policy(tree: Tree, chance: random.Random) -> None:
    """What only a run with a policy has."""
    names = [*(stream[0] for stream in tree["streams"]), "none"]
    shares = {chance.choice(names): chance.choice([0, 1, 2**31, 2**32, -1, 2**62]) for _ in range(chance.randrange(4))}
    step = chance.choice([0, tree["step"], tree["step"] + 1, 2**62])
    tree.update(
        chance.choice(
            [
                {"shares": shares},
                {"log_branch": chance.choice(["", "0" * 16, "x" * 200])},
                {"log_digest": chance.randbytes(8), "log_length": step},
                {"log_length": step},
            ]
        )
    )


def change_place(tree: Tree, chance: random.Random) -> None:
    """A place that may exist, far from where the stream stands."""
    stream = chance.choice(tree["streams"])
    stream[1] = chance.choice([0, stream[1] + 1, chance.randrange(1000)])
    stream[2] = chance.choice([0, stream[2], chance.randrange(4)])
    stream[3] = chance.choice([0, chance.randrange(200)])
    stream[4] = chance.choice([stream[4], chance.randrange(-40, 40)])
    stream[5] = chance.getrandbits(32)


def change_step_alone(tree: Tree, chance: random.Random) -> None:
    step = chance.choice([0, 1, 5, 10**4, 2**24, 2**24 + 1, 2**31, 2**62])
    nothing: Tree = {"catalog": "", "order_digest": b"", "plan_digest": b"", "streams": [], "decisions": []}
    tree.update(nothing, pool=[[] for _ in range(7)], step=step, microbatch=0)


CHANGES: list[Callable[[Tree, random.Random], None]] = [
    change_number,
    change_number,
    change_number,
    change_type,
    change_list,
    change_key,
    change_pool,
    change_decisions,
    change_place,
    change_rows,
    change_policy,
    change_step_alone,
]


def value_at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def set_at(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    value_at(tree, path[:-1])[path[-1]] = value


def forge(state: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A state with some changes and a digest that fits; and what was done."""
    body = state[HEAD_BYTES + 8 :]
    done = []
    if chance.random() < 0.2:
        done.append("bytes")
        changed = bytearray(body)
        for _ in range(chance.choice([1, 1, 2, 8])):
            at = chance.randrange(len(changed))
            changed[at : at + chance.randrange(2)] = chance.randbytes(chance.randrange(2))
        body = bytes(changed[: chance.choice([len(changed), len(changed), chance.randrange(len(changed))])])
    else:
        tree = msgspec.msgpack.decode(body)
        for _ in range(chance.choice([1, 1, 2, 3])):
            change = chance.choice(CHANGES)
            done.append(change.__name__)
            try:
                change(tree, chance)
                body = msgspec.msgpack.encode(tree)
            except (LookupError, TypeError, AttributeError, OverflowError, ValueError):
                break  # an earlier change has left nothing of this kind
    return state[:HEAD_BYTES] + hashlib.sha256(body).digest()[:8] + body, ", ".join(done)


def forged_state(states: list[tuple[str, bytes]], *, seed: int, number: int) -> tuple[str, bytes, str]:
    """Number `number` of a trial: the job that it is given to, its bytes, and what was done to which state."""
    chance = random.Random(f"{seed}/{number}")
    job, state = chance.choice(states)
    data, done = forge(state, chance)
    return job, data, done


def judge(loader: Any, data: bytes) -> str:
    """What the loader makes of a state."""
    try:
        loader.load_state_dict({"torchmix_state": data})
        state = decode_state(data, recipe=loader._part)
        microbatches = iter(loader)
        if not state.streams and state.step > FAR_STEP:
            return "plans the steps before"
        for _ in range(loader.num_microbatches + 1):
            next(microbatches)
    except TorchmixError as error:
        return f"refused: {type(error).__name__}"
    except StopIteration:
        return "goes on to the end"
    except Exception as error:
        return f"WRONG {type(error).__name__}: {error}\n{traceback.format_exc()}"
    return "goes on"


def make_states(folder: Path) -> tuple[dict[str, Path], list[tuple[str, bytes]]]:
    """The recipe of each job, and states of it: at boundaries, inside steps, at the start."""
    recipes, states = {}, []
    for name, options in JOBS.items():
        recipes[name] = write_job(folder / name.replace(" ", "-"), **options)
        [loader] = open_job(recipes[name], Topology())
        with loader:
            states.append((name, loader.state_dict()["torchmix_state"]))
            microbatches = iter(loader)
            for count in (3, 9, 40):
                for _ in range(count):
                    next(microbatches)
                states.append((name, loader.state_dict()["torchmix_state"]))
    return recipes, states


def judge_numbers(seed: int) -> None:
    """Judge the numbers that come on stdin, one a line; a line of JSON for each goes to stdout."""
    with tempfile.TemporaryDirectory() as folder:
        recipes, states = make_states(Path(folder))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        print(json.dumps({"ready": len(states)}), flush=True)
        for line in sys.stdin:
            job, data, done = forged_state(states, seed=seed, number=int(line))
            began = time.monotonic()
            [loader] = open_job(recipes[job], Topology())
            with loader:
                verdict = judge(loader, data)
            report = {"job": job, "done": done, "verdict": verdict, "seconds": round(time.monotonic() - began, 3)}
            print(json.dumps(report), flush=True)


def run_trial(judge: JudgeProcess, *, seed: int, count: int, out: Path) -> dict[str, Any]:
    """Judge forged states 0 to `count`, by a judge of a seed; what is in `out` already is not judged again."""
    result: dict[str, Any] = {"seed": seed, "done": 0, "verdicts": {}, "wrong": [], "slowest_s": 0.0}
    if out.exists():
        result = json.loads(out.read_text())
        assert result["seed"] == seed, f"{out} is of seed {result['seed']}"
    verdicts = Counter(result["verdicts"])
    for number in range(result["done"], count):
        report = judge.ask(number)
        is_wrong = report["verdict"].startswith("WRONG")
        verdicts["wrong" if is_wrong else report["verdict"]] += 1
        if is_wrong:
            result["wrong"].append({"number": number, **report})
        slowest = max(result["slowest_s"], report.get("seconds", TIME_S))
        result |= {"done": number + 1, "verdicts": dict(sorted(verdicts.items())), "slowest_s": slowest}
        if number % 50 == 49 or number == count - 1 or is_wrong:
            out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="one JSON; forged_states-SEED.json in this folder by default")
    parser.add_argument("--only", type=int, help="judge this one alone")
    parser.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.judge:
        judge_numbers(arguments.seed)
    elif arguments.only is not None:
        with JudgeProcess(MODULE, arguments.seed, limit_s=TIME_S) as judge:
            print(json.dumps(judge.ask(arguments.only), indent=1))
    else:
        out = arguments.out or Path(f"forged_states-{arguments.seed}.json")
        with JudgeProcess(MODULE, arguments.seed, limit_s=TIME_S) as judge:
            result = run_trial(judge, seed=arguments.seed, count=arguments.count, out=out)
        print(json.dumps(result, indent=1))
        sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
