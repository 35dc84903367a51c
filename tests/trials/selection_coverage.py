"""What streams give in a pass, over random recipes with selections, children, flats, hold-outs and splits, as JSON.

    python -m tests.trials.selection_coverage --seed 1 --count 200 --out coverage.json

In: a seed and a number of recipes. Out: for each recipe what was compared. Must hold: in one pass over a part each
stream gives each of its rows exactly once, whole, and nothing else. Which rows these are is worked out here from the
values of the files, by Python and without the package. A recipe in which a stream has no rows is refused. A run goes on
where it stopped. Cost: half a second a recipe.
"""

from __future__ import annotations

import hashlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

from tests.support.selections import make_rows, write_rows
from tests.support.trial import continued, trial_parser
from torchmix.errors import PlanError, RecipeError
from torchmix.indexing.scan import index
from torchmix.planner.plans import plan

Row = dict[str, Any]
TESTS: list[tuple[str, Callable[[Row], bool | None]]] = [
    ("lang = 'de'", lambda row: row["lang"] == "de"),
    ("lang <> 'de'", lambda row: None if row["lang"] is None else row["lang"] != "de"),
    ("lang is null", lambda row: row["lang"] is None),
    ("quality >= 0.5", lambda row: None if row["quality"] is None else row["quality"] >= 0.5),
    ("not (quality >= 0.9)", lambda row: None if row["quality"] is None else row["quality"] < 0.9),
    ("quality is null or lang = 'fr'", lambda row: row["quality"] is None or row["lang"] == "fr"),
    ("tokens > 25 and lang in ('de', 'en')", lambda row: len(row["ids"]) > 25 and row["lang"] in ("de", "en")),
    ("shard = '1'", lambda row: row["shard"] == "1"),
    ("url like '%7%'", lambda row: "7" in row["url"]),
]
PARTS = ("train", "validation", "test")


