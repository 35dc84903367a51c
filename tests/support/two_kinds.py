"""Rows with images and numbers among their texts, in every container, and the documents that they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.arrow_files import write_arrow
from tests.support.image_oracle import patches_of
from tests.support.image_sources import RULES, make_rows
from tests.support.tar_shards import write_shard
from tests.support.toy_modality.kind import NUMBER

IMAGE, NUMBERS, AROUND, END = 300, 301, 302, 256
"""Ids: of an image's places, of numbers, around numbers, and at the end of a document."""
CONTAINERS = ("texts", "arrow", "parts", "messages", "members")
MARKERS = {bytes: "<image>", tuple: "<n>"}
TYPES = {bytes: "image", tuple: "number"}

Part = str | bytes | tuple[int, ...]
"""A text, the bytes of an image, or numbers."""
Row = list[Part]


def make_two_kinds(seed: int, count: int, name: str = "row") -> list[Row]:
    """Rows that begin with a text of their own; some have their items before it, images first."""
    rng = np.random.default_rng(seed)
    images = [image for row in make_rows(seed, 2 * count, most_side=40) for image in row.images]
    rows: list[Row] = []
    for row in range(count):
        items: list[Part] = [images[i] for i in rng.integers(0, len(images), int(rng.integers(0, 3)))]
        items += [
            tuple(rng.integers(0, 1 << 20, int(rng.integers(1, 7))).tolist()) for _ in range(int(rng.integers(0, 3)))
        ]
        if row % 4 == 0:
            rows.append([*items, f"{name} {row}."])
            continue
        parts: Row = [f"{name} {row}."]
        for item in rng.permutation(len(items)).tolist():
            parts += [items[item], *(["ab"] if rng.random() < 0.5 else [])]
        rows.append(parts)
    return rows


def items_of_row(row: Row, kind: type) -> list[Any]:
    """Its items of a kind, in order."""
    return [part for part in row if isinstance(part, kind)]


def tokens_of_item(part: bytes | tuple[int, ...]) -> int:
    """How many tokens an item becomes."""
    return -(-len(part) // 2) if isinstance(part, tuple) else patches_of(part, "dynamic")[1]


def document(row: Row, container: str = "texts") -> list[int]:
    """The ids of a row."""
    ids: list[int] = []
    for part in row:
        if isinstance(part, str):
            ids += part.encode()
        elif isinstance(part, bytes):
            ids += [IMAGE] * tokens_of_item(part)
        else:
            ids += [AROUND, *[NUMBERS] * tokens_of_item(part), AROUND]
    return [*b"User: ", *ids, 10, END] if container == "messages" else [*ids, END]


def packed(numbers: Sequence[int]) -> bytes:
    """Numbers as the bytes of an item."""
    return np.array(numbers, NUMBER).tobytes()


def _text(row: Row, *, is_bare: bool) -> str:
    marked = (part if isinstance(part, str) else "" if is_bare else MARKERS[type(part)] for part in row)
    return "".join(marked)


def write_two_kinds(folder: Path, name: str, container: str, files: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """Write a source; returns what a recipe says of it. Where items stand before a text, it has no markers."""
    images: dict[str, Any] = {"column": "images", "token": IMAGE, **RULES["dynamic"]}
    numbers: dict[str, Any] = {"column": "numbers", "token": NUMBERS, "before": AROUND, "after": AROUND}
    source: dict[str, Any] = {"tokenizer": "bytes", "images": images, "items": {"number": numbers}}
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(files):
        path = folder / name / f"{number}.x"
        bytes_of = [{kind: _bytes(items_of_row(row, kind)) for kind in TYPES} for row in rows]
        texts = [_text(row, is_bare=isinstance(row[-1], str) and i % 4 == 0) for i, row in enumerate(rows)]
        if container in ("texts", "arrow"):
            columns = {
                "text": texts,
                "images": pa.array([held[bytes] for held in bytes_of], pa.list_(pa.binary())),
                "numbers": pa.array([held[tuple] for held in bytes_of], pa.list_(pa.binary())),
            }
            if container == "arrow":
                write_arrow(path.with_suffix(".arrow"), pa.table(columns), batch_rows=7)
            else:
                pq.write_table(pa.table(columns), path.with_suffix(".parquet"), row_group_size=16)
            source |= {"text": "text", "path": f"{name}/*.{'arrow' if container == 'arrow' else 'parquet'}"}
        elif container == "members":
            samples = []
            for i, held in enumerate(bytes_of):
                members = {f"{k}.jpg": image for k, image in enumerate(held[bytes])}
                members |= {"json": json.dumps({"text": texts[i]}).encode()}
                samples.append((f"d/{i}", members | {f"{k}.num": one for k, one in enumerate(held[tuple])}))
            write_shard(path.with_suffix(".tar"), samples)
            source |= {"text": "json.text", "path": f"{name}/*.tar"}
            images["column"], numbers["column"] = "*.jpg", "*.num"
        else:
            lines = []
            for i, (row, held) in enumerate(zip(rows, bytes_of, strict=True)):
                paths = {kind: [f"{number}-{i}-{k}.{TYPES[kind]}" for k in range(len(held[kind]))] for kind in TYPES}
                for kind in TYPES:
                    for place, content in zip(paths[kind], held[kind], strict=True):
                        (folder / name / place).write_bytes(content)
                line: dict[str, Any] = {"images": paths[bytes], "numbers": paths[tuple]}
                parts = [
                    {"type": "text", "text": one} if isinstance(one, str) else {"type": TYPES[type(one)]} for one in row
                ]
                if container == "parts":
                    line["parts"] = parts
                else:
                    line["messages"] = [{"role": "user", "content": texts[i] if i % 2 == 0 else parts}]
                lines.append(json.dumps(line))
            path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            source["path"] = f"{name}/*.jsonl"
            source |= {"interleaved": "parts"} if container == "parts" else {"messages": "messages"}
            images["folder"] = numbers["folder"] = name
    return source


def _bytes(items: Iterable[bytes | Sequence[int]]) -> list[bytes]:
    return [item if isinstance(item, bytes) else packed(item) for item in items]


def recipe_of_two_kinds(sources: dict[str, dict[str, Any]], **options: Any) -> dict[str, Any]:
    """A recipe with a module for each kind."""
    return {
        "version": 1,
        "seed": 3,
        "batch": {"samples": 8, "length": 128},
        "sources": sources,
        "mixture": dict.fromkeys(sources, 1),
        "modules": {
            "vision": {"items": "image", "sizes": "patches"},
            "counter": {"items": "number", "sizes": "values"},
        },
        **options,
    }
