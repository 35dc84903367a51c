"""Random histories of edits, against a ledger of every token that was delivered, as JSON.

    python -m tests.trials.edit_ledger --seed 1 --count 100 --out edits.json

In: a seed and a number of histories. Out: for each history its edits, and what was compared. Must hold, for each stream
and epoch: no token lost, none repeated, none of a denied or removed document; a stream that no edit touches gives its
documents in the order of the run without edits. Every token of the files has a number of its own, so the delivered
tensors say what was given; which rows a stream has is worked out here from the values of the files. Of torchmix's state
only places and the pool are read. A run goes on where it stopped. Cost: some seconds a history.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.support.loaders import run_job
from torchmix.errors import StateMismatch
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.steps.state import LoaderState, read_state

LENGTH, SAMPLES = 64, 8
UNTOUCHED = "z"
"""A source that no edit touches."""
KINDS = (
    "shares",
    "add_source",
    "remove_source",
    "add_file",
    "where",
    "add_selection",
    "remove_selection",
    "flat_add",
    "deny",
    "caps",
)


@dataclass
class Document:
    """A row of a source."""

    source: str
    row: int
    first: int
    """Number of its first token, among those of all documents."""
    tokens: int
    score: int


@dataclass
class World:
    """Files, and a recipe over them."""

    folder: Path
    draw: random.Random
    documents: list[Document] = field(default_factory=list)
    rows: dict[str, list[int]] = field(default_factory=dict)
    """Source -> its documents by row."""
    num_files: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    """Stream -> weight."""
    selections: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Selection -> source, and the least score."""
    flats: dict[str, list[str]] = field(default_factory=dict)
    denied: set[int] = field(default_factory=set)
    caps: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        last = self.documents[-1]
        return last.first + last.tokens

    def add_file(self, source: str) -> None:
        """One more file of a source."""
        count, columns = self.draw.randint(20, 140), {"ids": [], "score": []}
        for _ in range(count):
            first = self.num_tokens if self.documents else 0
            tokens = self.draw.randint(150, 400) if self.draw.random() < 0.06 else self.draw.randint(1, 40)
            rows = self.rows.setdefault(source, [])
            one = Document(source, len(rows), first, tokens, self.draw.randrange(10))
            rows.append(len(self.documents))
            self.documents.append(one)
            columns["ids"].append(list(range(first, first + tokens)))
            columns["score"].append(one.score)
        number = self.num_files.get(source, 0)
        self.num_files[source] = number + 1
        path = self.folder / source / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        schema = pa.schema([("ids", pa.list_(pa.int32())), ("score", pa.int32())])
        pq.write_table(pa.table(columns, schema=schema), path, data_page_size=self.draw.choice([512, 2048]))

    def sources(self) -> set[str]:
        """Sources that the recipe has."""
        plain = {name for name in self.weights if name in self.rows}
        members = {member for flat in self.flats.values() for member in flat}
        return plain | members | {source for source, _ in self.selections.values()}

    def write(self) -> Path:
        """The recipe with its catalog."""
        sources: dict[str, Any] = {}
        for name in sorted(self.sources()):
            sources[name] = {"path": f"{name}/*.parquet", "tokens": "ids", "properties": ["score"]}
            sources[name] |= {"max_epochs": self.caps[name]} if name in self.caps else {}
        for name, (source, least) in self.selections.items():
            sources[name] = {"from": source, "where": f"score >= {least}"}
        mixture = {
            name: {"share": weight, "flat": self.flats[name]} if name in self.flats else weight
            for name, weight in self.weights.items()
        }
        recipe = {
            "version": 1,
            "seed": 7,
            "batch": {"samples": SAMPLES, "length": LENGTH},
            "sources": sources,
            "mixture": mixture,
            **self.extra,
        }
        if self.denied:
            named = sorted(number for number in self.denied if self.documents[number].source in self.sources())
            pq.write_table(
                pa.table(
                    {
                        "source": pa.array([self.documents[number].source for number in named], pa.string()),
                        "row": pa.array([self.documents[number].row for number in named], pa.int64()),
                    }
                ),
                self.folder / "deny.parquet",
            )
            recipe["deny"] = ["deny.parquet"]
        path = self.folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        index_recipe(load_recipe(path), self.folder)
        return path

    def homes(self) -> dict[int, str]:
        """Document -> the stream that has it."""
        homes: dict[int, str] = {}
        for source in self.sources():
            sets = {name: least for name, (of, least) in self.selections.items() if of == source}
            stream = next((name for name, flat in self.flats.items() if source in flat), source)
            rows = self.rows[source]
            has = {name: {n for n in rows if self.documents[n].score >= least} for name, least in sets.items()}
            if stream in self.weights:
                has[source] = set(rows)
            # Of two that have a row, the one with fewer rows keeps it.
            taken: set[int] = set()
            for name in sorted(has, key=lambda name: (len(has[name]), name == source, name)):
                for number in has[name] - taken:
                    homes[number] = stream if name == source else name
                taken |= has[name]
        return homes

    def edit(self, kind: str, state: LoaderState) -> bool:
        """Change something; whether that was possible."""
        draw = self.draw
        self.caps = {name: most for name, most in self.caps.items() if name in self.weights}
        plain = [name for name in self.weights if name in self.rows and name != UNTOUCHED]
        bases = {source for source, _ in self.selections.values()}
        if kind == "shares":
            self.weights = {name: draw.randint(1, 6) for name in self.weights}
        elif kind == "add_source":
            name = f"n{len(self.rows)}"
            self.add_file(name)
            self.weights[name] = draw.randint(1, 4)
        elif kind == "remove_source":
            free = [name for name in plain if name not in bases]
            if not free:
                return False
            del self.weights[draw.choice(free)]
        elif kind == "add_file":
            grown = sorted(self.sources() - {UNTOUCHED})
            if not grown:
                return False
            self.add_file(draw.choice(grown))
        elif kind == "where":
            if not self.selections:
                return False
            name = draw.choice(sorted(self.selections))
            self.selections[name] = self.selections[name][0], draw.randint(2, 8)
        elif kind == "add_selection":
            free = [name for name in plain if name not in bases]
            if not free or len(self.selections) > 1:
                return False
            name = f"s{draw.randrange(10**6)}"
            self.selections[name] = draw.choice(free), draw.randint(2, 8)
            self.weights[name] = draw.randint(1, 4)
        elif kind == "remove_selection":
            if not self.selections:
                return False
            name = draw.choice(sorted(self.selections))
            del self.weights[name], self.selections[name]
        elif kind == "flat_add":
            if not self.flats:
                return False
            free = [name for name in plain if name not in bases]
            if free and draw.random() < 0.5:
                name = draw.choice(free)
                del self.weights[name]
            else:
                name = f"n{len(self.rows)}"
                self.add_file(name)
            self.caps.pop(name, None)
            flat = draw.choice(sorted(self.flats))
            self.flats[flat] = sorted([*self.flats[flat], name])
        elif kind == "deny":
            names = state.source_names
            waiting = [
                self.rows[names[source]][row]
                for source, row in zip(state.pool.source or state.pool.stream, state.pool.row, strict=True)
                if names[source] != UNTOUCHED
            ]
            others = [n for source in self.sources() - {UNTOUCHED} for n in self.rows[source]]
            self.denied |= set(draw.sample(others, min(len(others), draw.randint(1, 8)))) | set(waiting[:3])
        elif kind == "caps":
            self.caps[draw.choice(plain or [UNTOUCHED])] = 1000 + draw.randrange(9)
        else:
            raise AssertionError(kind)
        homes = self.homes()
        given = {stream for number, stream in homes.items() if number not in self.denied}
        return given == set(self.weights) and len(given) > 1


