"""Random recipes of mixtures for trials: trees, flats, selections, cells, ramps, bounds; no files.

In: a random generator. Out: plain values of a recipe, the sizes of its sources, its views, and which rows each stream
has. Must hold: one state of the generator gives one recipe; rows of selections and cells are chosen here, and the
shares of cells are fitted here, in floats. Cost: milliseconds.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np

from torchmix.catalog.sizes import SourceSizes, window_units_of_view
from torchmix.catalog.store import View

LENGTH = 64
Rows = dict[str, set[int]]
"""Rows of each source."""


def random_sizes(draw: random.Random) -> SourceSizes:
    pages = [draw.randint(1, draw.choice([1, 5, 40])) for _ in range(draw.choice([1, 2, 9, 40]))]
    first = np.concatenate([[0], np.cumsum(pages)]).astype(np.int64)
    tokens = [
        draw.choice([0, draw.randint(1, 30), draw.randint(1, 30), draw.randint(1, 300)]) for _ in range(sum(pages))
    ]
    tokens[draw.randrange(len(tokens))] = 20
    return SourceSizes(first_row_of_page=first, tokens=np.array(tokens, np.int32), window_pages=draw.choice([1, 3, 8]))


def random_view(draw: random.Random, source: str, sizes: SourceSizes) -> View:
    count = max(1, sizes.num_documents // draw.choice([2, 10, 100]))
    start = draw.randrange(sizes.num_documents - count + 1)
    rows = draw.sample(range(sizes.num_documents), count) if draw.random() < 0.6 else range(start, start + count)
    kept = np.array(sorted({*rows, int(np.argmax(sizes.tokens == 20))}), np.uint32)
    units = window_units_of_view(
        num_pages=sizes.num_pages,
        num_rows=sizes.num_documents,
        num_kept=len(kept),
        window_pages=sizes.window_pages,
    )
    tokens = sizes.tokens[kept]
    return View(
        source=source,
        kept=kept,
        window_units=units,
        fingerprint=f"{draw.getrandbits(64):016x}",
        longest_tokens=int(tokens.max()),
        num_tokens=int(tokens.sum()),
    )


def random_tree(draw: random.Random, names: list[str], depth: int = 0) -> dict[str, Any]:
    """Children with ratios; some are groups."""
    children: dict[str, Any] = {}
    left = list(names)
    while left:
        count = draw.randint(1, len(left))
        some, left = left[:count], left[count:]
        if depth < 2 and len(some) > 1 and draw.random() < 0.6:
            group = f"g{depth}{len(left)}"
            children[group] = {"share": draw.randint(1, 9), "children": random_tree(draw, some, depth + 1)}
        else:
            children |= {name: draw.randint(1, 9) for name in some}
    return children


def with_flats(tree: dict[str, Any], flats: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found[name] = {**value, "children": with_flats(value["children"], flats)}
        else:
            found[name] = {"share": value, **flats[name]} if name in flats else value
    return found


def random_plain(
    draw: random.Random, *, everything: bool = False
) -> tuple[dict[str, Any], dict[str, SourceSizes], dict[str, View], dict[str, Rows]]:
    """A recipe's plain values, the sizes of its sources, its views, and the rows of each stream.

    With `everything` shares go along a ramp, the batch has stages of more samples and of longer ones, and a stream may
    run out.
    """

    def chance(part: float) -> bool:
        return draw.random() < part or everything

    sizes = {f"s{number}": random_sizes(draw) for number in range(draw.randint(1, 5))}
    sources: dict[str, Any] = {name: {"path": f"{name}.parquet", "tokens": "ids"} for name in sizes}
    views: dict[str, View] = {}
    rows: dict[str, Rows] = {name: {name: set(range(one.num_documents))} for name, one in sizes.items()}
    for name in list(sizes):
        if draw.random() < 0.4:
            views[f"v{name}"] = view = random_view(draw, name, sizes[name])
            sources[f"v{name}"] = {"from": name, "where": "x = 1", "overlap": "allow"}
            rows[f"v{name}"] = {name: set(view.kept.tolist())}
    flats: dict[str, Any] = {}
    members = draw.sample(sorted(rows), draw.randint(1, len(rows)))
    in_flats: set[str] = set()
    while members and draw.random() < 0.7:
        count = draw.randint(1, len(members))
        some, members = members[:count], members[count:]
        if len({next(iter(rows[name])) for name in some}) < len(some):
            continue  # a selection and its source would have rows twice
        inner = draw.randint(0, len(some))  # some members stand in a flat inside the flat
        flats[f"f{len(flats)}"] = {"flat": [*some[:inner], {"flat": some[inner:]}] if inner < len(some) else some}
        in_flats.update(some)
        joined: Rows = defaultdict(set)
        for name in some:
            for source, held in rows[name].items():
                joined[source] |= held
        rows[f"f{len(flats) - 1}"] = joined
    leaves = [name for name in sources if name not in in_flats or draw.random() < 0.3]
    streams = sorted([*leaves, *flats])
    for name in streams:
        if draw.random() < 0.3:
            holder = flats[name] if name in flats else sources[name]
            holder |= {"max_epochs": draw.randint(1, 3), "on_exhausted": "renormalise"}
    for name in in_flats:
        if name not in leaves:
            sources[name].pop("max_epochs", None)
    tree = random_tree(draw, draw.sample(streams, len(streams)))
    if everything:
        bounded = draw.choice(streams)
        (flats[bounded] if bounded in flats else sources[bounded]).update(max_epochs=1, on_exhausted="renormalise")
    overflow = "split" if everything else draw.choice(["split", "truncate"])
    samples: Any = draw.randint(2, 12)
    if chance(0.5):
        samples = [
            {"from_step": 0, "samples": samples},
            {"from_step": draw.randint(1, 9), "samples": draw.randint(2, 12)},
        ]
        if chance(0.6):
            samples[1]["length"] = LENGTH * draw.choice([2, 4])
            samples.append(
                {
                    "from_step": draw.randint(10, 25),
                    "samples": draw.randint(2, 6),
                    "length": draw.choice([1, 4]) * LENGTH,
                }
            )
    plain: dict[str, Any] = {
        "version": 1,
        "seed": draw.randrange(2**40),
        "batch": {"samples": samples, "length": LENGTH},
        "sources": sources,
        "mixture": with_flats(tree, flats),
        "packing": {
            "method": draw.choice(["best_fit", "concat"]),
            "overflow": overflow,
            "align_tokens": 8,
        },
        "shuffle": {"method": draw.choice(["page", "page", "row", "none"]), "window_pages": draw.choice([2, 8])},
    }
    if chance(0.6):
        begin = draw.randint(1, 9000)
        change: dict[str, Any] = {"from": f"{begin} tokens"}
        at_epoch = draw.random() < 0.3 and not everything
        if at_epoch:
            change["from"] = {"epochs": 1, "of": draw.choice(streams)}
        if chance(0.6):
            change["to"] = f"{draw.randint(1, 9000) + (0 if at_epoch else begin)} tokens"
        shuffled = random_tree(draw, draw.sample(streams, len(streams)))
        plain["schedule"] = [{**change, "mixture": with_flats(shuffled, flats)}]
    return plain, sizes, views, {name: rows[name] for name in streams}


def with_cells(
    draw: random.Random, plain: dict[str, Any], sizes: dict[str, SourceSizes], views: dict[str, View]
) -> tuple[dict[str, Any], dict[str, Rows]]:
    """Give a recipe a group of cells over two more sources.

    Returns:
        The group as a tree of streams with the fitted shares, and the rows of each cell.
    """
    rows: dict[str, Rows] = {}
    tokens = np.zeros((2, 2))
    shares = {"source": {"c0": draw.randint(1, 9), "c1": draw.randint(1, 9)}}
    shares["lang"] = {"de": draw.randint(1, 9), "en": draw.randint(1, 9)}
    for number, name in enumerate(("c0", "c1")):
        sizes[name] = one = random_sizes(draw)
        plain["sources"][name] = {"path": f"{name}.parquet", "tokens": "ids", "properties": ["lang"]}
        languages = np.array([draw.choice(["de", "en", "fr"]) for _ in one.tokens])
        full = np.flatnonzero(one.tokens == 20)
        languages[full[: len(full) // 2 + 1]] = "de"
        for column, value in enumerate(("de", "en")):
            kept = np.flatnonzero(languages == value).astype(np.uint32)
            tokens[number, column] = one.tokens[kept].sum()
            rows[f"talk/{name}/{value}"] = {name: set(kept.tolist())}
            views[f"talk/{name}/{value}"] = View(
                source=name,
                kept=kept,
                window_units=draw.choice([1, 5]),
                fingerprint=f"{draw.getrandbits(64):016x}",
                longest_tokens=int(one.tokens[kept].max(initial=0)),
                num_tokens=int(tokens[number, column]),
            )
    for number in (0, 1):  # no cell without tokens: the shares would contradict each other
        if not tokens[number].all():
            return {}, {}
    wanted = [np.array(list(each.values())) / sum(each.values()) for each in shares.values()]
    fitted = tokens / tokens.sum()
    for _ in range(3000):
        fitted *= (wanted[0] / fitted.sum(axis=1))[:, None]
        fitted *= wanted[1] / fitted.sum(axis=0)
    share = draw.randint(1, 9)
    plain["mixture"]["talk"] = {"share": share, "cells": {"of": ["c0", "c1"], "shares": shares}}
    for change in plain.get("schedule", ()):
        change["mixture"]["talk"] = plain["mixture"]["talk"]
    return {"share": share, "children": dict(zip(rows, map(float, fitted.reshape(-1)), strict=True))}, rows