def hash_of(text: str) -> float:
    """Where a row stands between 0 and 1."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def make_recipe(draw: random.Random, folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """A random recipe over one source of one to four files, and its rows."""
    rows: list[Row] = []
    by_id, cut = draw.random() < 0.5, draw.choice(["dir", "quantiles", None])
    for number in range(draw.randint(1, 4)):
        name = f"{'ab'[number // 2]}/{number}.parquet"
        count = draw.randint(1, 150)
        write_rows(folder / "web" / name, len(rows), count)
        for place, row in enumerate(make_rows(len(rows), count).to_pylist()):
            hashed = hash_of(row["url"] if by_id else f"{name}:{place}")
            rows.append({**row, "shard": str(number), "dir": name[0], "hash": hashed})
    web: dict[str, Any] = {"path": "web/*/*.parquet", "tokens": "ids"}
    web["properties"] = {name: name for name in ("lang", "quality", "url")} | {"shard": {"path": r"/(\d)\.parquet"}}
    web |= {"id": "url"} if by_id else {}
    sources: dict[str, Any] = {"web": web}
    names = ["web"] if draw.random() < 0.6 else []
    for number, (text, _) in enumerate(draw.sample(TESTS, draw.randint(0 if names else 1, 3))):
        sources[f"s{number}"] = {"from": "web", "where": text} | draw.choice([{}, {}, {"overlap": "allow"}])
        names.append(f"s{number}")
    if cut == "dir":
        web["split_by"] = "dir"
        names += draw.sample([f"web/{one}" for one in sorted({row["dir"] for row in rows})], 1)
    elif cut == "quantiles":
        web["split_by"] = {"column": "quality", "quantiles": 3}
        names += draw.sample(["web/q1", "web/q2", "web/q3"], draw.randint(1, 3))
    half = len(names) // 2
    mixture: dict[str, Any] = dict.fromkeys(names, 1)
    if half:
        group = {"share": 3, **draw.choice([{"children": dict.fromkeys(names[:half], 2)}, {"flat": names[:half]}])}
        mixture = {"group": group, **dict.fromkeys(names[half:], 1)}
        for name in group.get("flat", ()):  # a flat has each row once
            sources.get(name, {}).pop("overlap", None)
    held = {part: {"web": f"{draw.choice([1, 10, 40])}%"} for part in PARTS[1:] if draw.random() < 0.6}
    split = {"split": [draw.choice([1, 3]), 1]} if not held and draw.random() < 0.5 else {}
    recipe = {
        "version": 1,
        "seed": draw.randrange(1 << 30),
        "batch": {"samples": 4, "length": draw.choice([16, 64])},
        "packing": {"align_tokens": 1, "method": draw.choice(["best_fit", "concat"])},
        "shuffle": {"window_pages": draw.choice([1, 3, 256])},
        "sources": sources,
        "mixture": mixture,
        **({"hold_out": held} if held else split),
    }
    return recipe, rows


def streams_of(recipe: dict[str, Any], rows: list[Row]) -> dict[str, set[int]] | None:
    """The rows of each stream before rows are held out; None where one has none."""
    sources, named = recipe["sources"], dict(recipe["mixture"])
    group = named.pop("group", {})
    named |= dict.fromkeys(group.get("children", group.get("flat", ())))
    found: dict[str, set[int]] = {}
    for name in named:
        if name == "web":
            found[name] = set(range(len(rows)))
        elif name in sources:
            test = dict(TESTS)[sources[name]["where"]]
            found[name] = {number for number, row in enumerate(rows) if test(row)}
        elif sources["web"]["split_by"] == "dir":
            found[name] = {number for number, row in enumerate(rows) if row["dir"] == name[-1]}
        else:
            with_value = [number for number, row in enumerate(rows) if row["quality"] is not None]
            ranked = sorted(with_value, key=lambda number: (rows[number]["quality"], number))
            child = int(name[-1])
            found[name] = set(ranked[len(ranked) * (child - 1) // 3 : len(ranked) * child // 3])
    allow = {name for name in found if sources.get(name, {}).get("overlap") == "allow"}
    order = sorted(found, key=lambda name: (len(found[name]), name == "web", name))
    left = {
        name: found[name].difference(*(found[other] for other in order[:at] if not {name, other} & allow))
        for at, name in enumerate(order)
    }
    return left if all(left.values()) and all(found.values()) else None


def parts_of(recipe: dict[str, Any], rows: list[Row]) -> dict[str, set[int]]:
    """The rows that each part has, of all."""
    if "split" in recipe:
        border = round(recipe["split"][0] / sum(recipe["split"]) * len(rows))
        return {"train": set(range(border)), "validation": set(range(border, len(rows)))}
    held = recipe.get("hold_out", {})
    low, high = (float(held.get(part, {"web": "0%"})["web"][:-1]) / 100 for part in PARTS[1:])
    bands = {"train": (low, 1 - high), "validation": (0.0, low), "test": (1 - high, 1.0)}
    return {
        part: {number for number, row in enumerate(rows) if bands[part][0] <= row["hash"] < bands[part][1]}
        for part in ("train", *held)
    }


def given(path: Path, part: str) -> dict[str, Counter[int]]:
    """Tokens of each row that each stream gives in one pass."""
    found: dict[str, Counter[int]] = {}
    for step in plan(path, part=part, one_pass=True):
        new = step.pieces
        assert not new.epoch.any(), "one epoch"
        for stream, row, tokens in zip(new.stream.tolist(), new.row.tolist(), new.tokens.tolist(), strict=True):
            found.setdefault(step.streams[stream], Counter())[row] += tokens
    return found


def try_recipe(seed: int, number: int) -> dict[str, Any]:
    """Plan one pass of each part of a recipe, and compare."""
    draw = random.Random(f"{seed}/{number}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe, rows = make_recipe(draw, folder)
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        assert sum(pq.read_metadata(file).num_rows for file in folder.rglob("*.parquet")) == len(rows)
        streams, parts = streams_of(recipe, rows), parts_of(recipe, rows)
        held_all = "split" not in recipe and not all(of & parts["train"] for of in (streams or {}).values())
        flat = recipe["mixture"].get("group", {}).get("flat", ())
        if streams is not None and flat and not held_all:
            streams["group"] = set().union(*(streams.pop(name) for name in flat))
        expected = {
            part: {
                stream: {row: len(rows[row]["ids"]) for row in of_stream & of_part}
                for stream, of_stream in (streams or {}).items()
            }
            for part, of_part in parts.items()
        }
        if streams is None or held_all:
            try:
                index(path)
            except RecipeError as error:
                return {"refused": error.message}
            raise AssertionError(f"recipe {seed}/{number}: a stream without rows was not refused")
        index(path)
        counts = {}
        for part, of_part in expected.items():
            if not all(of_part.values()):
                try:
                    given(path, part)
                except PlanError:
                    counts[part] = 0
                    continue
                raise AssertionError(f"recipe {seed}/{number}: {part} was planned with an empty stream")
            found = given(path, part)
            assert found == of_part, f"recipe {seed}/{number}: {part}"
            counts[part] = sum(map(len, of_part.values()))
        return {"streams": len(streams), "rows": counts}


def main() -> None:
    """Try the recipes that are not in the file yet."""
    done = continued(trial_parser(__doc__, count=200).parse_args(), try_recipe)
    refused = sum("refused" in one for one in done.values())
    print(f"{len(done)} recipes, {refused} refused", file=sys.stderr)


if __name__ == "__main__":
    main()
