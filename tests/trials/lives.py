"""Random lives of runs: recipes of every kind, edits of every kind, resumes and branches, as one JSON.

    python -m tests.trials.lives --seed 1 --count 300 --out lives.json

In: a seed and a number of lives. Out: for each life its edits, and what was compared. A life is a random recipe over
files that it writes, some steps, an edit or a branch from an earlier state, more steps, and so on; each stretch of
steps begins with a state from bytes, another layout and catalogs from disk. Must hold, whatever was edited:

- Conservation. Every span of a document comes once in an epoch of its stream, also over edits, and none of another
  document. What was denied or removed comes no more, what is held out never. A stream that no edit touches gives its
  documents in the order of the run without edits.
- Shares. A step asks each stream for the exact share of its tokens, by `book_shares`; what a stream was asked for and
  gave since it came differ by half of the longest sample so far at most.
- Plan. What `--accept-edit` shows of an edit is what comes of it; the history of the run gives each of its steps again,
  and so do `trace` and `show`.

Most lives are plans alone, of all documents; in each fifth a job delivers tensors, whose tokens have a number each.
Each tenth is that of a run with a policy, which is killed between a decision and a checkpoint. A trial goes on where
it stopped. Cost: two seconds a life.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
import sys
import tempfile
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq

from tests.support.book_shares import mean_shares
from tests.support.edited_worlds import KINDS, LENGTH, UNTOUCHED, VALIDATION, World, make_world
from tests.support.loaders import Rank, run_job, write_job
from tests.support.trial import continued, trial_parser
from torchmix.catalog.store import Catalog, open_part
from torchmix.cli.main import main as torchmix
from torchmix.errors import PlanError, SourceExhausted, StateMismatch
from torchmix.parallel.place_tree import Layout
from torchmix.parallel.topology import Topology
from torchmix.planner.cursor import gone_by
from torchmix.planner.pack import Packed, Pieces
from torchmix.planner.planner import Planner, open_planner
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.ramp import length_of, length_of_step, stages_of
from torchmix.steps.edits import row_facts, state_for
from torchmix.steps.history import RunFold, RunHistory, Segment, cursor_of_state, segments_of_state
from torchmix.steps.state import LoaderState, encode_state, read_state, start_state, state_of_cursor

Counts = np.ndarray[Any, np.dtype[np.int64]]
Key = tuple[int, str]
"""Document and lane, see `World.homes`."""
FORETOLD = 5
"""Steps of which `diff` is asked."""
POLICY_STEPS = 24
ACCEPTED = re.compile(r"accept_edit='([0-9a-f]{16})'")


@dataclass
class Tenure:
    """A document in a stream."""

    stream: str
    epoch: int
    """The epoch that the stream was in when the document came."""
    before: Counts
    """How often each of its tokens was drawn before."""
    is_late: bool = False
    """Whether it comes only from the next epoch on, since it was given in this one."""
    is_unsure: bool = False
    """Whether it comes with this epoch or only with the next: the stream may have passed it while it was gone."""


@dataclass
class Ledger:
    """How often each token came, and what must hold of it."""

    world: World
    delivered: dict[str, Counts] = field(default_factory=dict)
    """By lane: how often each token was given."""
    tenures: dict[Key, Tenure] = field(default_factory=dict)
    gone: dict[Key, Counts] = field(default_factory=dict)
    """Documents that are not given any more -> how often each token was."""
    given_in: dict[tuple[Key, str], int] = field(default_factory=dict)
    """Document and stream that it has left -> the epoch in which that one gave it."""
    loose: set[Key] = field(default_factory=set)
    """Documents that are not followed any more."""
    denied: set[int] = field(default_factory=set)
    streams: set[str] = field(default_factory=set)
    ends: dict[str, int] = field(default_factory=dict)
    """All three of the recipe so far."""
    reborn: set[str] = field(default_factory=set)
    """Streams that were removed: under their names come new ones, from their first epoch on."""
    compared: int = 0

    def begin(self) -> None:
        """All documents are in their first streams."""
        self._open_lanes()
        self.streams, self.ends = self.world.streams(), dict(self.world.ends)
        for key, stream in self.world.homes().items():
            self.tenures[key] = Tenure(stream, 0, self._of(key, self.counts(key[1])).copy())

    def _open_lanes(self) -> None:
        for lane in ["", *(name for name, one in self.world.selections.items() if one.allow)]:
            self.counts(lane)

    def counts(self, lane: str) -> Counts:
        """Of a lane, as long as there are tokens."""
        found = self.delivered.get(lane, np.zeros(0, np.int64))
        if len(found) < self.world.num_tokens:
            found = np.append(found, np.zeros(self.world.num_tokens - len(found), np.int64))
        self.delivered[lane] = found
        return found

    def lane(self, stream: str) -> str:
        """The lane of a stream."""
        one = self.world.selections.get(stream)
        return stream if stream in self.delivered or (one is not None and one.allow) else ""

    def _of(self, key: Key, counts: Counts) -> Counts:
        one = self.world.documents[key[0]]
        return counts[one.first : one.first + one.tokens]

    def number(self, source: str, row: int) -> int:
        """The document that a row is."""
        return self.world.rows[source][row]

    def give(self, pieces: Pieces, planner: Planner, lanes: list[str]) -> None:
        """Count pieces that a step has."""
        for source, row, start, tokens, stream in _columns(pieces, "source", "row", "start", "tokens", "stream"):
            first = self.world.documents[self.number(planner.sources[source], row)].first + start
            self.counts(lanes[stream])[first : first + tokens] += 1

    def drawn(self, state: LoaderState) -> dict[str, Counts]:
        """By lane: how often each token was given, or waits."""
        found = {lane: self.counts(lane).copy() for lane in {"", *self.delivered}}
        pool, names = state.at.pool, state.rows.source_names
        columns = _columns(pool, "stream", "source", "row", "start", "tokens")
        for stream, source, row, start, tokens in columns:
            first = self.world.documents[self.number(names[source], row)].first + start
            found[self.lane(state.rows.streams[stream])][first : first + tokens] += 1
        return found

    def _bounds(self, tenure: Tenure, epochs: dict[str, int]) -> tuple[int, int]:
        passed = epochs.get(tenure.stream, 0) - tenure.epoch
        late, unsure = tenure.is_late, tenure.is_unsure
        return max(0, passed - (late or unsure)), max(0, passed - late + 1)

    def _sure(self, key: Key) -> int:
        """The first tokens of a document, which come in each epoch: `truncate` and `drop` leave the others out."""
        tokens, overflow = self.world.documents[key[0]].tokens, self.world.extra["packing"]["overflow"]
        return {"truncate": min(tokens, LENGTH), "drop": tokens * (tokens <= LENGTH)}.get(overflow, tokens)

    def check(self, state: LoaderState, what: str) -> None:
        """All that must hold where a run stands."""
        drawn = self.drawn(state)
        epochs = dict(zip(state.rows.streams, state.at.position.epoch.tolist(), strict=True))
        for key, tenure in self.tenures.items():
            one = self.world.documents[key[0]]
            if not one.tokens:
                continue
            lowest, highest = self._bounds(tenure, epochs)
            found = self._of(key, drawn[key[1]]) - tenure.before
            where = f"{what}: {one.source} row {one.row} in {tenure}, now in epoch {epochs[tenure.stream]}: {found}"
            assert found[: self._sure(key)].min(initial=highest) >= lowest, f"lost: {where}"
            assert found.max() <= highest, f"repeated: {where}"
            self.compared += 1
        for key, counts in self.gone.items():
            one = self.world.documents[key[0]]
            assert (self._of(key, self.counts(key[1])) == counts).all(), f"{what}: {one.source} {one.row} came again"

    def edit(self, state: LoaderState) -> None:
        """The recipe has changed at a state."""
        self._open_lanes()
        drawn = self.drawn(state)
        # A stream that has run out stands at the end of its last epoch, where new rows come once.
        left = {name: count for name, count in self.ends.items() if name not in self.world.streams()}
        last = {name: count - 1 for name, count in (left | self.world.ends).items()}
        stand = dict(zip(state.rows.streams, state.at.position.epoch.tolist(), strict=True))
        epochs = {name: min(epoch, last.get(name, epoch)) for name, epoch in stand.items()}
        self.ends = dict(self.world.ends)
        homes = {key: stream for key, stream in self.world.homes().items() if key[0] not in self.world.denied}
        pool, names = state.at.pool, state.rows.source_names
        columns = _columns(pool, "stream", "source", "row", "epoch")
        stale = {
            self.number(names[source], row)
            for stream, source, row, epoch in columns
            if epoch != stand[state.rows.streams[stream]] and state.rows.streams[stream] not in self.world.streams()
        }
        self.reborn |= self.streams - self.world.streams()
        self.streams = self.world.streams()
        for key in sorted({*self.tenures, *homes}):
            old, new = self.tenures.get(key), homes.get(key)
            if (old is not None and old.stream == new) or key in self.loose:
                continue
            late = False
            if old is not None:
                del self.tenures[key]
                found = self._of(key, drawn.get(key[1], self.counts(key[1]))) - old.before
                late = bool(found.max(initial=0) > self._bounds(old, epochs)[0])
                late = late or self.given_in.get((key, old.stream), -1) == epochs.get(old.stream, 0)
                if late:
                    self.given_in[key, old.stream] = epochs.get(old.stream, 0)
            self.gone.pop(key, None)
            if new is None:
                self.gone[key] = self._of(key, self.counts(key[1])).copy()
            elif key[0] in stale:  # what waits of an epoch that is over goes with its stream
                self.loose.add(key)
            else:
                again = self.given_in.get((key, new), -1) == epochs.get(new, 0)
                before = self._of(key, drawn.get(key[1], self.counts(key[1]))).copy()
                is_unsure = key[0] in self.denied or (again and new in self.reborn)
                late = late or (again and new not in self.reborn)
                self.tenures[key] = Tenure(new, epochs.get(new, 0), before, late, is_unsure and not late)
        self.denied = set(self.world.denied)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        fields = {name: value if name == "world" else copy.deepcopy(value, memo) for name, value in vars(self).items()}
        return Ledger(**fields)


@dataclass
class Run:
    """Where a run stands; a branch begins with a copy."""

    ledger: Ledger
    state: bytes = b""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Of the world, at the state."""
    consumed: int = 0
    """Tokens of the batches so far."""
    begun: dict[str, int] = field(default_factory=dict)
    """Change at an epoch -> the tokens of the batches before it began."""
    owed: dict[str, int] = field(default_factory=dict)
    """Stream -> what it was asked for, less what it gave."""
    trail: list[tuple[bytes, list[tuple[Any, ...]]]] = field(default_factory=list)
    """Order digest and pieces of each step."""
    untouched: list[frozenset[tuple[int, int]]] = field(default_factory=list)
    """Epoch and row of the documents that the untouched stream has drawn, after each step."""
    edits: int = 0

    @property
    def step(self) -> int:
        return len(self.trail)


