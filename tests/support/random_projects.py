"""Random recipes with their files: mixtures, formats of every kind, chats, maps, images.

In: a random generator and an empty folder. Out: files and `recipe.yaml`, without an index. Must hold: one state of the
generator gives the same bytes under the same names.
"""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.support.arrow_files import write_arrow
from tests.support.chats import CONTAINERS, make_chats, write_chats
from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.image_oracle import write_project
from tests.support.image_sources import RULES
from tests.support.indexed_datasets import write_dataset
from tests.support.json_lines import json_lines, write_lines
from tests.support.maps import FUNCTIONS
from tests.support.random_mixtures import random_plain, with_cells

MODEL = {"layers": 4, "hidden": 64, "ffn": 256, "heads": 4}
MAPS = "maps_of_project"
"""The module of the maps."""
OF_ROWS = ("map", "chat", "reset", "cut")
"""Kinds of sources that differ in what a row becomes. Each recipe of formats has one."""
KINDS = (*OF_ROWS, "list", "text", "folders", "arrow", "stream", "lines", "gzip", "megatron")


def random_packing(draw: random.Random) -> dict[str, Any]:
    """Every method, and every overflow that stops no run."""
    boundaries = draw.choice(["document", "none"])
    return {
        "method": draw.choice(["best_fit", "concat", "pad"]),
        "overflow": draw.choice(["split", "truncate", "drop"]),
        "boundaries": boundaries,
        "align_tokens": draw.choice([8, 16]),
    } | ({"positions": draw.choice(["document", "sample"])} if draw.random() < 0.3 else {})


def is_cut_anew(packing: dict[str, Any]) -> bool:
    """Whether a document becomes several samples, so that shares cannot count documents."""
    return (packing["method"], packing["overflow"]) == ("pad", "split")


def random_balance(draw: random.Random) -> dict[str, Any]:
    """Every method by itself, and what it is judged by."""
    return {
        "method": draw.choice(["rows", "rows", "lpt", "karmarkar_karp", "zigzag", "none"]),
        "objective": draw.choice(["rows", "max", "rank", "pipeline"]),
        "microbatches": draw.choice(["unimodal", "descending", "keep"]),
        "model": dict(MODEL),
    }