def make_world(draw: random.Random, folder: Path) -> World:
    """Files, and a recipe of one of three shapes."""
    world = World(folder, draw)
    for name in (UNTOUCHED, "a", "b"):
        world.add_file(name)
        world.weights[name] = draw.randint(1, 5)
    if draw.random() < 0.5:
        world.add_file("a")
    if draw.random() < 0.6:
        world.selections["s0"] = "a", draw.randint(2, 8)
        world.weights["s0"] = draw.randint(1, 4)
        if draw.random() < 0.3:
            del world.weights["a"]
    if draw.random() < 0.5:
        for name in ("c", "d"):
            world.add_file(name)
        world.flats["f"] = ["c", "d"]
        world.weights["f"] = draw.randint(1, 5)
    world.extra = {
        "shuffle": {"method": draw.choice(["page", "page", "row", "none"]), "window_pages": draw.randint(1, 4)},
        "packing": {"method": draw.choice(["best_fit", "concat"])},
    }
    if draw.random() < 0.3:  # a ramp, in whose middle edits fall
        world.extra["schedule"] = [{"from": "0 steps", "to": "60 steps", "set": {UNTOUCHED: "30%"}}]
        total = sum(world.weights.values())
        assert total
    return world


@dataclass
class Tenure:
    """A document in a stream."""

    stream: str
    epoch: int
    """The epoch that the stream was in when the document came."""
    is_late: bool
    """Whether it comes only from the next epoch on, since it was given in this one."""
    before: np.ndarray[Any, np.dtype[np.int64]]
    """How often each of its tokens was drawn before."""


