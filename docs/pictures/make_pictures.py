"""The pictures of these pages, made from plans and from tables: `python docs/pictures/make_pictures.py [FOLDER]`.

In: the tables of docs/performance.md; a corpus of made-up lengths is written to a temporary folder. Out, in the folder
(default: this one): `road.svg`, the road of a step; `balance.svg`, the work of each rank in each microbatch;
`shares.svg`, shares asked and given; `runs_out.svg`, where sources end; `contexts.svg`, one context-parallel size and
planned ones; `figures.svg` and `memory.svg`, figures that were measured. Needs matplotlib for `balance.svg` alone.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
from svg import COLORS, GREY, INK, PALE, Canvas, chart

import torchmix
from torchmix.cli.plan.report import ReportNumbers, heat_maps
from torchmix.planner.balance import cost_model
from torchmix.planner.contexts import ContextPlan, RunCosts, in_order, place_in_contexts, planned
from torchmix.planner.graph.drawing import drawing_of

PERFORMANCE = Path(__file__).parents[1] / "performance.md"
LENGTH = 32_768
SOURCES = {  # documents, median and spread of their tokens, share
    "books": (150, 20_000, 0.8, "25%"),
    "chat": (4_000, 300, 0.7, "5%"),
    "code": (3_000, 1_500, 1.3, "25%"),
    "web": (9_000, 600, 1.0, "45%"),
}
MODEL = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}


def write_corpus(folder: Path) -> None:
    """A file of each source; all tokens are 0."""
    random = np.random.default_rng(0)
    for name, (count, median, spread, _) in SOURCES.items():
        lengths = np.clip(random.lognormal(np.log(median), spread, count), 8, 2 * LENGTH).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(int(offsets[-1]), np.int32)))
        pq.write_table(pa.table({"input_ids": tokens}), folder / f"{name}.parquet")


def recipe_of(samples: int) -> dict[str, object]:
    """The recipe of a batch of so many samples."""
    return {
        "version": 1,
        "seed": 3,
        "batch": {"samples": samples, "length": LENGTH},
        "sources": {name: {"path": f"{name}.parquet", "tokens": "input_ids"} for name in SOURCES},
        "mixture": {name: share for name, (*_, share) in SOURCES.items()},
        "balance": {"method": "rows", "model": MODEL},
    }


# --- What a run is given: shares over steps, and where sources end.

STEPS = 120
CHANGES = [
    {"from": "30 steps", "to": "60 steps", "set": {"code": "50%"}},
    {"from": "90 steps", "mixture": {"books": "40%", "code": "30%", "chat": "10%", "web": "20%"}},
]
WINDOW = 6
"""Steps that a share is taken over: a step of 8 samples holds few documents."""


def shares(data: Path) -> str:
    """Asked: the shares that the schedule says; given: of the tokens in the samples of some steps."""
    recipe = recipe_of(8) | {"schedule": CHANGES}
    plans = list(torchmix.plan(recipe, steps=STEPS, directory=data))
    asked = np.array([plan.asked_tokens for plan in plans], np.float64)
    given = np.array([plan.delivered_tokens for plan in plans], np.float64)
    lines: dict[str, Any] = {}
    for number, name in enumerate(plans[0].streams):
        for kind, table in (("asked", asked), ("given", given)):
            sums = table.reshape(-1, WINDOW, table.shape[1]).sum(axis=1)
            part = 100 * sums[:, number] / sums.sum(axis=1)
            at = (np.arange(len(part)) + 0.5) * WINDOW
            name_of_line = name if kind == "given" else f" {name}"
            color, dashes = (COLORS[number], "") if kind == "given" else (INK, "5 4")
            lines[name_of_line] = (at.tolist(), part.tolist(), color, dashes)
    marks = [(30, "a ramp begins"), (60, "ends"), (90, "a new mixture")]
    return str(
        chart(
            "Shares of four datasets: given (colors), and asked by the recipe (dashes)",
            lines,
            alt="Shares of four sources over 120 steps: what is given lies on what the schedule asks",
            across="step",
            up="% of the tokens",
            top=60,
            marks=marks,
        )
    )


def runs_out(data: Path) -> str:
    """Epochs of each source over a run in which two sources may be read once, and twice."""
    recipe = recipe_of(8)
    sources = recipe["sources"]
    assert isinstance(sources, dict)
    for name, most in (("chat", 1), ("books", 2)):
        sources[name] = sources[name] | {"max_epochs": most, "on_exhausted": "renormalise"}
    plans = list(torchmix.plan(recipe, steps=160, directory=data))
    drawn = np.array([plan.drawn_tokens for plan in plans], np.float64).cumsum(axis=0)
    lines: dict[str, Any] = {}
    marks = []
    for number, name in enumerate(plans[0].streams):
        epochs = drawn[:, number] / tokens_of(data, name)
        lines[name] = (list(range(len(plans))), epochs.tolist(), COLORS[number], "")
        last = int(np.flatnonzero(np.diff(drawn[:, number], prepend=0))[-1])
        if last < len(plans) - WINDOW:
            marks.append((last, f"{name} ends"))
    return str(
        chart(
            "How often each dataset was gone through; chat may be read once and books twice",
            lines,
            alt="Epochs of four sources over 160 steps; two end, and the others take their shares",
            across="step",
            up="epochs",
            top=4,
            marks=marks,
        )
    )


def tokens_of(data: Path, name: str) -> int:
    """Tokens of a source of `write_corpus`."""
    [column] = pq.read_table(data / f"{name}.parquet").columns
    return len(column.combine_chunks().values)


# --- Runs of ranks: one size for all documents, and a size for each microbatch.

NUM_RANKS, RANK_TOKENS, LONGEST = 32, 32_768, 262_144


def contexts() -> str:
    """Two schedules of the same documents: rectangles are ranks that share documents."""
    model = torchmix.Model(**MODEL)
    cost = cost_model(model, boundaries="document")
    random = np.random.default_rng(4)
    tokens = np.clip(random.lognormal(np.log(6_000), 1.4, 320), 256, LONGEST).astype(np.int64)
    costs = RunCosts(
        per_token=cost.per_token,
        per_pair=cost.per_pair,
        per_exchanged=cost.per_token // 128,
        per_microbatch=0,
        rank_tokens=RANK_TOKENS,
        align=1,
        sizes=(1, 2, 4, 8, 16, 32),
        num_ranks=NUM_RANKS,
    )
    smallest = next(size for size in costs.sizes if costs.holds(int(tokens.max()), size))
    as_they_come = planned(in_order(tokens, costs), tokens, costs)
    fixed = place_in_contexts(tokens, msgspec.structs.replace(costs, sizes=(smallest,)))[0]
    dynamic = place_in_contexts(tokens, costs)[0]
    ours = time_of(dynamic)
    canvas = Canvas(760, 372, alt="Ranks that share documents: one fixed size, and sizes planned for each microbatch")
    what = f"{len(tokens)} documents of {tokens.min():,} to {tokens.max():,} tokens on {NUM_RANKS} ranks"
    canvas.text(16, 22, what, bold=True)
    for number, (title, plan) in enumerate(
        (
            (f"cp {smallest}, as they come", as_they_come),
            (f"cp {smallest}, planned", fixed),
            ("sizes planned", dynamic),
        )
    ):
        x = 16 + 246 * number
        canvas.text(x, 48, f"{title}: {time_of(plan) / ours:.2f}", bold=True, size=12)
        draw_runs(canvas, plan, x, 60, 236 / max(time_of(as_they_come), time_of(fixed)), 270)
    last = (
        "up: ranks; across: time, microbatch after microbatch; a rectangle is a run of ranks that share documents;",
        "pale is waiting. Numbers are times over that of the third. Colors: 1 rank (pale) to many (dark).",
    )
    for number, line in enumerate(last):
        canvas.text(16, 350 + 15 * number, line, size=11)
    return str(canvas)


def time_of(plan: ContextPlan) -> float:
    """Cost of a step in which all ranks meet in each microbatch."""
    return float(plan.load_of_ranks(NUM_RANKS).max(axis=1).sum())


def draw_runs(canvas: Canvas, plan: ContextPlan, x: float, y: float, scale: float, height: float) -> None:
    """Bins of a step as rectangles, as wide as they take; all schedules have one scale."""
    row = height / NUM_RANKS
    starts = np.concatenate([[0], np.cumsum(plan.load_of_ranks(NUM_RANKS).max(axis=1))]) * scale
    canvas.rect(x, y, float(starts[-1]), height, "#eceef4")
    for number in range(len(plan.size_of_bin)):
        size, first = int(plan.size_of_bin[number]), int(plan.first_rank_of_bin[number])
        left, wide = x + float(starts[plan.microbatch_of_bin[number]]), float(plan.load_of_bin[number]) * scale
        color = {1: "#c9d6f5", 2: "#9db7ee", 4: "#6d93e3", 8: "#3f69c8", 16: "#27458c", 32: "#16284f"}[size]
        canvas.rect(left, y + first * row, max(wide - 0.4, 0.4), size * row - 0.8, color, tip=f"{size} ranks")
    for start in starts[1:].tolist():
        canvas.line([(x + start, y - 2), (x + start, y + height + 2)], INK, width=0.7)


# --- Figures that were measured: tables of docs/performance.md.


def table(marker: str) -> list[list[str]]:
    """Cells of the rows of a marked table."""
    text = PERFORMANCE.read_text(encoding="utf-8")
    part = text.partition(f"<!-- {marker} -->")[2].partition("<!-- end -->")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def figures() -> str:
    """Bars from 1, which is the other, to torchmix's ratio; to the right is better."""
    rows = table("figures")
    left, right, first, step = 368, 736, 74, 46
    canvas = Canvas(
        810,
        first + step * len(rows) + 26,
        alt=" ".join(f"{what}, beside {other}: {ratio}." for what, other, ratio, *_ in rows),
    )
    lowest, highest = 0.4, 250.0

    def place(value: float) -> float:
        return left + (right - left) * math.log(value / lowest) / math.log(highest / lowest)

    canvas.text(16, 22, "torchmix beside others, on two shared CPU cores", bold=True)
    for value, words in ((0.5, "half"), (1, "equal"), (2, "2 x"), (5, "5 x"), (20, "20 x"), (100, "100 x as good")):
        canvas.line(
            [(place(value), first - 18), (place(value), first + step * len(rows) - 8)],
            INK if value == 1 else PALE,
            width=1,
        )
        canvas.text(place(value), first - 24, words, color=GREY, at="middle", size=11)
    for number, (what, other, ratio, good, *_) in enumerate(rows):
        y = first + step * number
        canvas.text(16, y + 3, what.replace("`", ""), size=12)
        canvas.text(16, y + 18, f"beside {other}", color=GREY, size=11)
        ends = sorted(float(value) if good == "more" else 1 / float(value) for value in re.findall(r"[\d.]+", ratio))
        color = "#3f69c8" if ends[0] >= 1 else "#c2410c"
        near, far = (ends[0], ends[-1]) if ends[0] >= 1 else (ends[-1], ends[0])
        for value, shade in ((far, "#b9c8ee" if ends[0] >= 1 else "#f3c1a5"), (near, color)):
            begin, end = sorted((place(1), place(value)))
            canvas.rect(begin, y - 8, end - begin, 18, shade)
        canvas.text(max(place(1), place(far)) + 6, y + 6, f"{ratio} x", color=color, bold=True, size=12)
    return str(canvas)


