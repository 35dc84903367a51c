"""Rows with sounds or videos in every container, what ranks must get of them, and odd files of each kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.support.arrow_files import write_arrow
from tests.support.image_world import steps_of_ranks
from tests.support.tar_shards import write_shard
from torchmix.parallel.topology import Topology

ITEM, BEFORE, AFTER, END = 300, 301, 302, 256
"""Ids: of an item's places, before and after them, and at the end of a document."""
CONTAINERS = ("lists", "struct", "arrow", "members", "files")


@dataclass(frozen=True, kw_only=True)
class MediaKind:
    """A kind of items as the tests know it, apart from torchmix."""

    kind: str
    suffix: str
    words: Mapping[str, Any]
    """Its options in a recipe, beside column and tokens."""
    sizes: str
    unit_array: str
    make: Callable[[np.random.Generator, int], bytes]
    """A file; the number goes through all forms."""
    units: Callable[[bytes], np.ndarray]
    """What an encoder gets of it, by other code."""
    tokens: Callable[[bytes], int]
    odd: Callable[[], dict[str, tuple[bytes, str]]]
    """By what is wrong with them: odd and broken files, and what the message of each says."""
    packages: tuple[str, ...]
    shown: tuple[str, ...]
    """What a page has that shows an item."""
    sizes_against_transformers: Callable[[np.random.Generator, int], dict[str, Any]] | None = None
    """Sizes and lengths against transformers' code: `sizes` and `values` compared, how many are `different`."""
    tolerance: float = 0.0
    """How far a value may be from that of the other code."""

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True, kw_only=True)
class MediaRow:
    """A row: texts, and the items between them."""

    texts: tuple[str, ...]
    items: tuple[bytes, ...]

    @property
    def marked(self) -> str:
        """One text, with markers."""
        return "<item>".join(self.texts)

    def document(self, kind: MediaKind) -> list[int]:
        """Its ids."""
        ids = list(self.texts[0].encode())
        for item, text in zip(self.items, self.texts[1:], strict=True):
            ids += [BEFORE, *[ITEM] * kind.tokens(item), AFTER, *text.encode()]
        return [*ids, END]


def make_media_rows(kind: MediaKind, seed: int, count: int) -> list[MediaRow]:
    """Rows with up to two items; every text is of its row alone."""
    rng = np.random.default_rng(seed)
    rows = []
    for row in range(count):
        items = tuple(kind.make(rng, 2 * row + k) for k in range(int(rng.integers(0, 3))))
        rows.append(MediaRow(texts=tuple(f"{seed}.{row}.{k};" for k in range(len(items) + 1)), items=items))
    return rows


def write_media(folder: Path, name: str, container: str, rows: Sequence[MediaRow], kind: MediaKind) -> dict[str, Any]:
    """Write a source; returns what a recipe says of it."""
    words: dict[str, Any] = {"column": "items", "token": ITEM, "before": BEFORE, "after": AFTER, "marker": "<item>"}
    items_words = {"images": words} if kind.kind == "image" else {"items": {kind.kind: words}}
    source: dict[str, Any] = {"tokenizer": "bytes", "text": "text", **items_words}
    words |= kind.words
    (folder / name).mkdir(parents=True, exist_ok=True)
    texts, items = [row.marked for row in rows], [list(row.items) for row in rows]
    path = folder / name / "0"
    if container == "members":
        samples = [
            (f"d/{i}", {"txt": text.encode()} | {f"{k}.{kind.suffix}": item for k, item in enumerate(held)})
            for i, (text, held) in enumerate(zip(texts, items, strict=True))
        ]
        write_shard(path.with_suffix(".tar"), samples)
        words["column"] = f"*.{kind.suffix}"
        return source | {"text": "txt", "path": f"{name}/*.tar"}
    if container == "files":
        lines = []
        for i, (text, held) in enumerate(zip(texts, items, strict=True)):
            named = [f"{i}-{k}.{kind.suffix}" for k in range(len(held))]
            for one, item in zip(named, held, strict=True):
                (folder / name / one).write_bytes(item)
            lines.append(json.dumps({"text": text, "items": named}))
        path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        words["folder"] = name
        return source | {"path": f"{name}/*.jsonl"}
    values: list[Any] = items
    form: pa.DataType = pa.binary()
    if container == "struct":
        form = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        values = [[{"bytes": item, "path": None} for item in held] for held in items]
    table = pa.table({"text": texts, "items": pa.array(values, pa.list_(form))})
    if container == "arrow":
        write_arrow(path.with_suffix(".arrow"), table, batch_rows=7)
        return source | {"path": f"{name}/*.arrow"}
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=16)
    return source | {"path": f"{name}/*.parquet"}


