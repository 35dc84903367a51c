"""The ledger of mixtures: trees, flats, selections, cells, ramps and run-outs over random recipes, as one JSON.

    python -m tests.trials.mixing --seed 1 --count 200 --out mixing.json

In: a seed and a number of recipes. Out: for each recipe how far it went; an AssertionError names the recipe that breaks
a promise. Must hold, of every stream: in each whole epoch every token of its rows comes once, and none of other rows;
what was asked of it in each step is its share of all that was asked, where the share is the mean of the schedule over
the step's tokens, worked out here from the recipe's text in fractions; what it gave is within half a piece of what was
asked; a state leads a new planner to the same next step. All of this holds together: ramps of shares and of the batch,
changes at an epoch, borders inside of a step, samples that become longer, cells, and streams that run out. Rows of
selections and cells are chosen here, and the shares of cells are fitted here, in floats. A run goes on where it
stopped. Cost: half a second a recipe.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from torchmix.catalog.sizes import SourceSizes, window_units_of_view
from torchmix.catalog.store import View
from torchmix.errors import SourceExhausted
from torchmix.planner.cursor import gone_by
from torchmix.planner.pack import Pieces
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.ramp import lengths_of
from torchmix.steps.cursor_state import cursor_of_state, state_of_cursor
from torchmix.steps.state import decode_state, encode_state

Given = dict[tuple[str, int], dict[tuple[str, int], list[tuple[int, int]]]]
"""Spans of tokens by (stream, epoch) and (source, row)."""
FINGERPRINT = "0123456789abcdef"
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
    draw: random.Random,
) -> tuple[dict[str, Any], dict[str, SourceSizes], dict[str, View], dict[str, Rows]]:
    """A recipe's plain values, the sizes of its sources, its views, and the rows of each stream."""
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
    overflow = draw.choice(["split", "truncate"])
    samples: Any = draw.randint(2, 12)
    if draw.random() < 0.5:
        samples = [
            {"from_step": 0, "samples": samples},
            {"from_step": draw.randint(1, 9), "samples": draw.randint(2, 12)},
        ]
        if overflow == "split" and draw.random() < 0.6:  # with truncate, what a row counts would change in an epoch
            samples[1]["length"] = LENGTH * draw.choice([2, 4])
            samples.append({"from_step": draw.randint(10, 25), "samples": draw.randint(2, 6), "length": 4 * LENGTH})
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
    if draw.random() < 0.6:
        begin = draw.randint(1, 9000)
        change: dict[str, Any] = {"from": f"{begin} tokens"}
        at_epoch = draw.random() < 0.3
        if at_epoch:
            change["from"] = {"epochs": 1, "of": draw.choice(streams)}
        if draw.random() < 0.6:
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


def shares_of_tree(tree: dict[str, Any], gone: set[str]) -> dict[str, Fraction]:
    """Exact shares of the streams, in which siblings have what ran out."""

    def has_any(name: str, value: Any) -> bool:
        if isinstance(value, dict) and "children" in value:
            return any(has_any(child, one) for child, one in value["children"].items())
        return name not in gone

    def share_out(children: dict[str, Any], whole: Fraction, into: dict[str, Fraction]) -> None:
        weights = {n: Fraction(v["share"] if isinstance(v, dict) else v) * has_any(n, v) for n, v in children.items()}
        total = sum(weights.values(), Fraction(0))
        for name, value in children.items():
            part = whole * weights[name] / total if total else Fraction(0)
            if isinstance(value, dict) and "children" in value:
                share_out(value["children"], part, into)
            else:
                into[name] = part

    found: dict[str, Fraction] = {}
    share_out(tree, Fraction(1), found)
    return found


def mean_shares(plain: dict[str, Any], start: int, stop: int, gone: set[str], begun: int | None) -> dict[str, Fraction]:
    """The mean of the schedule over tokens [start, stop), piece by piece of its straight lines.

    `begun`: where a change at an epoch has begun.
    """
    before = shares_of_tree(plain["mixture"], gone)
    if "schedule" not in plain:
        return before
    [change] = plain["schedule"]
    after = shares_of_tree(change["mixture"], gone)
    if isinstance(change["from"], dict):
        if begun is None:
            return before
        begin, end = begun, begun + int(change.get("to", "0 tokens").split()[0])
    else:
        begin = int(change["from"].split()[0])
        end = int(change.get("to", change["from"]).split()[0])
    edges = sorted({start, stop, *(place for place in (begin, end) if start < place < stop)})
    total = dict.fromkeys(before, Fraction(0))
    for low, high in pairwise(edges):
        middle = Fraction(low + high, 2)
        part = Fraction(0) if high <= begin else Fraction(1) if low >= end else (middle - begin) / (end - begin)
        for name in total:
            total[name] += (before[name] + (after[name] - before[name]) * part) * (high - low)
    return {name: value / (stop - start) for name, value in total.items()}


def note(
    pieces: Pieces, planner: Planner, into: dict[tuple[str, int], dict[tuple[str, int], list[tuple[int, int]]]]
) -> None:
    columns = (pieces.stream, pieces.source, pieces.epoch, pieces.row, pieces.start, pieces.tokens)
    for stream, source, epoch, row, start, tokens in zip(*(column.tolist() for column in columns), strict=True):
        spans = into[planner.streams[stream], epoch].setdefault((planner.sources[source], row), [])
        spans.append((start, start + tokens))


