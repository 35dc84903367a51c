"""Files and a recipe that random edits change, with every token a number of its own.

In: a random generator and a folder. Out: a `World`: its documents, which streams have which, and a catalog after each
edit. Must hold: which rows a stream has is worked out from the values of the files, not by torchmix. Cost: a tenth of a
second a file.
"""

from __future__ import annotations

import copy
import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import with_all_sources
from torchmix.steps.state import LoaderState, encode_state, read_state

LENGTH = 64
UNTOUCHED = "z"
"""A source that no edit touches."""
VALIDATION = "v"
"""A source of validation alone."""
KINDS = (
    "shares",
    "shares",
    "schedule",
    "stage",
    "epochs",
    "add_source",
    "remove_source",
    "add_file",
    "add_file",
    "where",
    "where",
    "add_selection",
    "remove_selection",
    "flat_add",
    "deny",
    "deny",
    "undo",
    "undo",
)
LANGUAGES = ("de", "en", "fr")
RECIPE = ("weights", "later", "groups", "schedule", "stages", "selections", "flats", "denied", "ends")
"""What an edit may change of a world, beside its files."""


@dataclass
class Document:
    """A row of a source."""

    source: str
    row: int
    first: int
    """Number of its first token, among those of all documents."""
    tokens: int
    score: int
    lang: str
    in_file: str
    """File and row in it, as the hash of a hold-out has them."""


