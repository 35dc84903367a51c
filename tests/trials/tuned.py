"""`torchmix tune` on four corpora of unlike lengths: what it proposes, on steps that it has not seen, as one JSON.

    python -m tests.trials.tuned --seed 1 --count 20 --out tuned.json [--measure]

In: a seed and a number of jobs, each of one of four corpora (texts of like length, texts of any length, chats beside
books, texts with images), of random sizes, and of random keys of balance. Out: what was proposed, and the gain that it
predicts, beside the gain on the steps behind those that it tried; with `--measure` the gain by the processor's time of
a small transformer, too, whose cost `torchmix calibrate` has fitted before. Must hold: the times of the proposal are
those of `torchmix plan --simulate` once the recipe has it; the order digest stays; on later steps it is not slower than
today's recipe by more than the part that steps differ by. A run goes on where it stopped. Cost: about a second a job,
with `--measure` a minute.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from tests.support.example import example_module
from tests.support.files import make_tokens_file
from tests.support.image_sources import make_rows, write_source
from tests.support.trial import continued, trial_parser
from torchmix.catalog.store import open_part
from torchmix.cli.main import main as torchmix_main
from torchmix.parallel.place_tree import Layout
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import open_planner
from torchmix.planner.simulation import bins_of, times_of_meeting
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of

CORPORA = ("alike", "any", "chats_and_books", "images")
LENGTH, MEASURED_LENGTH = 512, 1024
"""Tokens of a sample; longer ones are measured, in which attention takes most of the time."""
TRIED, LATER = 6, 12
"""Steps that tune sees, and steps behind them."""
WORSE = 0.01
"""A proposal may be slower than today's recipe by this part on later steps: other documents came."""
MODEL = {"layers": 4, "hidden": 64, "ffn": 192, "heads": 4, "kv_heads": 4, "vocab": 512}
TOWER = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "patch": 4, "merge": 2, "out": 64}