def write_recipe(folder: Path, plain: dict[str, Any]) -> Path:
    """Write plain values as a recipe."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    return path


def write_mixture(draw: random.Random, folder: Path) -> Path:
    """A tree of `random_plain` over files: flats in flats, selections, cells, ramps, bounds, a schedule."""
    plain, sizes, views, _ = random_plain(draw)
    languages: dict[str, dict[int, str]] = {}
    if draw.random() < 0.5:
        more, more_sizes, more_views = copy.deepcopy(plain), dict(sizes), dict(views)
        group, cells = with_cells(draw, more, more_sizes, more_views)
        if group:
            plain, sizes = more, more_sizes
            for cell, rows in cells.items():
                [(name, held)] = rows.items()
                languages.setdefault(name, {}).update(dict.fromkeys(held, cell.rsplit("/", 1)[1]))
    plain["batch"] = _doubled(plain["batch"])
    plain["packing"] |= {"method": draw.choice(["best_fit", "concat", "pad"])}
    if draw.random() < 0.3:
        plain["packing"]["overflow"] = "drop"
    if draw.random() < 0.2 and not is_cut_anew(plain["packing"]):
        plain["unit"] = "documents"
    plain["balance"] = random_balance(draw)
    values = random.Random(draw.randrange(2**31))
    for name, one in sizes.items():
        kept = {row for view in views.values() if view.source == name for row in view.kept.tolist()}
        ids = [[values.randrange(1000) for _ in range(tokens)] for tokens in one.tokens.tolist()]
        table = {
            "ids": pa.array(ids, pa.list_(pa.int32())),
            "x": pa.array([int(row in kept) for row in range(len(ids))], pa.int32()),
            "lang": pa.array([languages.get(name, {}).get(row, "fr") for row in range(len(ids))], pa.string()),
        }
        pq.write_table(pa.table(table), folder / f"{name}.parquet", data_page_size=values.choice([256, 4096]))
        plain["sources"][name]["properties"] = ["x", "lang"]
    return write_recipe(folder, plain)


def _doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """With even numbers of samples, which several replicas can share."""
    samples = batch["samples"]
    if isinstance(samples, int):
        return {**batch, "samples": 2 * samples}
    return {**batch, "samples": [{**stage, "samples": 2 * stage["samples"]} for stage in samples]}


def write_formats(draw: random.Random, folder: Path) -> Path:
    """Sources of several formats and kinds of rows, side by side or with some in a group that shares by sizes."""
    sources: dict[str, Any] = {}
    streams: list[str] = []
    first = draw.choice(OF_ROWS)
    others = [kind for kind in KINDS if kind != first]
    for number, kind in enumerate([first, *draw.sample(others, draw.randint(2, 5))]):
        source, children = _write_source(draw, folder, f"{kind}{number}", kind)
        sources[f"{kind}{number}"] = source
        streams += [f"{kind}{number}/{child}" for child in children] or [f"{kind}{number}"]
    for name in draw.sample(sorted(sources), 1) if draw.random() < 0.3 else []:
        if name in streams:
            sources[name] |= {"max_epochs": 1, "on_exhausted": "renormalise"}
    mixture: dict[str, Any] = {name: draw.randint(1, 9) for name in streams}
    if len(streams) > 2 and draw.random() < 0.4:
        grouped = sorted(draw.sample(streams, 2))
        mixture = {name: share for name, share in mixture.items() if name not in grouped}
        mixture["group"] = {"share": 4, "proportional": 0.5, "children": grouped}
    length, samples = draw.choice([64, 96]), draw.choice([8, 16])
    ramp = [{"from_step": 0, "samples": samples}, {"from_step": 2, "samples": 2 * samples, "length": 2 * length}]
    packing = random_packing(draw)
    plain: dict[str, Any] = {
        "version": 1,
        "seed": draw.randrange(2**40),
        "batch": {"samples": draw.choice([samples, ramp]), "length": length},
        "sources": sources,
        "mixture": mixture,
        "packing": packing,
        "balance": random_balance(draw),
        "shuffle": {"method": draw.choice(["page", "row", "none"]), "window_pages": draw.choice([2, 256])},
    }
    if draw.random() < 0.3 and not is_cut_anew(packing):
        plain["unit"] = "documents"
    if draw.random() < 0.3:
        plain["split"] = [80, 20]
    if draw.random() < 0.3:
        items = {"items": "document", "scope": draw.choice(["step", "microbatch"]), "axis": draw.choice(["DP", "CP"])}
        plain["modules"] = {"tower": items}
    return write_recipe(folder, plain)


def _write_source(draw: random.Random, folder: Path, name: str, kind: str) -> tuple[dict[str, Any], list[str]]:
    """What a recipe says of a source, and its children if it is split."""
    seed, rows = draw.randrange(2**31), draw.randint(60, 400)
    ids = random_tokens(seed, rows, mean_tokens=draw.choice([9, 40, 150]))
    texts = random_texts(seed, rows, mean_words=draw.choice([3, 12]))
    choices: dict[str, Any] = {
        "codec": draw.choice(["none", "snappy", "zstd"]),
        "page_bytes": draw.choice([300, 2000]),
        "page_version": draw.choice(["1.0", "2.0"]),
        "dictionary": draw.random() < 0.5,
    }
    if kind in ("list", "reset"):
        make_tokens_file(folder / f"{name}.parquet", ids, **choices)
        found = {"path": f"{name}.parquet", "tokens": "input_ids"}
        return found | ({"reset_id": int(ids[-1][0]) if len(ids[-1]) else 1} if kind == "reset" else {}), []
    if kind in ("text", "map"):
        make_text_file(folder / f"{name}.parquet", texts, **choices)
        found = {"path": f"{name}.parquet", "text": "text", "tokenizer": "bytes"}
        if kind == "map":
            sys.modules.pop(MAPS, None)
            (folder / f"{MAPS}.py").write_text(FUNCTIONS, encoding="utf-8")
            function = draw.choice(["shout", "drawn", "letters"])
            found["map"] = f"{MAPS}:{function}"
            if function != "shout":  # gives ids
                del found["tokenizer"]
        return found, []
    if kind in ("cut", "folders"):
        halves = [slice(0, rows // 3), slice(rows // 3, rows)]
        for number, half in enumerate(halves):
            path = folder / name / "ab"[number] / "0.parquet"
            path.parent.mkdir(parents=True)
            scores = pa.array([(7919 * row) % 101 for row in range(rows)][half], pa.int32())
            held = {"ids": pa.array([list(map(int, row)) for row in ids[half]], pa.list_(pa.int32())), "score": scores}
            pq.write_table(pa.table(held), path, data_page_size=choices["page_bytes"])
        found = {"path": f"{name}/*/*.parquet", "tokens": "ids"}
        if kind == "folders":
            return {**found, "split_by": "dir"}, ["a", "b"]
        return {**found, "properties": ["score"], "split_by": {"column": "score", "quantiles": 2}}, ["q1", "q2"]
    if kind == "chat":
        chats = make_chats(seed, rows)
        return write_chats(folder, name, draw.choice(CONTAINERS), [chats[: rows // 2], chats[rows // 2 :]]), []
    if kind in ("arrow", "stream"):
        table = pa.table({"v": pa.array(ids, pa.list_(pa.int32()))})
        write_arrow(folder / f"{name}.arrow", table, stream=kind == "stream", batch_rows=70)
        return {"path": f"{name}.arrow", "tokens": "v"}, []
    if kind in ("lines", "gzip"):
        path = folder / f"{name}{'.jsonl' if kind == 'lines' else '.jsonl.gz'}"
        write_lines(path, json_lines(texts, "v", seed), mean_bytes=3000, at_lines=True, seed=seed)
        return {"path": path.name, "text": "v", "tokenizer": "bytes"}, []
    assert kind == "megatron"
    write_dataset(folder / name, [np.asarray(row, np.uint16) for row in ids], dtype="uint16")
    return {"path": f"{name}.bin"}, []


def write_images(draw: random.Random, folder: Path) -> Path:
    """Two sources of images in any container, and a module that computes them."""
    rule = draw.choice(sorted(RULES))
    containers = ["lists", "struct", "members", "webdataset", "jsonl", "paths", "obelics", "mmc4", "mmc4-shards"]
    packing = {
        "method": draw.choice(["best_fit", "pad"]),
        "overflow": draw.choice(["error", "drop"]),
        "boundaries": draw.choice(["document", "none"]),
        "positions": draw.choice(["document", "sample"]),
    }
    axis = draw.choice(["WORLD", "WORLD", "DP", "CP"])
    module: dict[str, Any] = {
        "items": "image",
        "sizes": "patches",
        "axis": axis,
        "method": draw.choice(["lpt", "karmarkar_karp", "zigzag"]),
        "scope": draw.choice(["step", "microbatch"]),
        "decode_at": draw.choice(["worker", "loader", *(["rank"] if axis == "WORLD" else [])]),
        "model": {"layers": 2, "hidden": 8, "ffn": 16, "heads": 2},
    }
    write_project(
        folder,
        draw.sample(containers, 2),
        rule=rule,
        seed=draw.randrange(2**40),
        packing=packing,
        balance=random_balance(draw),
        modules={"vision": module},
    )
    return folder / "recipe.yaml"
