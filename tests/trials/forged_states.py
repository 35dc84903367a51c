"""Forged states: each is refused by an error of torchmix, or is valid, and the loader goes on.

    python -m tests.trials.forged_states --seed 1 --count 2000 [--out forged_states-1.json]

Each state is one of a real run, with some of its values, its shape or its bytes changed and a digest that fits. A
process of its own loads it and takes a step and a microbatch more; it has a limit of memory, and one of time for each
state. Forged state i follows from the seed and i alone, so a trial that was stopped goes on where it was, and any one
can be looked at again:

    python -m tests.trials.forged_states --seed 1 --only 17
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import sys
import tempfile
import traceback
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.support.judge_process import judged_trial
from tests.support.loaders import open_job, write_job
from torchmix.errors import TorchmixError
from torchmix.mixture.draw import Position
from torchmix.parallel.topology import Topology
from torchmix.planner.entering import POOL_COLUMNS
from torchmix.steps.state import decode_state

Tree = dict[str, Any]
MODULE = "tests.trials.forged_states"
TIME_S = 120.0
"""For one state. What is meant to be bounded takes a tenth of a second, also where two cores are shared by fifty."""
MEMORY_BYTES = 1 << 30
"""For all states of a process, beyond what it has when it has loaded the first one."""
HEAD_BYTES = 15
"""Before the digest: a magic word and the version."""
FAR_STEP = 300
"""Beyond it a step that is named alone is planned for long, as it says, and is not waited for."""

PLACE_COLUMNS = Position.__struct_fields__
JOBS: dict[str, dict[str, Any]] = {
    "best fit": {},
    "concat": {"method": "concat", "seed": 6, "samples": "[{from_step: 0, samples: 4}, {from_step: 3, samples: 12}]"},
    "one sample": {"samples": 2, "length": 32, "seed": 8},
    "truncate": {"overflow": "truncate", "seed": 7, "extra": "split: [80, 10, 10]"},
}
NUMBERS = [0, 1, -1, 7, 255, 10**9, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
VALUES: list[Any] = [None, True, "", "0", "\0", "web", b"", b"12345678", 0.5, float("nan"), float("inf"), [], {}, [0]]


def opened(tree: Tree) -> Tree:
    """A state whose columns are lists of numbers."""
    for columns in (tree["at"]["position"], tree["at"]["pool"]):
        columns.update({name: list(memoryview(column).cast("q")) for name, column in columns.items()})
    return tree


def closed(tree: Tree) -> Tree:
    """The state with its columns as bytes, where they are numbers of 64 bits; what is not stays as it is."""
    at = tree.get("at")
    columns = {name: at.get(name) for name in ("position", "pool")} if isinstance(at, dict) else {}
    for part, found in columns.items():
        if isinstance(found, dict):
            columns[part] = {name: column_of(values) for name, values in found.items()}
    return {**tree, "at": {**at, **columns}} if isinstance(at, dict) else tree


def column_of(values: Any) -> Any:
    try:
        return array("q", values).tobytes() if isinstance(values, list) else values
    except (TypeError, OverflowError):
        return values


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
    paths = [path for path in paths if (path[:2] == ("at", "pool")) == in_pool] or paths
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
    at = tree["at"]
    maps = [one for one in (tree, at, tree.get("rows"), at["position"], at["pool"]) if one]
    part = chance.choice(maps)
    key = chance.choice(sorted(part))
    value = part.pop(key)
    if chance.random() < 0.5:
        part[key.upper()] = value


def change_pool(tree: Tree, chance: random.Random) -> None:
    """A pool whose columns fit each other."""
    pool = tree["at"]["pool"]
    columns = [pool[name] for name in POOL_COLUMNS]
    change, size = chance.randrange(4), len(columns[0])
    if change == 0:
        for column in columns:
            column *= 2
    elif change == 1:
        columns[6][:] = [value + chance.choice([1, 100, 2**31]) for value in columns[6]]
    elif change == 2:
        order = chance.sample(range(size), size)
        for column in columns:
            column[:] = [column[at] for at in order]
    else:
        count = chance.choice([1, 50, 20_000])
        columns[0] += [chance.randrange(3) for _ in range(count)]
        columns[1] += [chance.randrange(3)] * chance.choice([0, count])
        columns[2] += [0] * count
        columns[3] += [chance.randrange(1000) for _ in range(count)]
        columns[4] += [0] * count
        columns[5] += [chance.randrange(1, 64) for _ in range(count)]
        columns[6] += [0] * count


def change_decisions(tree: Tree, chance: random.Random) -> None:
    at = tree["at"]
    steps = [0, at["step"] - 1, at["step"], at["step"] + 1, 2**31, 2**62]
    names = [*tree.get("rows", {}).get("streams", []), "none", "x" * 500]
    kinds, count = ["ran_out", "ran_out", "stage", "x"], chance.choice([1, 2, 5000])
    made = [[chance.choice(steps), chance.choice(kinds), chance.choice(names)] for _ in range(count)]
    at.setdefault("decisions", []).extend(made)


def change_rows(tree: Tree, chance: random.Random) -> None:
    """What is known of the streams' rows: their fingerprints, their eras, the sources that they lie in."""
    rows, at = tree["rows"], tree["at"]
    change, s = chance.randrange(4), chance.randrange(len(rows["streams"]))
    if change == 0:
        rows["fingerprints"][s] = chance.choice(["", "0" * 16, rows["fingerprints"][s][::-1], "x" * 200])
    elif change == 1:
        at["eras"] = {"counts": {chance.choice([*rows["streams"], "none"]): chance.choice([1, -1, 2**62])}}
    elif change == 2:
        members = [[rows["streams"][s], rows["fingerprints"][s]]]
        edit = [rows["streams"][s], *(chance.choice([0, 1, 10**6, 2**62]) for _ in range(3)), members, members]
        at["eras"] = {"edits": [[edit]], "counts": {rows["streams"][s]: 1}}
    else:
        names = rows["streams"]
        rows["sources"] = chance.choice([names, names[::-1], ["none"], [*names, "none"], []])
        pool = at["pool"]
        pool["source"] = chance.choice([[], list(pool["stream"]), [len(names)] * len(pool["stream"])])