def check_ledger(
    given: Given,
    epochs: dict[str, int],
    rows: dict[str, Rows],
    counted: dict[str, list[int]],
) -> int:
    """No row comes twice, no other row comes, and whole epochs lose none; returns the number of whole epochs."""
    whole = 0
    for (stream, epoch), documents in given.items():
        for (source, row), spans in documents.items():
            assert row in rows[stream].get(source, set()), f"{stream} has no row {row} of {source}"
            ordered = sorted(spans)
            assert all(a[1] <= b[0] for a, b in pairwise(ordered)), f"{stream} {source} {row} twice"
            assert ordered[0][0] >= 0 and ordered[-1][1] <= counted[source][row]
        if epoch < epochs[stream]:
            whole += 1
            for source, held in rows[stream].items():
                for row in held:
                    tokens = sum(stop - start for start, stop in documents.get((source, row), []))
                    assert tokens == counted[source][row], f"{stream} lost tokens of row {row} of {source}"
    return whole


def try_recipe(seed: int, number: int, *, steps: int = 40) -> dict[str, Any]:
    """Check one recipe; what it was, and how far it went."""
    draw = random.Random(f"{seed}/{number}")
    plain, sizes, views, rows = random_plain(draw)
    without_cells = dict(plain)
    if draw.random() < 0.4:
        more_sizes, more_views = dict(sizes), dict(views)
        group, of_cells = with_cells(draw, more := copy.deepcopy(plain), more_sizes, more_views)
        if group:
            plain, sizes, views, rows = more, more_sizes, more_views, {**rows, **of_cells}
            without_cells = {**plain, "mixture": {**plain["mixture"], "talk": group}}
            if "schedule" in plain:
                [change] = plain["schedule"]
                without_cells["schedule"] = [{**change, "mixture": {**change["mixture"], "talk": group}}]
    part = part_of(check_recipe(plain), "train")
    prints = {name: f"{number:016x}" for number, name in enumerate([*sizes, *views])}

    def planner_of() -> Planner:
        return Planner(part, sizes, views=views, fingerprints=prints)

    planner = planner_of()
    assert list(planner.streams) == sorted(rows)
    cuts = part.packing.overflow == "truncate"
    counted = {name: [min(n, LENGTH) if cuts else n for n in one.tokens.tolist()] for name, one in sizes.items()}
    longest = {
        name: max(counted[source][row] for source, held in of_stream.items() for row in held)
        for name, of_stream in rows.items()
    }
    given: Given = defaultdict(dict)
    cursor, asked, drawn = planner.start(), dict.fromkeys(rows, 0), dict.fromkeys(rows, 0)
    consumed = resumed = 0
    begun: int | None = None
    place = plain["schedule"][0]["from"] if "schedule" in plain else ""
    at_epoch = place["of"] if isinstance(place, dict) else None
    for step in range(steps):
        before = gone_by(cursor.decisions)
        if begun is None and at_epoch is not None and cursor.position.epoch[planner.streams.index(at_epoch)] >= 1:
            begun = consumed
        try:
            plan, after = planner.step(cursor)
        except SourceExhausted:
            break
        if draw.random() < 0.15:
            state = decode_state(
                encode_state(state_of_cursor(cursor, planner, recipe=FINGERPRINT, catalog=FINGERPRINT)),
                recipe=FINGERPRINT,
            )
            other = planner_of()
            again = cursor_of_state(state, other, catalog=FINGERPRINT)
            assert again is not None and other.step(again)[0].order_digest == plan.order_digest, f"step {step}"
            resumed += 1
        note(plan.pieces, planner, given)
        all_asked, gone = int(plan.asked_tokens.sum()), gone_by(after.decisions)
        shares = mean_shares(without_cells, consumed, consumed + plan.capacity_tokens, set(before), begun)
        length = plan.capacity_tokens // plan.num_samples
        for s, name in enumerate(planner.streams):
            asked[name] += int(plan.asked_tokens[s])
            drawn[name] += int(plan.drawn_tokens[s])
            if gone == before:
                share = shares.get(name, Fraction(0))
                off = abs(int(plan.asked_tokens[s]) - share * all_asked)
                # Each stream is charged whole tokens: what is left over of all of them is less than one each.
                most = 1 + share * len(rows) + Fraction(len(rows) * all_asked, 2**32)
                assert off <= most, f"step {step}: {name} is off by {float(off)}"
            if name not in gone:
                assert 2 * abs(asked[name] - drawn[name]) <= min(length, longest[name]), f"step {step}: {name}"
        consumed += plan.capacity_tokens
        cursor = after
    note(cursor.pool, planner, given)
    epochs = dict(zip(planner.streams, cursor.position.epoch.tolist(), strict=True))
    whole = check_ledger(given, epochs, rows, counted)
    kinds = {
        "flats": sum(each.is_flat for each in part.streams.values()),
        "cells": sum(each.is_cell for each in part.streams.values()),
        "views": len(views),
        "lengths": len(lengths_of(part.batch)),
        "at_epoch": int(begun is not None),
    }
    return {"steps": cursor.step, "epochs": whole, "resumed": resumed, "gone": len(gone_by(cursor.decisions)), **kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for number in range(arguments.count):
        key = f"{arguments.seed}/{number}"
        if key not in found:
            try:
                found[key] = try_recipe(arguments.seed, number, steps=arguments.steps)
            except AssertionError as error:
                sys.exit(f"recipe {key}: {error}")
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