class Life:
    """One random life."""

    def __init__(self, seed: int, number: int, folder: Path) -> None:
        self.name = f"{seed}/{number}"
        self.draw = random.Random(f"life {self.name}")
        self.folder = folder
        self.world = make_world(self.draw, folder)
        self.run = Run(Ledger(self.world))
        self.history: list[str] = []
        self.kept: list[Run] = []
        self.past: list[dict[str, Any]] = []
        self.is_over = False
        self.is_planned = True
        """Whether a step was planned since the edit before."""
        self.before_edit = self.run.ledger
        self.is_alone = False
        """Whether the last edit was made where a step was planned since the one before."""
        self.foretold: dict[str, float] = {}
        self.asked: list[dict[str, int]] = []
        """Of each stream, by step."""
        self.found = {
            "steps": 0,
            "resumes": 0,
            "branches": 0,
            "shares": 0,
            "planned": 0,
            "traced": 0,
            "shown": 0,
            "foretold": 0,
        }
        self.delivered = 0

    # Opening

    def open(self) -> tuple[Part, Catalog]:
        part = part_of(load_recipe(self.path), "train")
        return part, open_part(self.folder / "catalog", part)

    def write(self) -> None:
        self.path = self.world.write()
        held = {*self.world.held_out(), *self.world.rows.get(VALIDATION, ())} - self.world.denied
        if held:
            self.check_validation(held)

    def check_validation(self, held: set[int]) -> None:
        """One pass of validation gives what is held out of its streams, and nothing else."""
        part = part_of(load_recipe(self.path), "validation", one_pass=True)
        try:
            planner = open_planner(part, open_part(self.folder / "catalog", part))
        except PlanError as error:  # a stream may have no row that is held out
            assert "would give no tokens" in str(error)
            return
        cursor, given = planner.start(), list[tuple[int, int, int]]()
        with contextlib.suppress(SourceExhausted):
            while True:
                packed, _, _, cursor = planner.fold(cursor)
                given += [
                    (self.world.rows[planner.sources[source]][row], start, tokens)
                    for source, row, start, tokens in _columns(packed.pieces, "source", "row", "start", "tokens")
                ]
        assert len(set(given)) == len(given) or any(one.allow for one in self.world.selections.values()), "twice"
        assert {number for number, _, _ in given} <= held, "validation has a document of training"
        if not self.world.selections and not self.world.cells and self.world.extra["packing"]["overflow"] == "split":
            wanted = {number for number in held if self.world.documents[number].tokens}
            assert {number for number, _, _ in given} == wanted, "validation lacks a document"

    def accepted(self, part: Part, catalog: Catalog) -> LoaderState:
        """The state to go on from, with the edit accepted if it is one."""
        if not self.run.state:
            return start_state(Layout(), recipe=part)
        rows = row_facts(part, catalog)
        try:
            return state_for(read_state(self.run.state), part, rows=rows)
        except StateMismatch as error:
            word = ACCEPTED.search(str(error))
            if word is None:
                raise
            return state_for(read_state(self.run.state), part, rows=rows, accept_edit=word[1])

    # Going on

    def go_on(self, steps: int) -> None:
        """Plan some steps from the state, each judged."""
        run, world = self.run, self.world
        part, catalog = self.open()
        layout = Layout()
        if all(stage["samples"] % 2 == 0 for stage in world.stages):
            layout = Layout(dp=self.draw.choice([1, 2]))
        planner = open_planner(part, catalog, layout)
        state = self.accepted(part, catalog)
        RunHistory(self.folder / "catalog", msgspec.to_builtins(load_recipe(self.path)), part).keep(
            state, catalog=catalog.fingerprint
        )
        cursor = cursor_of_state(state, planner, catalog=catalog.fingerprint)
        assert cursor is not None and cursor.step == run.step
        lanes = [run.ledger.lane(name) for name in planner.streams]
        homes, plain = world.homes(), world.plain()
        at_epoch = self._change_at_epoch()
        if steps:  # an edit without steps is one with the next
            run.begun = {key: place for key, place in run.begun.items() if key == at_epoch}
            run.owed = {name: run.owed.get(name, 0) for name in planner.streams}
        for _ in range(steps):
            gone = gone_by(cursor.decisions)
            if at_epoch is not None and at_epoch not in run.begun:
                of = planner.streams.index(UNTOUCHED)
                if cursor.position.epoch[of] >= world.schedule["from"]["epochs"]:  # type: ignore[index]
                    run.begun[at_epoch] = run.consumed
            try:
                packed, new, asked, after = planner.fold(cursor)
            except SourceExhausted:
                self.is_over = True
                break
            self._judge_drawn(planner, new, homes, lanes)
            run.ledger.give(packed.pieces, planner, lanes)
            self.asked.append(dict(zip(planner.streams, asked.tolist(), strict=True)))
            is_same = gone_by(after.decisions) == gone
            capacity = sum(self._samples(cursor.step)) * length_of_step(part.batch, cursor.step)
            if is_same:
                self._judge_shares(planner, plain, asked, capacity, gone)
            so_far = [length_of(part.batch, one) for one in stages_of(part.batch) if one.from_step <= cursor.step]
            self._judge_owed(planner, new, asked, gone_by(after.decisions), max(so_far))
            run.consumed += capacity
            cursor = after
            run.trail.append((after.order_digest, pieces_of(packed, planner, after.step - 1)))
            given = run.untouched[-1] if run.untouched else frozenset()
            u = planner.streams.index(UNTOUCHED)
            mine = {(epoch, row) for stream, epoch, row in _columns(new, "stream", "epoch", "row") if stream == u}
            run.untouched.append(given | mine)
            self.found["steps"] += 1
        identity = {"recipe": recipe_fingerprint(part), "keys": key_digests(recipe_keys(part))}
        self.is_planned = self.is_planned or cursor.step > state.step
        made = state_of_cursor(cursor, planner, catalog=catalog.fingerprint, **identity)
        if cursor.step > state.step or not state.is_planned:
            if cursor.step:
                run.state = encode_state(made)
        else:
            run.state = encode_state(state)
        run.recipe = world.recipe_values

    def _samples(self, step: int) -> list[int]:
        return [[stage["samples"] for stage in self.world.stages if stage["from_step"] <= step][-1]]

    def _change_at_epoch(self) -> str | None:
        schedule = self.world.schedule
        return json.dumps(schedule["from"]) if schedule and isinstance(schedule["from"], dict) else None

    def _judge_drawn(self, planner: Planner, new: Pieces, homes: dict[Key, str], lanes: list[str]) -> None:
        """Only documents of a stream are drawn from it, none that is denied, and as much as overflow lets in."""
        overflow = self.world.extra["packing"]["overflow"]
        length = length_of_step(planner.part.batch, self.run.step)
        for stream, source, row, start, tokens in _columns(new, "stream", "source", "row", "start", "tokens"):
            number = self.world.rows[planner.sources[source]][row]
            one, name = self.world.documents[number], planner.streams[stream]
            where = f"{self.name} step {self.run.step}: {name} gave {one}"
            assert homes.get((number, lanes[stream])) == name and number not in self.world.denied, where
            assert start >= 0 and start + tokens <= one.tokens, where
            if overflow == "truncate":
                assert (start, tokens) == (0, min(one.tokens, length)), where
            if overflow == "drop":
                assert (start, tokens) == (0, one.tokens) and tokens <= length, where

    def _judge_shares(
        self, planner: Planner, plain: dict[str, Any], asked: Counts, capacity: int, gone: frozenset[str]
    ) -> None:
        run, begun = self.run, next(iter(self.run.begun.values()), None)
        exact = mean_shares(plain, run.consumed, run.consumed + capacity, set(gone), begun)
        by_name: dict[str, int] = dict.fromkeys(exact, 0)
        for name, tokens in zip(planner.streams, asked.tolist(), strict=True):
            by_name["talk" if name.startswith("talk/") else name] += tokens
        whole, count = sum(by_name.values()), len(planner.streams)
        for name, tokens in by_name.items():
            off = abs(tokens - exact[name] * whole)
            most = 1 + count * (exact[name] + (name == "talk")) + Fraction(count * whole, 2**32)
            assert off <= most, (
                f"{self.name} step {run.step}: {name} was asked for {tokens} of {whole}, its share is {exact[name]} "
                f"after {self.history}, begun {run.begun}"
            )
            self.found["shares"] += 1

    def _judge_owed(self, planner: Planner, new: Pieces, asked: Counts, gone: frozenset[str], length: int) -> None:
        drawn = np.zeros(len(planner.streams), np.int64)
        most = length if self.world.extra["packing"]["method"] != "pad" else 8 * length
        cost = new.tokens
        if self.world.extra["unit"] == "documents":
            cost, most = 64 * (cost > 0), 64 * most // length
        np.add.at(drawn, new.stream, cost)
        for name, more, less in zip(planner.streams, asked.tolist(), drawn.tolist(), strict=True):
            owed = self.run.owed[name] = 0 if name in gone else self.run.owed[name] + more - less
            assert 2 * abs(owed) <= most, f"{self.name} step {self.run.step}: {name} is owed {owed} tokens"

    # Changing

    def change(self) -> bool:
        """Edit the recipe, or go back to an earlier state first; whether something changed."""
        state = read_state(self.run.state)
        if self.kept and self.draw.random() < 0.25:
            self.run = copy.deepcopy(self.draw.choice(self.kept))
            self.world.take_back(self.run.recipe)
            self.history.append(f"branch at step {self.run.step}")
            self.found["branches"] += 1
            state = read_state(self.run.state)
            self.is_over, self.is_planned = False, True
        (self.folder / "old.yaml").write_text(self.world.recipe_text(), encoding="utf-8")
        kind = self.draw.choice(KINDS)
        values, files = self.world.recipe_values, dict(self.world.num_files)
        if not self.world.edit(kind, state, self.past):
            assert {n: files[n] for n in files} == {n: self.world.num_files[n] for n in files}, (
                "files stay as they were"
            )
            self.world.take_back(values)
            kind = ""
        else:
            self.past.append(values)
            self.history.append(f"{kind} at step {state.step}")
            self.run.edits += 1
        self.write()
        self.is_alone = self.is_planned
        if self.is_planned:
            self.before_edit = copy.deepcopy(self.run.ledger)
        else:  # nothing was planned since the edit before: both are one
            self.run.ledger = copy.deepcopy(self.before_edit)
        self.run.ledger.edit(state)
        self.is_planned = False
        return bool(kind)

    def preview(self) -> list[tuple[Any, ...]] | None:
        """The pieces that `plan --accept-edit` shows of the next steps; None where there is nothing to accept."""
        part, catalog = self.open()
        (self.folder / "state.bin").write_bytes(self.run.state)
        words: list[object] = ["plan", self.path, "--state", self.folder / "state.bin", "--steps", 3]
        try:
            state_for(read_state(self.run.state), part, rows=row_facts(part, catalog))
        except StateMismatch as error:
            found = ACCEPTED.search(str(error))
            assert found, str(error)
            words += ["--accept-edit", found[1]]
        out = self.folder / f"plan{len(self.history)}-{self.found['planned']}"
        code, said = command(*words, "--start", self.run.step, "--out", out)
        if code and "run out" in said:
            return None
        assert code == 0, f"{self.name}: plan said {said}"
        if self.is_alone:
            self.foretold = self.foretell(words[-1] if "--accept-edit" in words else None)
        table = pq.read_table(out / "pieces.parquet")
        names = ("step", "sample", "slot", "stream", "source", "row", "epoch", "start", "tokens")
        return list(zip(*(table[name].to_pylist() for name in names), strict=True))

    def foretell(self, word: object) -> dict[str, float]:
        """The shares that `diff` says of the next steps; it gives the word, too."""
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            words = ["diff", self.folder / "old.yaml", self.path, "--state", self.folder / "state.bin", "--json"]
            code = torchmix([*map(str, words), "--steps", str(FORETOLD)])
        assert code == 0, f"{self.name}: diff after {self.history}"
        found = json.loads(told.getvalue())
        assert word is None or found["accept_edit"] == word, f"{self.name}: diff gives another word, {self.history}"
        return {row["stream"]: row["after"] for row in found["streams"] if row["after"] is not None}

    def judge_foretold(self, asked: dict[str, int]) -> None:
        """What was asked for in these steps is what `diff` has said."""
        first = self.run.step - FORETOLD
        if any(one.kind == "ran_out" and one.step >= first for one in read_state(self.run.state).at.decisions):
            return  # in the step in which a stream ends, less is asked of it than its share
        whole = sum(asked.values())
        for name, share in self.foretold.items():
            off = abs(share - asked.get(name, 0) / whole)
            assert off < 0.02, f"{self.name}: diff said {share} of {name}, it is {asked[name] / whole}, {self.history}"
        self.found["foretold"] += len(self.foretold)

    # Looking back

    def check_history(self) -> None:
        """The history gives each step of the run again."""
        if not self.run.step:
            return
        part, catalog = self.open()
        state = read_state(self.run.state)
        segments = segments_of_state(self.folder / "catalog", Segment(part=part, catalog=catalog), state)
        fold = RunFold(segments)
        for step, (digest, pieces) in enumerate(self.run.trail):
            fold.before()
            planner, packed = fold.planner, fold.pack()
            assert fold.cursor.order_digest == digest, f"{self.name}: step {step} of the history after {self.history}"
            assert pieces_of(packed, planner, step) == pieces

    def check_verbs(self) -> None:
        """`trace` and `show` say the same of the run's documents and steps."""
        (self.folder / "state.bin").write_bytes(self.run.state)
        state = ("--state", self.folder / "state.bin")
        traced = self.draw.sample(sorted(self.world.sources()), 2)
        rows = [f"{source}:{row}" for source in traced for row in range(len(self.world.rows[source]))]
        (self.folder / "rows").write_text("".join(f"{row}\n" for row in rows))
        code, said = command(
            "trace", self.path, *state, "--list", self.folder / "rows", "--out", self.folder / "t.parquet"
        )
        assert code == 0, f"{self.name}: trace said {said} after {self.history}"
        table = pq.read_table(self.folder / "t.parquet")
        names = ("step", "sample", "slot", "stream", "source", "row", "epoch", "start", "stop")
        found = list(zip(*(table[name].to_pylist() for name in names), strict=True))
        wanted = [
            (*piece[:8], piece[7] + piece[8]) for _, pieces in self.run.trail for piece in pieces if piece[4] in traced
        ]
        assert found == wanted, f"{self.name}: trace of {traced} after {self.history}"
        self.found["traced"] += len(found)
        for step in {0, self.draw.randrange(self.run.step), self.run.step - 1}:
            code, said = command("show", self.path, *state, "--step", step)
            assert code == 0, f"{self.name}: show of step {step} of {self.run.step} said {said} after {self.history}"
            self.found["shown"] += 1

    def deliver(self) -> None:
        """A job gives the tokens of the run's next steps as they are planned."""
        part, catalog = self.open()
        fold = RunFold([Segment(part=part, catalog=catalog, state=self.accepted(part, catalog))])
        wanted = []
        with contextlib.suppress(SourceExhausted):
            for _ in range(4):
                planner, pieces = fold.planner, fold.pack().pieces
                first = [
                    (self.world.documents[self.world.rows[planner.sources[source]][row]].first + start, tokens)
                    for source, row, start, tokens in _columns(pieces, "source", "row", "start", "tokens")
                ]
                wanted.append(sorted(token for at, tokens in first for token in range(at, at + tokens)))
        if not wanted:
            return
        state = self.run.state

        def program(loader: Any, rank: Rank) -> None:
            try:
                loader.load_state_dict({"torchmix_state": state})
            except StateMismatch as error:
                found = ACCEPTED.search(str(error))
                assert found, str(error)
                loader.load_state_dict({"torchmix_state": state}, accept_edit=found[1])
            rank.result, tokens = [], list[int]()
            for microbatch in loader:
                tokens += microbatch.tokens[microbatch.source_index >= 0].tolist()
                if microbatch.is_last_of_step:
                    rank.result.append(tokens)
                    tokens = []
                    if len(rank.result) == len(wanted):
                        return

        even = all(stage["samples"] % 2 == 0 for stage in self.world.stages)
        ranks = run_job(self.path, Topology(dp=2 if even else 1), program=program)
        for step, of_step in enumerate(wanted):
            given = sorted(token for rank in ranks for token in rank.result[step])
            assert given == of_step, f"{self.name}: tensors of step {self.run.step + step} after {self.history}"
            self.delivered += len(given)