def write_media_project(
    folder: Path,
    kind: MediaKind,
    containers: Sequence[str],
    *,
    length: int,
    rows: int = 12,
    samples: int = 4,
    **module: Any,
) -> dict[str, list[MediaRow]]:
    """A recipe over a source of each container, with a module that encodes their items; returns the rows by source."""
    found = {container: make_media_rows(kind, seed, rows) for seed, container in enumerate(containers)}
    recipe = {
        "version": 1,
        "seed": 3,
        "batch": {"samples": samples, "length": length},
        "packing": {"overflow": "error"},
        "sources": {name: write_media(folder, name, name, of, kind) for name, of in found.items()},
        "mixture": dict.fromkeys(found, 1),
        "modules": {"encoder": {"items": kind.kind, "sizes": kind.sizes} | module},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return found


def documents_of(ids: np.ndarray) -> Iterator[list[int]]:
    """The documents in samples, without their padding."""
    start = 0
    for end in np.flatnonzero(ids == END).tolist():
        document = ids[start : end + 1].tolist()
        yield document[next(i for i, token in enumerate(document) if token) :]
        start = end + 1


def check_media(
    recipe: Path,
    rows: Mapping[str, Sequence[MediaRow]],
    kind: MediaKind,
    topology: Topology,
    steps: int,
    *,
    before: int = 0,
    **options: Any,
) -> list[list[bytes]]:
    """Compare what all ranks get of some steps with the rows; returns the items of each step, sorted.

    Every document is one of a row, each item in the texts is encoded once in its step, over all ranks, and its values
    are those of the other code.

    Args:
        recipe: Of the rows.
        rows: By source.
        kind: Of the items.
        topology: Of the ranks.
        steps: Where the run stops.
        before: Steps before the `state` from which it goes on.
        options: Of `run_job`.
    """
    ranks = steps_of_ranks(recipe, topology, steps, **options)
    assert {len(of_rank) for of_rank in ranks} == {steps - before}
    names = sorted(rows)
    items = [[item for row in rows[name] for item in row.items] for name in names]
    known = {tuple(row.document(kind)): row for of in rows.values() for row in of}
    made: dict[bytes, np.ndarray] = {}
    found_items: list[list[bytes]] = []
    for number in range(steps - before):
        wanted: list[bytes] = []
        for rank, of_rank in enumerate(ranks):
            place = topology.with_rank(rank).coordinates
            if place.tp or place.pp or topology.cp > 1:
                continue
            for microbatch in of_rank[number]:
                for document in documents_of(microbatch.tokens.numpy().reshape(-1)):
                    wanted += known[tuple(document)].items
        came: list[bytes] = []
        for of_rank in ranks:
            batch = of_rank[number][0].modules["encoder"]
            values, stops = batch.arrays[kind.unit_array].numpy(), [0, *batch.units.cumsum(0).tolist()]
            for item in range(len(batch.units)):
                source, place = (int(batch.arrays[key][item]) for key in ("source", "number"))
                content = items[source][place]
                if content not in made:
                    made[content] = kind.units(content)
                found = values[stops[item] : stops[item + 1]]
                assert found.shape == made[content].shape
                apart = float(np.abs(found.astype(np.float64) - made[content]).max())
                assert apart <= kind.tolerance, f"{kind.kind} {place} of {names[source]}: {apart}"
                came.append(content)
        if topology.cp == 1:
            assert sorted(came) == sorted(wanted)
        found_items.append(sorted(came))
    return found_items


def mutated(rng: np.random.Generator, content: bytes) -> bytes:
    """A file that somebody damaged: cut, with other bits, zeros, bytes left out or said twice."""
    way, size = int(rng.integers(0, 6)), len(content)
    at = int(rng.integers(0, size)) if rng.random() < 0.5 else int(rng.integers(0, min(size, 200)))
    if way == 0:
        return content[:at]
    if way == 1:
        count = int(rng.integers(1, 64))
        return content[:at] + bytes(min(count, size - at)) + content[at + count :]
    if way == 2:
        return content[:at] + content[at + int(rng.integers(1, 300)) :]
    if way == 3:
        return content[:at] + content[max(0, at - int(rng.integers(1, 300))) :]
    changed = bytearray(content)
    for _ in range(int(rng.integers(1, 8)) if way == 4 else 1):
        place = int(rng.integers(0, min(size, 200))) if rng.random() < 0.7 else int(rng.integers(0, size))
        changed[place] = int(rng.integers(0, 256)) if way == 4 else int(rng.choice([0, 0x7F, 0x80, 0xFF]))
    return bytes(changed)
