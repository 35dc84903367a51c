"""Files and a recipe that random edits change, with every token a number of its own.

In: a random generator and a folder. Out: a `World`: its documents, which stream has which, and a catalog after each
edit. Must hold: which rows a stream has is worked out from the values of the files, not by torchmix. Cost: a tenth of a
second a file.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe
from torchmix.steps.state import LoaderState

LENGTH, SAMPLES = 64, 8
UNTOUCHED = "z"
"""A source that no edit touches."""
ENDS = {"max_epochs": 1, "on_exhausted": "renormalise"}
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
    ends: set[str] = field(default_factory=set)
    """Streams that may give one epoch, and then run out."""
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
        for name in self.ends & set(self.weights) & set(sources):
            sources[name] |= ENDS
        mixture = {
            name: {"share": weight, "flat": self.flats[name], **(ENDS if name in self.ends else {})}
            if name in self.flats
            else weight
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


def make_world(draw: random.Random, folder: Path, ends: random.Random | None = None) -> World:
    """Files, and a recipe of one of three shapes; with `ends` streams run out, and samples may grow."""
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
    if ends is not None:
        world.ends = {name for name in sorted(set(world.weights) - {UNTOUCHED}) if ends.random() < 0.7}
        if ends.random() < 0.5:
            stages = [(0, SAMPLES, LENGTH), (ends.randint(2, 9), SAMPLES, 2 * LENGTH), (ends.randint(10, 30), 4, 512)]
            keys = ("from_step", "samples", "length")
            world.extra["batch"] = {"length": LENGTH, "samples": [dict(zip(keys, one, strict=True)) for one in stages]}
            world.extra["packing"] = {"method": ends.choice(["best_fit", "concat", "pad"])}
    return world