def try_life(seed: int, number: int) -> dict[str, Any]:
    """One life; an AssertionError says what did not hold."""
    with tempfile.TemporaryDirectory() as name:
        life = Life(seed, number, Path(name))
        life.write()
        life.run.ledger.begin()
        draw, is_fifth = life.draw, number % 5 == 0
        start = copy.deepcopy(life.run)
        life.go_on(24)
        unedited, life.run = life.run.untouched[::3], start
        life.go_on(draw.randint(1, 14))
        life.run.ledger.check(read_state(life.run.state), life.name)
        for _ in range(draw.randint(1, 5)):
            if not life.run.step:
                break
            if life.is_planned:
                life.kept.append(copy.deepcopy(life.run))
            is_edited = life.change()
            planned = life.preview() if draw.random() < 0.3 else None
            before, num_asked = life.run.step, len(life.asked)
            if is_fifth:
                life.deliver()
            if life.is_over and not is_edited:
                break
            life.is_over = False
            life.go_on(draw.choice([0, 1, 2, 5, 9, 14]) if planned is None else FORETOLD)
            if life.foretold and len(life.asked) == num_asked + FORETOLD:
                totals = {name: sum(one.get(name, 0) for one in life.asked[num_asked:]) for name in life.foretold}
                life.judge_foretold(totals)
            life.foretold = {}
            life.found["resumes"] += 1
            if life.run.step > before:
                life.run.ledger.check(read_state(life.run.state), f"{life.name} after {life.history}")
            if planned is not None:
                came = [piece for _, pieces in life.run.trail[before : before + 3] for piece in pieces]
                last = min(before + 3, life.run.step)
                assert [piece for piece in planned if piece[0] < last] == came, f"{life.name}: plan of {life.history}"
                life.found["planned"] += len(came)
        if not life.is_over:
            life.go_on(10)
            life.run.ledger.check(read_state(life.run.state), f"{life.name} after {life.history}")
        if life.run.step:
            life.check_history()
            if draw.random() < 0.4:
                life.check_verbs()
        if life.world.extra["packing"]["overflow"] != "drop":  # what it passes over depends on the step
            check_prefixes(unedited, life.run.untouched[::2], life.name)
        return {
            "edits": life.history,
            "documents": life.run.ledger.compared,
            "tokens": life.delivered,
            "loose": len(life.run.ledger.loose),
            **life.found,
        }


