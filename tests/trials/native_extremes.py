"""The native fold under sanitizers: extremes of what recipes and catalogs can say, and forged calls, as one JSON.

    python -m tests.trials.native_extremes --seed 1 --count 3000 --out extremes.json [--steps 1000000]

In: a seed, a number of forged calls, a number of steps. Out: what the calls ended with, and the memory of a process
over the steps. The library is built with the sanitizers of addresses and of undefined behaviour, which end the child
process at the first fault. Must hold:

- Extremes. Documents of 2^31 - 1 tokens, rows from 2^40 on, debts at their bounds, streams with one row that is not
  empty, one piece, samples of two tokens, 1 and 5,000 streams: each step is that of the reference. Sums that exceed 64
  bits are faults here, though the library itself lets them wrap around.
- Forged calls. A call that was right, with some values, lengths or numbers of its struct altered: it is refused or
  ends, and reads and writes nothing outside of its arrays.
- No growth. So many steps take no memory that is not given back.

Cost: some ten milliseconds a forged call, a tenth of one a step; some seconds to build.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from tests.support.mixtures import SIZES, make_planner
from tests.support.native import native_or_not
from tests.support.recipes import make_recipe
from tests.support.trial import trial_parser, whole
from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.windows import Window
from torchmix.native import build, calls, load
from torchmix.planner import folding
from torchmix.planner.planner import Planner
from torchmix.recipe.structs import Balance, Batch

SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
MOST_TOKENS = 2**31 - 1
FIRST_ROW = 2**40
DEADLINE_S = 3600
METHODS = ("best_fit", "concat", "pad", "cut")
"""`cut`: best fit, and sources whose documents fill what it leaves."""
MEASURED = 20
"""Memory is looked at so often over the steps."""


def sizes_of(tokens: list[int], pages: int = 1) -> SourceSizes:
    """One source of these documents."""
    edges = np.linspace(0, len(tokens), pages + 1).astype(np.int64)
    return SourceSizes(first_row_of_page=edges, tokens=np.array(tokens, np.int32), window_pages=2)


def extreme_planner(draw: random.Random, kind: str, method: str) -> Planner:
    """A planner over sizes that few catalogs have."""
    length, samples = draw.choice([2, 64, 8192]), draw.choice([1, 7, 100])
    tokens: dict[str, list[int]] = {}
    if kind == "huge":
        tokens = {"a": [MOST_TOKENS] * 9, "b": [5, 0, MOST_TOKENS, 1]}
        length, samples = draw.choice([8192, 2**20, 2**30]), 1
    elif kind == "empty":
        tokens = {name: [0] * 50 + [draw.randint(1, 90)] + [0] * 50 for name in "abcd"}
    elif kind == "one piece":
        tokens = {"a": [length]}
    elif kind == "one stream":
        tokens = {"a": [draw.randint(0, 3 * length) for _ in range(200)] + [1]}
    else:
        tokens = {f"s{number:04d}": [draw.randint(1, 300) for _ in range(3)] for number in range(5000)}
    parts = len(tokens)
    shares = dict.fromkeys(tokens, f"{100 / parts:.6f}%") if parts < 100 else dict.fromkeys(tokens, "0.02%")
    if parts < 100:
        first = next(iter(shares))
        shares[first] = f"{100 - sum(float(s[:-1]) for n, s in shares.items() if n != first):.6f}%"
    align = draw.choice([1, length]) if method in ("best_fit", "cut") else 1
    cut = {name: {"packing": {"method": "concat"}} for name in list(tokens)[::2]} if method == "cut" else {}
    packing = {"method": "best_fit" if cut else method, "align_tokens": 1}
    recipe = make_recipe(shares, samples=samples, length=min(length, 8192), packing=packing, sources=cut)
    recipe = replace(
        recipe,
        batch=Batch(samples=samples, length=length),
        packing=replace(recipe.packing, align_tokens=align),
        balance=Balance(method=draw.choice(["none", "rows"])),  # without a model: its costs would exceed 64 bits
    )
    return make_planner(recipe, {name: sizes_of(each, min(4, len(each))) for name, each in tokens.items()})


def far_rows(plain: Callable[[StreamOrder, int, int], Window]) -> Callable[[StreamOrder, int, int], Window]:
    """Windows whose rows begin at FIRST_ROW."""

    def made(self: StreamOrder, epoch: int, window: int) -> Window:
        found = plain(self, epoch, window)
        return replace(found, rows=found.rows + FIRST_ROW)

    return made


def with_debts(planner: Planner, draw: random.Random) -> Any:
    """The start, with debts that runs come to at most, and an epoch that few runs come to."""
    cursor = planner.start()
    most = planner.part.batch.length // 2
    position = cursor.position
    debts = np.array([draw.choice([-most, most, 0]) for _ in planner.streams], np.int64)
    residues = np.full(len(debts), 2**32 - 1, np.int64)
    epochs = np.full(len(debts), draw.choice([0, 2**31, 2**40]), np.int64)
    return replace(cursor, position=replace(position, debt=debts, residue=residues, epoch=epochs))


def try_extremes(seed: int) -> dict[str, int]:
    """Native steps against those of the reference; how many of each kind were compared."""
    compared: Counter[str] = Counter()
    plain = StreamOrder._of_rows
    StreamOrder._of_rows = far_rows(plain)  # type: ignore[method-assign]
    try:
        for kind in ("huge", "empty", "one piece", "one stream", "many streams"):
            for method in METHODS:
                if (kind, method) == ("huge", "pad") or (kind == "many streams" and method != "best_fit"):
                    continue  # the first is as best fit, as each document fills the batch; the other takes long
                draw = random.Random(f"extremes {seed} {kind} {method}")
                planner = extreme_planner(draw, kind, method)
                cursor = with_debts(planner, draw)
                cursors = [cursor, cursor]
                for _ in range(2 if kind == "many streams" else 8):
                    with native_or_not(False):
                        expected, cursors[1] = planner.step(cursors[1])
                    found, cursors[0] = planner.step(cursors[0])
                    assert found.plan_digest == expected.plan_digest, (kind, method)
                    for name in ("debt", "residue", "offset", "window", "epoch"):
                        one, other = (getattr(each.position, name).tolist() for each in cursors)
                        assert one == other, (kind, method, name)
                    compared[kind] += 1
    finally:
        StreamOrder._of_rows = plain  # type: ignore[method-assign]
    return dict(compared)


def some_calls(seed: int) -> list[tuple[calls.Fold, dict[str, Any]]]:
    """Calls that were right, each with copies of its arrays, and with what the addresses in them belong to."""
    found: list[tuple[calls.Fold, dict[str, Any]]] = []
    plain = folding.Folding._call

    def noted(self: folding.Folding, *words: Any) -> calls.Fold:
        call = plain(self, *words)
        room = words[-1]
        arrays: dict[str, Any] = {name: array.copy() for name, array in room.kept.items()}
        found.append((call, {**arrays, "held": [*self._windows._arrays.items()]}))
        return call

    folding.Folding._call = noted  # type: ignore[method-assign]
    try:
        for method in METHODS:
            cut = {name: {"packing": {"method": "concat"}} for name in ("books", "one")} if method == "cut" else {}
            packing = {"method": "best_fit" if cut else method, "align_tokens": 1 if method == "concat" else 8}
            shares = {"books": "20%", "code": "30%", "gaps": "5%", "one": "1%", "tiny": "1%", "web": "43%"}
            recipe = make_recipe(shares, samples=100, length=256, packing=packing, seed=seed, sources=cut)
            planner = make_planner(recipe, SIZES)
            cursor = planner.start()
            for _ in range(8):
                cursor = planner.skip(cursor)
    finally:
        folding.Folding._call = plain  # type: ignore[method-assign]
    return [one for one in found if one[0].num_done]  # of the others a window was lacking


def odd(draw: random.Random, value: int) -> int:
    """A number in the place of another."""
    near = [value - 1, value + 1, 0, -1, 1, -2, value * 2, 2**31, 2**32, 2**40, 2**62, -(2**62), 2**63 - 1, -(2**63)]
    return max(-(2**63), min(2**63 - 1, draw.choice([*near, draw.randint(-(2**63), 2**63 - 1)])))


def forged_call(draw: random.Random, right: list[tuple[calls.Fold, dict[str, Any]]]) -> str:
    """What a call ends with of which some values were altered."""
    call, arrays = draw.choice(right)
    mine = {name: array.copy() for name, array in arrays.items() if name != "held"}
    forged = calls.Fold()
    for name, kind in calls.Fold._fields_:
        if kind is load.Array:
            setattr(forged, name, load.array_of(mine[name], np.int64))
        else:
            setattr(forged, name, getattr(call, name))
    forged.windows.n = len(mine["windows"])
    numbers = [name for name, kind in calls.Fold._fields_ if kind is not load.Array]
    for _ in range(draw.randint(1, 4)):
        what = draw.random()
        if what < 0.3:
            name = draw.choice(numbers)
            setattr(forged, name, odd(draw, getattr(forged, name)))
        elif what < 0.45:  # fewer entries than there are
            array = getattr(forged, draw.choice([*mine]))
            array.n = draw.choice([0, -1, max(0, array.n - 1), draw.randint(0, max(0, array.n))])
        elif what < 0.7:
            row = mine["windows"][draw.randrange(len(mine["windows"]))]
            place = draw.choice([1, 3, 5, 7, 9, 11, *range(12, 19)])
            row[place] = draw.choice([0, -1, max(0, row[place] - 1)]) if place < 12 else odd(draw, int(row[place]))
        else:
            flat = mine[draw.choice([name for name in mine if name not in ("windows", "work", "digested")])].reshape(-1)
            if len(flat):
                place = draw.randrange(min(len(flat), 4000))
                flat[place] = odd(draw, int(flat[place]))
    try:
        ended = load.run(forged)
    except load.NativeError as error:
        return str(error).split(";")[0].split(": ", 1)[-1]
    return f"ends with {ended}"


def steps_without_growth(steps: int) -> list[int]:
    """Bytes of this process after each part of so many steps."""
    planner = make_planner(make_recipe({"code": "60%", "web": "40%"}, samples=8, length=256), SIZES)
    cursor, found = planner.start(), []
    for part in range(MEASURED):
        for _ in range(steps // MEASURED):
            _, cursor = planner.step(cursor)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found.append(pages * resource.getpagesize())
        if part == MEASURED // 4:
            settled = found[-1]
    assert found[-1] - settled < 32 << 20, f"memory grows: {found}"
    return found


def child(asked: argparse.Namespace) -> int:
    """What runs under the sanitizers."""
    library = load.load(asked.library)
    assert library.library is not None, library.why_not
    load._found = library
    if asked.what == "extremes":
        print(json.dumps(try_extremes(asked.seed)))
        return 0
    ended: Counter[str] = Counter()
    right = some_calls(asked.seed)
    for number in range(asked.count):
        print(f"forged call {number}", file=sys.stderr)  # the last one before a fault
        ended[forged_call(random.Random(f"forged {asked.seed} {number}"), right)] += 1
    print(json.dumps(ended))
    return 0


def sanitized(folder: Path, what: str, seed: int, count: int) -> dict[str, int]:
    """Build the library with sanitizers, and run a child over it.

    Raises:
        AssertionError: A sanitizer, or a comparison, has found a fault; its words are in the message.
    """
    library = folder / f"{what}.so"
    before = os.environ.get("CFLAGS")
    flags = f"{SANITIZERS} {'-fno-wrapv' if what == 'extremes' else ''} {before or ''}"
    os.environ["CFLAGS"] = flags
    try:
        build.build(library)
    finally:
        del os.environ["CFLAGS"]
        if before is not None:
            os.environ["CFLAGS"] = before
    command = [*build.compiler(), "-print-file-name=libasan.so"], [*build.compiler(), "-print-file-name=libubsan.so"]
    runtimes = [subprocess.run(words, capture_output=True, text=True, check=True).stdout for words in command]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(str.strip, runtimes)),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "PYTHONMALLOC": "malloc",
    }
    words = ["--library", str(library), "--what", what, "--seed", str(seed), "--count", str(count), "--out", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "tests.trials.native_extremes", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{what} after {len(done.stderr.splitlines())} lines:\n{done.stderr[-6000:]}"
    found: dict[str, int] = json.loads(done.stdout)
    return found


def try_all(seed: int, count: int, steps: int) -> dict[str, Any]:
    """Extremes, forged calls, steps."""
    with tempfile.TemporaryDirectory() as folder:
        extremes = sanitized(Path(folder), "extremes", seed, count)
        forged = sanitized(Path(folder), "forged", seed, count)
    with native_or_not(True):
        grown = steps_without_growth(steps)
    return {"extremes": extremes, "forged": dict(sorted(forged.items())), "steps": steps, "bytes": grown}


def main() -> int:
    """The trial, or its child."""
    parser = trial_parser(__doc__, count=3000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--what", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.library is not None:
        return child(asked)
    whole(asked, lambda seed, count: try_all(seed, count, asked.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