def lengths_of(kind: str, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Tokens of documents."""
    if kind == "alike":
        return rng.integers(2 * length // 5, 3 * length // 5, rows)
    if kind == "any":
        return np.clip(rng.lognormal(np.log(length / 6), 1.4, rows), 4, 3 * length).astype(np.int64)
    books = rng.integers(length // 2, length + 1, rows)
    return np.where(rng.random(rows) < 0.9, rng.integers(length // 64, length // 8, rows), books)


def write_corpus(kind: str, seed: int, folder: Path, length: int, rows: int = 1200) -> dict[str, Any]:
    """Files of a corpus; what a recipe says of its sources, mixture and modules."""
    rng = np.random.default_rng(seed)
    if kind == "images":
        rows_of_files = [make_rows(seed + number, rows // 40) for number in range(2)]
        source = write_source(folder, "pictures", "parquet", rows_of_files, "dynamic")
        module = {"items": "image", "sizes": "patches", "model": TOWER}
        return {"sources": {"pictures": source}, "mixture": {"pictures": "100%"}, "modules": {"vision": module}}
    documents = [rng.integers(0, 500, count).tolist() for count in lengths_of(kind, rng, rows, length).tolist()]
    make_tokens_file(folder / "texts.parquet", documents)
    return {"sources": {"texts": {"path": "texts.parquet", "tokens": "input_ids"}}, "mixture": {"texts": "100%"}}


def asked(*words: str) -> dict[str, Any]:
    """What a verb prints for a program."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = torchmix_main([*words, "--json"])
    found: dict[str, Any] = json.loads(printed.getvalue())
    assert code == 0, found
    return found


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A recipe with the keys that are proposed."""
    return old | {
        key: merged(old.get(key) or {}, value) if isinstance(value, dict) else value for key, value in new.items()
    }


def try_job(seed: int, number: int, *, measure: bool = False) -> dict[str, Any]:
    """One job: what is proposed, and what came of it."""
    draw = random.Random(f"{seed} {number}")
    kind = CORPORA[number % len(CORPORA)]
    dp, tp, pp = draw.choice([2, 4] if measure else [2, 4, 8]), draw.choice([1, 2]), draw.choice([1, 1, 2])
    size, meet = 1 if measure else draw.choice([1, 2]), draw.choice(["step", "microbatch"])
    keys: dict[str, Any] = draw.choice(
        [
            {"method": "none"},
            {"method": "rows"},
            {"method": "lpt", "level": "bucket"},
            {"method": "karmarkar_karp", "level": "bin", "objective": "max"},
            {"method": "zigzag", "microbatches": "descending", "group_size": 2},
        ]
    )
    samples = dp * size * 2 * (2 if measure else draw.choice([2, 4]))
    length = MEASURED_LENGTH if measure else LENGTH
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe: dict[str, Any] = {
            "version": 1,
            "seed": draw.randrange(1000),
            "batch": {"samples": samples, "length": length},
            "balance": {"model": MODEL, **keys},
            **write_corpus(kind, draw.randrange(1 << 30), folder, length),
        }
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        asked("index", str(path))
        if measure and kind != "images":
            recipe = calibrated(path, recipe, samples)
        job = ["--dp", str(dp), "--tp", str(tp), "--pp", str(pp)]
        sizes = ["--try-micro-batch-sizes", "1"] if measure else []
        words = ["--steps", str(TRIED), "--meet", meet, "--micro-batch-size", str(size), *sizes]
        found = asked("tune", str(path), *job, *words)
        best = found["best"][0]
        new_size = found["change"].get("job", {}).get("micro_batch_size", size)
        times: dict[str, list[float]] = {}
        digests: dict[str, list[str]] = {}
        change = {room: value for room, value in found["change"].items() if room != "job"}
        for name, values, micro in (("today", recipe, size), ("best", merged(recipe, change), new_size)):
            path.write_text(yaml.safe_dump(values), encoding="utf-8")
            for start, steps in ((0, TRIED), (TRIED, LATER)):
                plan = asked(
                    *("plan", str(path), "--simulate", *job, "--micro-batch-size", str(micro)),
                    *("--start", str(start), "--steps", str(steps)),
                )
                one = plan["simulation"]["orders"]["this plan"]["at_end" if meet == "step" else "each_microbatch"]
                times.setdefault(name, []).append(one["over_ideal"])
                digests.setdefault(name, []).append(plan["order_digest"])
                times.setdefault(f"{name} modules", []).extend(
                    module["plan_over_ideal"] for module in plan["simulation"]["modules"].values()
                )
        assert digests["today"] == digests["best"], "the order has changed"
        if kind != "images":
            planned = times["today"][0] / times["best"][0] - 1
            assert abs(planned - best["gain"]) < 1e-9, (planned, best["gain"])
        later = times["today"][1] / times["best"][1] - 1
        assert later > -WORSE, (later, found["change"])
        for before, after in zip(times["today modules"], times["best modules"], strict=True):
            assert after <= before * (1 + WORSE), (before, after)
        told = {"corpus": kind, "keys": keys, "dp": dp, "pp": pp, "meet": meet, "change": found["change"]}
        told |= {"predicted": round(best["gain"], 5), "later": round(later, 5)}
        if measure and kind != "images":
            told["measured"] = round(
                measured(folder, recipe, change, Layout(dp=dp, micro_batch_size=1, pp=pp), meet), 5
            )
        return told


# --- By the processor's time.


def plans_of(path: Path, layout: Layout, start: int, stop: int) -> list[StepPlan]:
    """Steps of a recipe."""
    recipe = load_recipe(path)
    part = part_of(recipe, "train")
    planner = open_planner(part, open_part(path.parent / recipe.catalog, part), layout)
    cursor, found = planner.start(), []
    while cursor.step < stop:
        plan, cursor = planner.step(cursor)
        found.append(plan)
    return found[start:]


def segments_of(plan: StepPlan) -> list[list[int]]:
    """Tokens of the documents of each sample, and its padding, which is a segment of its own."""
    found: list[list[int]] = [[] for _ in range(plan.num_samples)]
    for sample, tokens in zip(plan.sample.tolist(), plan.pieces.tokens.tolist(), strict=True):
        found[sample].append(tokens)
    for lengths in found:
        lengths += [plan.length - sum(lengths)] if sum(lengths) < plan.length else []
    return found


def nanoseconds_of(samples: list[list[int]], rounds: int = 3) -> np.ndarray:
    """int64 [n] nanoseconds of the processor for forward and backward of each sample: the least of several rounds."""
    torch.set_num_threads(1)
    tiny_gpt = example_module("tiny_gpt", Path(__file__).parents[2] / "examples" / "ddp")
    model = tiny_gpt.TinyGPT(
        vocab=MODEL["vocab"], length=MEASURED_LENGTH, hidden=MODEL["hidden"], layers=MODEL["layers"]
    )
    tokens = torch.zeros((1, MEASURED_LENGTH), dtype=torch.int64)
    found = np.zeros((rounds, len(samples)), np.int64)
    for turn in range(rounds):
        for number, lengths in enumerate(samples):
            ends = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
            begin = time.process_time_ns()
            model(tokens, tokens, ends).sum().backward()
            found[turn, number] = time.process_time_ns() - begin
    least: np.ndarray = found.min(axis=0)
    return least


def calibrated(path: Path, recipe: dict[str, Any], samples: int) -> dict[str, Any]:
    """The recipe with the cost that `torchmix calibrate` fits."""
    segments = [lengths for plan in plans_of(path, Layout(), 0, -(-16 // samples)) for lengths in segments_of(plan)]
    timings = path.with_name("timings.csv")
    with timings.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["lengths", "seconds"])
        for lengths, spent in zip(segments, nanoseconds_of(segments).tolist(), strict=True):
            rows.writerow([" ".join(map(str, lengths)), spent / 1e9])
    fitted = asked("calibrate", str(path), str(timings))
    recipe = merged(recipe, {"balance": {"cost": {name: fitted[name] for name in ("per_token", "per_pair")}}})
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return recipe


def measured(folder: Path, recipe: dict[str, Any], change: dict[str, Any], layout: Layout, meet: str) -> float:
    """The gain on two later steps, where each sample takes what it was measured to take."""
    path, times = folder / "recipe.yaml", []
    spent: list[np.ndarray] = []
    for values in (recipe, merged(recipe, change)):
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        plans = plans_of(path, layout, TRIED, TRIED + 2)
        spent = spent or [nanoseconds_of(segments_of(plan)) for plan in plans]
        pairs = zip(plans, spent, strict=True)
        both = [times_of_meeting(bins_of(each, plan.placement, layout), layout.pp) for plan, each in pairs]
        times.append(sum(each[meet == "microbatch"] for each in both))
    return times[0] / times[1] - 1


def main() -> None:
    parser = trial_parser(__doc__, count=20)
    parser.add_argument("--measure", action="store_true", help="beside the gain that a small transformer has")
    words = parser.parse_args()

    def one(seed: int, number: int) -> dict[str, Any]:
        return try_job(seed, number, measure=words.measure)

    found = continued(words, one, label=" measured" if words.measure else "")
    for key, each in found.items():
        print(key, json.dumps({name: each.get(name) for name in ("corpus", "predicted", "later", "measured")}))


if __name__ == "__main__":
    main()