class Ledger:
    """Every token that was delivered, and what must hold of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.delivered = np.zeros(world.num_tokens, np.int64)
        self.tenures: dict[int, Tenure] = {}
        self.gone: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        """Documents that are not given any more -> how often each token was delivered."""
        self.given_in: dict[tuple[int, str], int] = {}
        """Document and stream that it has left -> the epoch in which that one gave it."""
        self.compared = 0
        self.loose: set[int] = set()
        """Documents that are not followed any more."""
        for number, stream in world.homes().items():
            self.tenures[number] = Tenure(stream, 0, False, self._of(number, self.delivered).copy())

    def _of(self, number: int, counts: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        one = self.world.documents[number]
        return counts[one.first : one.first + one.tokens]

    def pool(self, state: LoaderState) -> np.ndarray[Any, np.dtype[np.int64]]:
        """How often each token waits."""
        counts = np.zeros(self.world.num_tokens, np.int64)
        pool, names = state.pool, state.source_names
        for source, row, start, tokens in zip(
            pool.source or pool.stream, pool.row, pool.start, pool.tokens, strict=True
        ):
            first = self.world.documents[self.world.rows[names[source]][row]].first + start
            counts[first : first + tokens] += 1
        return counts

    def _bounds(self, tenure: Tenure, epochs: dict[str, int]) -> tuple[int, int]:
        passed = epochs.get(tenure.stream, 0) - tenure.epoch - tenure.is_late
        return max(0, passed), max(0, passed + 1)

    def check(self, state: LoaderState, what: str) -> None:
        """All that must hold where a run stands."""
        drawn = self.delivered + self.pool(state)
        epochs = {stream.name: stream.epoch for stream in state.streams}
        for number, tenure in self.tenures.items():
            lowest, highest = self._bounds(tenure, epochs)
            found = self._of(number, drawn) - tenure.before
            one = self.world.documents[number]
            where = f"{what}: {one.source} row {one.row} in {tenure.stream}, epoch {epochs[tenure.stream]}, {tenure}"
            assert found.min() >= lowest, f"lost: {where}: {found}"
            assert found.max() <= highest, f"repeated: {where}: {found}"
            self.compared += 1
        for number, counts in self.gone.items():
            one = self.world.documents[number]
            assert (self._of(number, self.delivered) == counts).all(), f"{what}: {one.source} row {one.row} came again"

    def edit(self, state: LoaderState) -> None:
        """The recipe has changed at a state."""
        grown = self.world.num_tokens - len(self.delivered)
        self.delivered = np.append(self.delivered, np.zeros(grown, np.int64))
        drawn = self.delivered + self.pool(state)
        epochs = {stream.name: stream.epoch for stream in state.streams}
        homes = {n: stream for n, stream in self.world.homes().items() if n not in self.world.denied}
        stale = self._waiting_of_earlier_epochs(state)
        for number in sorted({*self.tenures, *homes}):
            old, new = self.tenures.get(number), homes.get(number)
            if (old is not None and old.stream == new) or number in self.loose:
                continue
            late = False
            if old is not None:
                del self.tenures[number]
                found = self._of(number, drawn) - old.before
                late = bool(found.max() > self._bounds(old, epochs)[0])
                late = late or self.given_in.get((number, old.stream), -1) == epochs.get(old.stream, 0)
                if late:
                    self.given_in[number, old.stream] = epochs.get(old.stream, 0)
            self.gone.pop(number, None)
            if new is None:
                self.gone[number] = self._of(number, self.delivered).copy()
            elif number in stale:  # what waits of an epoch that is over does not go with the document
                self.loose.add(number)
            else:
                late = late or self.given_in.get((number, new), -1) == epochs.get(new, 0)
                before = self._of(number, drawn).copy()
                self.tenures[number] = Tenure(new, epochs.get(new, 0), late, before)

    def _waiting_of_earlier_epochs(self, state: LoaderState) -> set[int]:
        pool, names = state.pool, state.source_names
        columns = zip(pool.stream, pool.source or pool.stream, pool.row, pool.epoch, strict=True)
        return {
            self.world.rows[names[source]][row]
            for stream, source, row, epoch in columns
            if epoch != state.streams[stream].epoch
        }


def go_on(
    path: Path, steps: int, topology: Topology, state: dict[str, Any] | None, num_tokens: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[tuple[np.ndarray[Any, np.dtype[np.int64]], LoaderState]], Any]:
    """Deliver some steps: how often each token came; the same and the state after each step; the last state."""

    def program(loader: Any, rank: Any) -> None:
        if state is not None:
            try:
                loader.load_state_dict(state)
            except StateMismatch as error:
                found = re.search(r"accept_edit='([0-9a-f]{16})'", str(error))
                if found is None:
                    raise
                loader.load_state_dict(state, accept_edit=found[1])
        counts, rank.result = np.zeros(num_tokens, np.int64), []
        iterator = iter(loader)
        while len(rank.result) < steps:
            microbatch = next(iterator)
            given = microbatch.tokens[microbatch.source_index >= 0].numpy()
            counts = counts + np.bincount(given, minlength=num_tokens)
            if microbatch.is_last_of_step:
                rank.result.append((counts, loader.state_dict()["torchmix_state"]))

    ranks = run_job(path, topology, program=program)
    by_step = []
    for step in range(steps):
        of_step = [rank.result[step] for rank in ranks]
        assert len({data for _, data in of_step}) == 1, "ranks have other states"
        by_step.append((sum(counts for counts, _ in of_step), read_state(of_step[0][1])))
    counts = by_step[-1][0] if by_step else np.zeros(num_tokens, np.int64)
    return counts, by_step, ranks[0].state


def check_prefixes(
    one: list[np.ndarray[Any, np.dtype[np.int64]]], other: list[np.ndarray[Any, np.dtype[np.int64]]]
) -> int:
    """All that was drawn at moments of two runs must be prefixes of one order: of any two, one holds the other."""
    for first in one:
        for second in other:
            assert (first <= second).all() or (second <= first).all(), "an untouched source came in another order"
    return len(one) * len(other)


def try_history(seed: int, number: int) -> dict[str, Any]:
    """One history; an AssertionError says what did not hold."""
    draw = random.Random(f"{seed}/{number}")
    with tempfile.TemporaryDirectory() as name:
        world = make_world(draw, Path(name))
        while set(world.homes().values()) != set(world.weights):
            world.selections = {key: (source, draw.randint(1, 8)) for key, (source, _) in world.selections.items()}
        path = world.write()
        ledger = Ledger(world)
        mine = slice(world.documents[world.rows[UNTOUCHED][0]].first, None)
        last = world.documents[world.rows[UNTOUCHED][-1]]
        mine = slice(mine.start, last.first + last.tokens)
        _, unedited, _ = go_on(path, 24, Topology(), None, world.num_tokens)
        plain = [(counts + ledger.pool(state))[mine] for counts, state in unedited]
        drawn, history, state, is_planned = [], [], None, True
        for edit in range(draw.randint(1, 6) + 1):
            steps = draw.choice([0, 1, 2, 5, 9, 14]) if edit else draw.randint(1, 12)
            topology = Topology(dp=draw.choice([1, 1, 2, 4]))
            counts, by_step, state = go_on(path, steps, topology, state, world.num_tokens)
            before = ledger.delivered
            drawn += [(before + of_step + ledger.pool(at))[mine] for of_step, at in by_step]
            ledger.delivered = before + counts
            at = read_state(state["torchmix_state"])
            if by_step:
                is_planned = True
                ledger.check(at, f"{seed}/{number} after {history}")
            kind = draw.choice(KINDS)
            kept = dict(vars(world))
            copies = {key: _copy(value) for key, value in kept.items() if key not in ("folder", "draw", "documents")}
            num_documents = len(world.documents)
            if not world.edit(kind, at):
                del world.documents[num_documents:]
                vars(world).update(copies)
                continue
            history.append(f"{kind} at step {at.step}")
            path = world.write()
            if is_planned:
                saved = dict(ledger.tenures), dict(ledger.gone), dict(ledger.given_in), set(ledger.loose)
            else:  # nothing was planned since the edit before: both are one
                ledger.tenures, ledger.gone, ledger.given_in, ledger.loose = map(_copy, saved)
            ledger.edit(at)
            is_planned = False
        counts, by_step, state = go_on(path, 16, Topology(), state, world.num_tokens)
        drawn += [(ledger.delivered + of_step + ledger.pool(at))[mine] for of_step, at in by_step]
        ledger.delivered = ledger.delivered + counts
        ledger.check(read_state(state["torchmix_state"]), f"{seed}/{number} after {history}")
        pairs = check_prefixes(plain[::3], drawn[::3])
        return {"edits": history, "documents": ledger.compared, "prefixes": pairs, "loose": len(ledger.loose)}


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return value.copy() if isinstance(value, list | set) else value


def main() -> int:
    """Try the histories that are not in the file yet; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for number in range(arguments.count):
        key = f"{arguments.seed}/{number}"
        if key not in done:
            try:
                done[key] = try_history(arguments.seed, number)
            except Exception as error:  # a trial goes on, and names what failed
                done[key] = {"failed": f"{type(error).__name__}: {error}"}
            arguments.out.write_text(json.dumps(done, indent=1))
    failed = [key for key, one in done.items() if "failed" in one]
    edits = sum(len(one.get("edits", ())) for one in done.values())
    print(f"{len(done)} histories, {edits} edits, {len(failed)} failed: {failed[:9]}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