def try_policy(seed: int, number: int) -> dict[str, Any]:
    """A run with a policy, killed again and again between a decision and a checkpoint; as `try_life`.

    What was decided after the checkpoint is nobody's past, also where other losses were told, and where the log ends
    inside a line. A replay of the last log asks no policy.
    """
    draw = random.Random(f"policy {seed}/{number}")
    policy, every, lag = draw.choice(["odm", "exp3", "ado"]), draw.randint(2, 5), draw.randint(1, 5)
    told = {web: tuple(draw.uniform(50, 400) for _ in range(7)) for web in ("web", "prose", "tiny")}
    topologies = [Topology(), Topology(dp=2), Topology(tp=2), Topology(dp=2, pp=2)]

    def losses(step: int) -> dict[str, tuple[float, int]]:
        return {name: (each[step % 7], 60 + step) for name, each in told.items() if name != "tiny" or step % 3}

    def training(stop: int, checkpoint: int) -> Any:
        def train(loader: Any, rank: Rank) -> None:
            for microbatch in loader:
                if not microbatch.is_last_of_step:
                    continue
                is_past = microbatch.step < checkpoint
                loader.report(microbatch.step, losses(microbatch.step) if is_past else {"web": (9e9, 1)})
                rank.digests.append(loader.order_digest)
                if microbatch.step + 1 == checkpoint:
                    rank.result = loader.state_dict()
                if microbatch.step + 1 == stop:
                    return

        return train

    with tempfile.TemporaryDirectory() as name:
        extra = f'dynamic: {{policy: {policy}, every: {every} steps, lag: {lag} steps, within: ["0.2x", "5x"]}}'
        whole, killed = (write_job(Path(name) / which, extra=extra) for which in ("whole", "killed"))
        [alone] = run_job(whole, Topology(), program=training(POLICY_STEPS, POLICY_STEPS))
        folder, given, state, kills = killed.parent / "decisions", list[str](), None, 0
        while len(given) < POLICY_STEPS:
            at, known = len(given), set(folder.glob("*.jsonl"))
            checkpoint = min(POLICY_STEPS, at + draw.randint(1, 2 * every))
            stop = min(POLICY_STEPS, checkpoint + draw.randint(0, lag + every))
            options = {"look_ahead": draw.choice([1, 4])} | ({} if state is None else {"state": state})
            [rank, *_] = run_job(killed, draw.choice(topologies), program=training(stop, checkpoint), **options)
            given, state, kills = [*given, *rank.digests[: checkpoint - at]], rank.result, kills + (stop > checkpoint)
            for path in {*folder.glob("*.jsonl")} - known:
                _tear(path, checkpoint, draw)
        assert given == alone.digests, f"policy {seed}/{number}: a step after a kill is another"
        [again] = run_job(
            killed, Topology(), program=training(POLICY_STEPS, POLICY_STEPS), decisions=str(whole.parent / "decisions")
        )
        assert again.digests == given, f"policy {seed}/{number}: a replay gives other steps"
    return {"edits": [], "policy": policy, "kills": kills, "steps": POLICY_STEPS}


