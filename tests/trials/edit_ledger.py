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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.edited_worlds import KINDS, UNTOUCHED, World, make_world
from tests.support.loaders import run_job
from torchmix.errors import StateMismatch
from torchmix.parallel.topology import Topology
from torchmix.steps.state import LoaderState, read_state


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
        most = 1 if tenure.stream in self.world.ends else passed + 1
        return max(0, passed), max(0, most)

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
        # A stream that has run out stands at the end of its only epoch.
        epochs = {one.name: 0 if one.name in self.world.ends else one.epoch for one in state.streams}
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
            elif number in stale:  # what waits of an epoch that is over goes with its stream
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
            if epoch != state.streams[stream].epoch and state.streams[stream].name not in self.world.weights
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


def try_history(seed: int, number: int, *, ends: bool = False) -> dict[str, Any]:
    """One history; with `ends` streams run out and samples grow. An AssertionError says what did not hold."""
    draw = random.Random(f"{seed}/{number}")
    with tempfile.TemporaryDirectory() as name:
        world = make_world(draw, Path(name), random.Random(f"{seed}/{number}") if ends else None)
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
    parser.add_argument("--ends", action="store_true", help="streams run out, and samples grow")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for number in range(arguments.count):
        key = f"{arguments.seed}/{number}{' ends' if arguments.ends else ''}"
        if key not in done:
            try:
                done[key] = try_history(arguments.seed, number, ends=arguments.ends)
            except Exception as error:  # a trial goes on, and names what failed
                done[key] = {"failed": f"{type(error).__name__}: {error}"}
            arguments.out.write_text(json.dumps(done, indent=1))
    failed = [key for key, one in done.items() if "failed" in one]
    edits = sum(len(one.get("edits", ())) for one in done.values())
    print(f"{len(done)} histories, {edits} edits, {len(failed)} failed: {failed[:9]}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