def change_policy(tree: Tree, chance: random.Random) -> None:
    """What only a run with a policy has."""
    names, at = [*tree.get("rows", {}).get("streams", []), "none"], tree["at"]
    shares = {chance.choice(names): chance.choice([0, 1, 2**31, 2**32, -1, 2**62]) for _ in range(chance.randrange(4))}
    step = chance.choice([0, at["step"], at["step"] + 1, 2**62])
    digest = chance.choice(["0" * 16, "x" * 16, "", chance.randbytes(8).hex()])
    if chance.random() < 0.25:
        tree["log_branch"] = chance.choice(["", "0" * 16, "x" * 200])
    else:
        parts = {"shares": shares, "length": step, "digest": digest}
        at["decided"] = {name: parts[name] for name in chance.sample(sorted(parts), chance.randrange(4))}


def change_place(tree: Tree, chance: random.Random) -> None:
    """A place that may exist, far from where the stream stands."""
    at = tree["at"]["position"]
    s = chance.randrange(len(at["epoch"]))
    at["epoch"][s] = chance.choice([0, at["epoch"][s] + 1, chance.randrange(1000)])
    at["window"][s] = chance.choice([0, at["window"][s], chance.randrange(4)])
    at["offset"][s] = chance.choice([0, chance.randrange(200)])
    at["debt"][s] = chance.choice([at["debt"][s], chance.randrange(-40, 40)])
    at["residue"][s] = chance.getrandbits(32)


def change_step_alone(tree: Tree, chance: random.Random) -> None:
    step = chance.choice([0, 1, 5, 10**4, 2**24, 2**24 + 1, 2**31, 2**62])
    at: Tree = {"step": step, "order_digest": b"", "drawn": [1, 1], "position": {}, "pool": {}}
    at["position"] = {name: [] for name in PLACE_COLUMNS}
    at["pool"] = {name: [] for name in POOL_COLUMNS}
    tree.update(catalog="", at=at)
    for key in ("rows", "microbatch", "plan_digest"):
        tree.pop(key, None)


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
        tree = opened(msgspec.msgpack.decode(body))
        for _ in range(chance.choice([1, 1, 2, 3])):
            change = chance.choice(CHANGES)
            done.append(change.__name__)
            try:
                change(tree, chance)
                body = msgspec.msgpack.encode(closed(tree))
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
        if not state.is_planned and state.step > FAR_STEP:
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
            [loader] = open_job(recipes[job], Topology())
            with loader:
                verdict = judge(loader, data)
            print(json.dumps({"job": job, "done": done, "verdict": verdict}), flush=True)


if __name__ == "__main__":
    judged_trial(MODULE, __doc__, judge_numbers, count=2000, limit_s=TIME_S)