def _tear(path: Path, checkpoint: int, draw: random.Random) -> None:
    """Have a log end where a kill may leave it: anywhere behind what a checkpoint follows from."""
    content = path.read_bytes()
    first = json.loads(content.splitlines()[0])["records"]
    kept = b"".join(content.splitlines(keepends=True)[: 1 + max(0, checkpoint - first)])
    path.write_bytes(content[: draw.randint(len(kept), len(content))])


def check_prefixes(one: list[frozenset[Any]], other: list[frozenset[Any]], name: str) -> None:
    """What was drawn at moments of two runs must be prefixes of one order: of any two, one holds the other."""
    for first in one:
        for second in other:
            assert first <= second or second <= first, f"{name}: the untouched stream came in another order"


def _columns(pieces: Pieces, *names: str) -> zip[tuple[int, ...]]:
    return zip(*(getattr(pieces, name).tolist() for name in names), strict=True)


def pieces_of(packed: Packed, planner: Planner, step: int) -> list[tuple[Any, ...]]:
    """Step, sample, slot, stream, source, row, epoch, start and tokens of each piece."""
    places = zip(packed.sample.tolist(), packed.slot.tolist(), strict=True)
    of = _columns(packed.pieces, "stream", "source", "row", "epoch", "start", "tokens")
    return [
        (step, *place, planner.streams[stream], planner.sources[source], *rest)
        for place, (stream, source, *rest) in zip(places, of, strict=True)
    ]


def command(*words: object) -> tuple[int, str]:
    """The exit code of a command of this process, and what it said of faults."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = torchmix([*map(str, words)])
    return code, said.getvalue()


def main() -> int:
    """Try the lives that are not in the file yet; 1 if one failed."""

    def try_one(seed: int, number: int) -> dict[str, Any]:
        try:
            return (try_policy if number % 10 == 9 else try_life)(seed, number)
        except Exception as error:  # a trial goes on, and names what failed
            return {"failed": f"{type(error).__name__}: {error}"}

    done = continued(trial_parser(__doc__, count=100).parse_args(), try_one, again=lambda one: "failed" in one)
    failed = [key for key, one in done.items() if "failed" in one]
    histories = [what for one in done.values() for what in one.get("edits", ())]
    branches = sum(what.startswith("branch") for what in histories)
    words = f"{len(done)} lives, {len(histories) - branches} edits, {branches} branches"
    print(f"{words}, {len(failed)} failed: {failed[:9]}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