@dataclass
class Selection:
    """Rows of a source with a score."""

    source: str
    least: int
    allow: bool = False
    """Its rows may be in other streams of the source, too."""


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
    """Stream -> weight in its group."""
    later: dict[str, int] = field(default_factory=dict)
    """The same after the change of the schedule."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Group -> streams of it; the others stand beside the groups."""
    schedule: dict[str, Any] | None = None
    """Where the change begins and ends."""
    stages: list[dict[str, int]] = field(default_factory=list)
    selections: dict[str, Selection] = field(default_factory=dict)
    flats: dict[str, list[str]] = field(default_factory=dict)
    denied: set[int] = field(default_factory=set)
    ends: dict[str, int] = field(default_factory=dict)
    """Stream -> epochs after which its siblings take over its share."""
    cells: tuple[str, ...] = ()
    """Sources of a group of cells by language."""
    held: dict[str, float] = field(default_factory=dict)
    """Source -> the part of it that is held out for validation."""
    split: tuple[int, int] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        last = self.documents[-1]
        return last.first + last.tokens

    @property
    def recipe_values(self) -> dict[str, Any]:
        """A copy of what edits change."""
        return {name: copy.deepcopy(getattr(self, name)) for name in RECIPE}

    def take_back(self, values: dict[str, Any]) -> None:
        """Make the recipe what it was, with the files that there are now."""
        for name, value in copy.deepcopy(values).items():
            setattr(self, name, value)

    def add_file(self, source: str, *, files: int = 1) -> None:
        """More files of a source."""
        for _ in range(files):
            self._add_file(source)

    def _add_file(self, source: str) -> None:
        columns: dict[str, list[Any]] = {"ids": [], "score": [], "lang": [], "uid": []}
        number = self.num_files.get(source, 0)
        for place in range(self.draw.randint(20, 140)):
            first = self.num_tokens if self.documents else 0
            tokens = self.draw.choice([0, self.draw.randint(1, 400)]) if self.draw.random() < 0.1 else 0
            tokens = tokens or self.draw.randint(1, 40)
            rows = self.rows.setdefault(source, [])
            one = Document(
                source,
                len(rows),
                first,
                tokens,
                self.draw.randrange(10),
                self.draw.choice(LANGUAGES),
                f"{number}.parquet:{place}",
            )
            rows.append(len(self.documents))
            self.documents.append(one)
            columns["ids"].append(list(range(first, first + tokens)))
            columns["score"].append(one.score)
            columns["lang"].append(one.lang)
            columns["uid"].append(len(self.documents) - 1)
        self.num_files[source] = number + 1
        path = self.folder / source / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        kinds = {"ids": pa.list_(pa.int32()), "score": pa.int32(), "lang": pa.string(), "uid": pa.int64()}
        pq.write_table(
            pa.table(columns, schema=pa.schema(list(kinds.items()))), path, data_page_size=self.draw.choice([512, 2048])
        )

    def sources(self) -> set[str]:
        """Sources that the recipe has."""
        plain = {name for name in self.weights if name in self.rows}
        members = {member for flat in self.flats.values() for member in flat}
        return plain | members | {one.source for one in self.selections.values()} | set(self.cells)

    def tree(self, weights: dict[str, int]) -> dict[str, Any]:
        """The mixture without flats and cells written out."""
        grouped = {name for of_group in self.groups.values() for name in of_group}
        found: dict[str, Any] = {name: weight for name, weight in weights.items() if name not in grouped}
        for group, names in self.groups.items():
            found[group] = {"share": 3, "children": {name: weights[name] for name in names}}
        return found

    def plain(self) -> dict[str, Any]:
        """Mixture and schedule as `tests.support.book_shares` reads them."""
        found: dict[str, Any] = {"mixture": self.tree(self.weights)}
        if self.schedule:
            found["schedule"] = [{**self.schedule, "mixture": self.tree(self.later)}]
        return found

    def _written(self, tree: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in tree.items():
            if isinstance(value, dict):
                found[name] = {**value, "children": self._written(value["children"])}
            elif name == "talk":
                shares = {"source": dict(zip(self.cells, (2, 3), strict=True)), "lang": {"de": 1, "en": 2}}
                found[name] = {"share": value, "cells": {"of": list(self.cells), "shares": shares}}
            elif name in self.flats:
                found[name] = {"share": value, "flat": self.flats[name], **self._end(name)}
            else:
                found[name] = value
        return found

    def _end(self, name: str) -> dict[str, Any]:
        return {"max_epochs": self.ends[name], "on_exhausted": "renormalise"} if name in self.ends else {}

    def _own(self, name: str) -> dict[str, Any]:
        """A bound of one source on its pieces."""
        return {"packing": {"max_length": LENGTH // 2}} if name == "a" and self.extra.get("own") else {}

    def write(self) -> Path:
        """The recipe with its catalog."""
        path = self.folder / "recipe.yaml"
        path.write_text(self.recipe_text(), encoding="utf-8")
        index_recipe(with_all_sources(load_recipe(path)), self.folder)
        return path

    def recipe_text(self) -> str:
        """The recipe as YAML, with its deny-list beside it."""
        sources: dict[str, Any] = {}
        for name in sorted(self.sources()):
            columns = {"path": f"{name}/*.parquet", "tokens": "ids", "properties": ["score", "lang"]}
            ids = {"id": "uid"} if self.extra.get("ids") else {}
            sources[name] = columns | ids | self._own(name) | self._end(name)
        for name, one in self.selections.items():
            sources[name] = {"from": one.source, "where": f"score >= {one.least}", **self._end(name)}
            sources[name] |= {"overlap": "allow"} if one.allow else {}
        plain = self.plain()
        recipe: dict[str, Any] = {
            "version": 1,
            "seed": 7,
            "batch": {"samples": self.stages, "length": LENGTH},
            "sources": sources,
            "mixture": self._written(plain["mixture"]),
            **{key: value for key, value in self.extra.items() if key not in ("ids", "own")},
        }
        if self.schedule:
            recipe["schedule"] = [{**self.schedule, "mixture": self._written(self.tree(self.later))}]
        if self.held:
            recipe["hold_out"] = {"validation": {name: f"{part:.0%}" for name, part in self.held.items()}}
        if self.split:
            recipe["split"] = list(self.split)
        if VALIDATION in self.rows:
            own = {"path": f"{VALIDATION}/*.parquet", "tokens": "ids"}
            recipe["validation"] = {"sources": {VALIDATION: own}, "mixture": {VALIDATION: 1}}
        named = sorted(number for number in self.denied if self.documents[number].source in self.sources())
        if named:
            table = {
                "source": pa.array([self.documents[number].source for number in named], pa.string()),
                "row": pa.array([self.documents[number].row for number in named], pa.int64()),
            }
            name = f"deny-{hashlib.sha256(repr(named).encode()).hexdigest()[:9]}.parquet"
            pq.write_table(pa.table(table), self.folder / name)
            recipe["deny"] = [name]
        return yaml.safe_dump(recipe)

    def held_out(self) -> set[int]:
        """Documents that validation has instead of training."""
        found: set[int] = set()
        for source, part in self.held.items():
            for number in self.rows[source]:
                said = str(number) if self.extra.get("ids") else self.documents[number].in_file
                found |= (
                    {number}
                    if int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "big") < part * 2**64
                    else set()
                )
        if self.split:
            for source in self.sources():
                rows = self.rows[source]
                found |= set(rows[round(len(rows) * self.split[0] / sum(self.split)) :])
        return found

    def homes(self) -> dict[tuple[int, str], str]:
        """Document and lane -> the stream that has it. A selection that overlaps is a lane of its own, the others are
        one lane, in which a document is in one stream."""
        homes: dict[tuple[int, str], str] = {}
        held = self.held_out()
        for source in self.sources():
            rows = self.rows[source]
            if source in self.cells:
                homes |= {
                    (n, ""): f"talk/{source}/{self.documents[n].lang}" for n in rows if self.documents[n].lang != "fr"
                }
                continue
            sets = {name: one for name, one in self.selections.items() if one.source == source}
            stream = next((name for name, flat in self.flats.items() if source in flat), source)
            has = {name: {n for n in rows if self.documents[n].score >= one.least} for name, one in sets.items()}
            for name in [name for name, one in sets.items() if one.allow]:
                homes |= {(n, name): name for n in has.pop(name)}
            if stream in self.weights:
                has[source] = set(rows)
            taken: set[int] = set()
            for name in sorted(has, key=lambda name: (len(has[name]), name == source, name)):
                homes |= {(n, ""): stream if name == source else name for n in has[name] - taken}
                taken |= has[name]  # of two that have a row, the one with fewer rows keeps it
        return {key: stream for key, stream in homes.items() if key[0] not in held}

    def streams(self) -> set[str]:
        """All streams by the recipe."""
        cells = {f"talk/{source}/{lang}" for source in self.cells for lang in ("de", "en")}
        return {name for name in self.weights if name != "talk"} | cells

    def is_whole(self) -> bool:
        """Whether each stream has a document with tokens in every draw, and there are several."""
        longest = LENGTH if self.extra["packing"]["overflow"] == "drop" else 1 << 30
        given = {
            stream
            for (number, _), stream in self.homes().items()
            if number not in self.denied and 0 < self.documents[number].tokens <= longest
        }
        return given == self.streams() and len(given) > 1

    def edit(self, kind: str, state: LoaderState, past: list[dict[str, Any]]) -> bool:
        """Change something; whether that was possible.

        Args:
            kind: One of `KINDS`.
            state: Where the run stands.
            past: The recipes that it has had.
        """
        draw = self.draw
        plain = [name for name in self.weights if name in self.rows and name != UNTOUCHED]
        bases = {one.source for one in self.selections.values()}
        free = [name for name in plain if name not in bases and name not in self.held]
        if kind == "shares":
            self.weights = {name: draw.randint(1, 6) for name in self.weights}
            self.later = {name: draw.randint(1, 6) for name in self.weights}
            self._group()
        elif kind == "schedule":
            if self.schedule and draw.random() < 0.4:
                self.schedule = None
            else:
                self.schedule = draw_schedule(draw)
        elif kind == "stage":
            last = self.stages[-1]
            begin = max(state.step, last["from_step"] + 1) + draw.randint(0, 6)
            length = draw.choice([LENGTH, last.get("length", LENGTH), 2 * last.get("length", LENGTH)])
            self.stages.append({"from_step": begin, "samples": draw.randint(2, 8), "length": min(length, 4 * LENGTH)})
        elif kind == "epochs":
            name = draw.choice([name for name in sorted(self.weights) if name not in (UNTOUCHED, "talk")])
            if name in self.ends and draw.random() < 0.3:
                del self.ends[name]
            else:
                epoch = dict(zip(state.rows.streams, state.at.position.epoch.tolist(), strict=True)).get(name, 0)
                self.ends[name] = max(epoch + draw.randint(0, 1), self.ends.get(name, 0)) + 1
        elif kind == "add_source":
            name = f"n{len(self.rows)}"
            self.add_file(name)
            self._join(name)
        elif kind == "remove_source":
            if not free:
                return False
            self._leave(draw.choice(free))
        elif kind == "add_file":
            grown = sorted(self.sources() - {UNTOUCHED})
            if not grown or self.split:
                return False
            self.add_file(draw.choice(grown))
        elif kind == "where":
            if not self.selections:
                return False
            self.selections[draw.choice(sorted(self.selections))].least = draw.randint(2, 8)
        elif kind == "add_selection":
            of = [name for name in plain if name not in bases]
            if not of or len(self.selections) > 2:
                return False
            name = f"s{draw.randrange(10**6)}"
            self.selections[name] = Selection(draw.choice(of), draw.randint(2, 8), draw.random() < 0.3)
            self._join(name)
        elif kind == "remove_selection":
            if not self.selections:
                return False
            name = draw.choice(sorted(self.selections))
            del self.selections[name]
            self._leave(name)
        elif kind == "flat_add":
            if not self.flats:
                return False
            free = [name for name in free if name not in self.ends and not self._own(name)]
            if free and draw.random() < 0.5:
                name = draw.choice(free)
                self._leave(name)
            else:
                name = f"n{len(self.rows)}"
                self.add_file(name)
            flat = draw.choice(sorted(self.flats))
            self.flats[flat] = sorted([*self.flats[flat], name])
        elif kind == "deny":
            if self.denied and draw.random() < 0.3:
                self.denied -= set(draw.sample(sorted(self.denied), draw.randint(1, len(self.denied))))
                return self.is_whole()
            names, pool = state.rows.source_names, state.at.pool
            waiting = [
                self.rows[names[source]][row]
                for source, row in zip(pool.source.tolist(), pool.row.tolist(), strict=True)
                if names[source] != UNTOUCHED
            ]
            others = [n for source in sorted(self.sources() - {UNTOUCHED}) for n in self.rows[source]]
            self.denied |= set(draw.sample(others, min(len(others), draw.randint(1, 8)))) | set(waiting[:3])
        elif kind == "undo":
            fitting = [values for values in past if self._may_be(values, state)]
            if not fitting:
                return False
            self.take_back(draw.choice(fitting))
        else:
            raise AssertionError(kind)
        return self.is_whole()

    def _may_be(self, values: dict[str, Any], state: LoaderState) -> bool:
        """Whether an edit may make the recipe this one: no flat loses a member, no stage that has begun goes."""
        grown = all(
            set(members) <= set(values["flats"].get(name, ()))
            for name, members in self.flats.items()
            if name in values["flats"]
        ) and set(values["flats"]) == set(self.flats)
        stages = values["stages"]
        begun = list(self.stages)
        return (
            grown
            and stages[: len(begun)] == begun
            and all(stage["from_step"] >= state.step for stage in stages[len(begun) :])
            and values != self.recipe_values
        )

    def _join(self, name: str) -> None:
        self.weights[name], self.later[name] = self.draw.randint(1, 4), self.draw.randint(1, 4)

    def _leave(self, name: str) -> None:
        del self.weights[name], self.later[name]
        self.ends.pop(name, None)
        self.groups = {group: [one for one in names if one != name] for group, names in self.groups.items()}
        self.groups = {group: names for group, names in self.groups.items() if names}

    def _group(self) -> None:
        """Put some streams into a group."""
        inside = [name for name in self.weights if self.draw.random() < 0.4 and name != "talk"]
        self.groups = {"g": inside} if inside and len(inside) < len(self.weights) else {}


def draw_schedule(draw: random.Random) -> dict[str, Any]:
    """Where a change of the shares begins, and where its ramp ends."""
    if draw.random() < 0.4:
        begin: Any = {"epochs": draw.randint(1, 2), "of": UNTOUCHED}
        return {"from": begin} | ({"to": f"{draw.randint(1, 9000)} tokens"} if draw.random() < 0.7 else {})
    at = draw.randint(1, 15000)
    return {"from": f"{at} tokens"} | ({"to": f"{at + draw.randint(1, 9000)} tokens"} if draw.random() < 0.7 else {})


def make_world(draw: random.Random, folder: Path) -> World:
    """Files, and a recipe of a random shape over them."""
    world = World(folder, draw)
    method = draw.choice(["best_fit", "best_fit", "concat", "pad"])
    overflow = draw.choice(["split", "split", "truncate", "drop"])
    world.extra = {
        "shuffle": {"method": draw.choice(["page", "page", "row", "none"]), "window_pages": draw.randint(1, 4)},
        "packing": {"method": method, "overflow": overflow, "align_tokens": draw.choice([1, 8, 8, 16])},
        "unit": "documents" if draw.random() < 0.15 and (method, overflow) != ("pad", "split") else "tokens",
        "ids": draw.random() < 0.5,
        "own": draw.random() < 0.6 and method != "concat" and overflow == "split",
    }
    for name in (UNTOUCHED, "a", "b"):
        world.add_file(name, files=1 + (name == "a" and draw.random() < 0.5))
        world.weights[name] = draw.randint(1, 5)
    for name, source in (("s0", "a"), ("s1", "a"), ("o0", "b")):
        if draw.random() < 0.4:
            world.selections[name] = Selection(source, draw.randint(2, 8), name == "o0")
            world.weights[name] = draw.randint(1, 4)
    if "s0" in world.selections and draw.random() < 0.3:
        del world.weights["a"]
    if draw.random() < 0.5:
        for name in ("c", "d"):
            world.add_file(name)
        world.flats["f"] = ["c", "d"]
        world.weights["f"] = draw.randint(1, 5)
    if draw.random() < 0.3:
        for name in ("k0", "k1"):
            world.add_file(name)
        world.cells = ("k0", "k1")
        world.weights["talk"] = draw.randint(1, 4)
    for name in sorted(world.weights):
        if name not in (UNTOUCHED, "talk") and draw.random() < 0.25:
            world.ends[name] = draw.randint(1, 2)
    world.later = {name: draw.randint(1, 6) for name in world.weights}
    if draw.random() < 0.5:
        world._group()
    if draw.random() < 0.5:
        world.schedule = draw_schedule(draw)
    world.stages = [{"from_step": 0, "samples": draw.randint(2, 8)}]
    while draw.random() < 0.5 and len(world.stages) < 3:
        last = world.stages[-1]
        stage = {"from_step": last["from_step"] + draw.randint(1, 20), "samples": draw.randint(2, 8)}
        stage["length"] = min(4 * LENGTH, draw.choice([LENGTH, 2 * last.get("length", LENGTH)]))
        world.stages.append(stage)
    cut = draw.random()
    if cut < 0.15:
        world.split = (9, 1)
    elif cut < 0.4:
        world.held = {name: draw.choice([0.1, 0.4]) for name in ("b", UNTOUCHED) if name == "b" or draw.random() < 0.5}
    elif cut < 0.55:
        world.add_file(VALIDATION)
    while not world.is_whole():
        for one in world.selections.values():
            one.least = draw.randint(1, 8)
    return world


def state_of(content: bytes) -> LoaderState:
    """A state from its bytes, as `World.edit` takes it."""
    return read_state(content)


def facts_of_state(content: bytes) -> dict[str, Any]:
    """What a state says of decisions, and of the plan of the step that it stands in; and its bytes without the random
    name of a policy's log."""
    state = read_state(content)
    decisions = [[one.step, one.kind, one.name, one.epochs] for one in state.at.decisions]
    return {
        "decisions": decisions,
        "shares": dict(state.at.decided.shares),
        "plan": state.plan_digest.hex(),
        "bytes": encode_state(msgspec.structs.replace(state, log_branch="")) if state.log_branch else content,
    }