def memory() -> str:
    """Memory of eight ranks above their imports, over sources, from two tables."""
    bars = [
        (
            f"{sources} Parquet sources",
            {
                "torchmix": "torchmix, one worker",
                "dataloader": "torch DataLoader, 2 workers a rank",
                "stateful": "torchdata StatefulDataLoader, 2 a rank",
            }[name],
            float(value),
        )
        for sources, name, _, value, *_ in table("benchmark node_memory 1")
    ]
    names = {"w0": "no workers", "w2": "2 workers a rank", "w1": "a worker a replica"}
    for sources, name, _, _, value, *_ in table("benchmark megatron_memory"):
        maker, workers = name.rsplit(" ", 1)
        bars.append((f"{sources} .bin", f"{maker}, {names[workers]}", float(value)))
    canvas = Canvas(
        760,
        60 + 26 * len(bars) + 18 * len({title for title, *_ in bars}),
        alt="Memory of eight ranks above their imports",
    )
    canvas.text(16, 22, "Memory of 8 ranks above their imports, MiB", bold=True)
    y, last = 40, ""
    most = max(value for *_, value in bars)
    for title, name, value in bars:
        if title != last:
            y, last = y + 18, title
            canvas.text(16, y, title, bold=True, size=12)
            y += 8
        canvas.text(28, y + 13, name, size=12)
        color = "#3f69c8" if name.startswith("torchmix") else "#9aa0ae"
        canvas.rect(290, y + 2, max(390 * value / most, 1), 15, color)
        canvas.text(296 + 390 * value / most, y + 14, f"{value:,.0f}", size=12, bold=True)
        y += 22
    return str(canvas)


def main(folder: Path) -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary)
        write_corpus(data)
        torchmix.index(recipe_of(8), directory=data)
        small = next(torchmix.plan(recipe_of(8), steps=1, dp=4, directory=data))
        # Its costliest microbatch has few pieces, and so the clearest picture.
        counts = np.bincount(small.placement.microbatch_of_sample[small.sample])
        (folder / "road.svg").write_text(drawing_of(small, int(counts.argmin())), encoding="utf-8")
        large = next(torchmix.plan(recipe_of(512), steps=1, dp=64, directory=data))
        model = torchmix.Model(**MODEL)
        numbers = ReportNumbers(cost_model(model, boundaries="document"), LENGTH)
        numbers.add(large)
        step = numbers.values()["shown_step"]
        drawn = heat_maps(
            step["hash_order"], step["plan"], rows="data-parallel rank", columns="microbatch", columns_wait=True
        )
        made = {"balance": drawn, "shares": shares(data), "runs_out": runs_out(data)}
    made |= {"contexts": contexts(), "figures": figures(), "memory": memory()}
    for name, text in made.items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
