"""Trial: encoders of images, videos and sounds beside texts, balanced by planning alone, from 8 to 1,152 ranks.

    python -m tests.trials.encoder_balance --seed 1 --count 24

A case is a mixture of four kinds in shares that the seed draws, packed and placed by the planner over 8, 64, 288 or
1,152 ranks, with 1 or 8 ranks a replica. Sizes of items follow from drawn measures by the rules of the kinds. The
slowest rank of each encoder is at most 1.05 of the lower bound at 1,152 ranks. Beside it stand items encoded where
their texts are, and what crosses the network: rows and their gradients in 2 bytes; where a job loads first and balances
then, units in 2 bytes, too. No file is read. A run that is started again goes on where it stopped.

The distributions are generators. Nobody has published percentiles of such sets, so their parameters are assumptions:
photographs, clips, speech and texts have log-normal sizes, see `DRAWN`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from tests.support.trial import continued, trial_parser
from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes, TokenRuns
from torchmix.modalities.modality import Modality
from torchmix.modalities.table import open_modality
from torchmix.parallel.place_tree import Layout
from torchmix.planner.methods import lpt
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.planner.planner import Planner
from torchmix.recipe.items import items_of
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe

RANKS = (8, 64, 288, 1152)
REPLICA = (1, 8)
"""Ranks of a replica, by TP."""
LENGTH, STEPS = 16_384, 2
SAMPLES_OF_RANK = {1: 4, 8: 2}
WIDTH = 3584
"""Of the backbone: an encoder's rows."""
MOST = 1.05
"""Most of the bound at the most ranks."""
ENCODERS = {
    "image": {"layers": 32, "hidden": 1280, "ffn": 3420, "mlp": "swiglu", "heads": 16, "patch": 14, "merge": 2},
    "video": {"layers": 32, "hidden": 1280, "ffn": 5120, "heads": 16, "patch": 14, "merge": 2},
    "sound": {"layers": 32, "hidden": 1280, "ffn": 5120, "heads": 20},
}
"""Qwen2.5-VL's without its windows, Qwen2-VL's, and Whisper large-v3's."""
OPTIONS: dict[str, dict[str, Any]] = {
    "image": {"patch": 14, "merge": 2, "min_pixels": 3_136, "max_pixels": 1_003_520},
    "video": {"rate": 2, "most_frames": 64, "max_pixels": 200_704, "most_seconds": 1_800},
    "sound": {"rule": "qwen2_audio", "mels": 128},
}
SIZES = {"image": "patches", "video": "patches", "sound": "positions"}
UNIT_COPIES = {"image": 2, "video": 1, "sound": 1}
"""How often a processor's output has a value: a still image has its frame twice."""
DRAWN = {"image": (520, 0.5), "video": (12, 0.8), "sound": (20, 1.0), "text": (600, 1.0), "caption": (60, 0.8)}
"""Median and sigma: pixels of the shorter side, seconds, seconds, tokens, tokens beside an item."""
FRAME_SIDES = ((640, 360), (1280, 720), (360, 640), (480, 480))


HEAD = (
    "ranks",
    "kind",
    "cases",
    "items a rank",
    "slowest / bound, worst",
    "above 1.05",
    "where the text is, worst",
    "bytes moved / loading first",
)


def drawn(rng: np.random.Generator, what: str, count: int, least: float, most: float) -> np.ndarray:
    """Log-normal values of `DRAWN` within bounds."""
    middle, sigma = DRAWN[what]
    return np.clip(rng.lognormal(np.log(middle), sigma, count), least, most)


def measures_of(rng: np.random.Generator, kind: str, count: int) -> dict[str, Int64Array]:
    """What headers of items would say."""
    if kind == "image":
        side = drawn(rng, "image", count, 56, 4_000)
        wide = side * np.exp(np.abs(rng.normal(0, 0.3, count)))
        return {"width": wide.astype(np.int64), "height": side.astype(np.int64)}
    if kind == "video":
        seconds = drawn(rng, "video", count, 0.5, 300)
        sides = np.array(FRAME_SIDES)[rng.integers(0, len(FRAME_SIDES), count)]
        frames = np.maximum(1, seconds * rng.choice([24, 25, 30], count)).astype(np.int64)
        return {
            "frames": frames,
            "milliseconds": (1000 * seconds).astype(np.int64),
            "width": sides[:, 0],
            "height": sides[:, 1],
        }
    samples = (16_000 * drawn(rng, "sound", count, 0.5, 600)).astype(np.int64)
    return {"samples": samples, "rate": np.full(count, 16_000), "channels": np.ones(count, np.int64)}


def sizes_of(rng: np.random.Generator, modality: Modality | None, tokens: int) -> SourceSizes:
    """Documents of some tokens together, an item each before their captions; texts alone without a kind."""
    count = 256
    while True:
        table = None
        if modality is None:
            lengths = drawn(rng, "text", count, 8, LENGTH).astype(np.int64)
        else:
            found = modality.sizes(measures_of(rng, modality.kind, count))
            lengths = found.tokens + drawn(rng, "caption", count, 4, 1_000).astype(np.int64)
            assert int(lengths.max()) <= LENGTH, "no document is cut"
            table = TokenRuns(
                first_run_of_row=np.arange(count + 1),
                offset=np.zeros(count, np.int32),
                tokens=found.tokens.astype(np.int32),
                sizes={name: column.astype(np.int32) for name, column in found.columns.items()},
            )
        if int(lengths.sum()) >= tokens:
            break
        count = int(count * max(1.5, 1.1 * tokens / int(lengths.sum())))
    first_row = np.append(np.arange(0, count, 64), count)
    items = {} if table is None or modality is None else {modality.kind: table}
    return SourceSizes(first_row_of_page=first_row, tokens=lengths.astype(np.int32), window_pages=64, items=items)


def recipe_of(rng: np.random.Generator, samples: int) -> Recipe:
    """Four sources with shares of 5 % or more each."""
    parts = 0.05 + 0.8 * rng.dirichlet([2, 2, 2, 2])
    shares = np.floor(100 * parts).astype(int)
    shares[0] += 100 - shares.sum()
    names = ("text", *ENCODERS)
    sources: dict[str, Any] = {name: {"path": "none", "text": "text", "tokenizer": "bytes"} for name in names}
    for number, kind in enumerate(ENCODERS):
        words = {"column": "item", "token": 300 + number, **OPTIONS[kind]}
        sources[kind] |= {"images": words} if kind == "image" else {"items": {kind: words}}
    modules = {
        f"{kind}_encoder": {"items": kind, "sizes": SIZES[kind], "near_text": "1%", "model": {**model, "out": WIDTH}}
        for kind, model in ENCODERS.items()
    }
    told = {"version": 1, "seed": int(rng.integers(1 << 30)), "batch": {"samples": samples, "length": LENGTH}}
    mixture = {name: f"{share}%" for name, share in zip(names, shares.tolist(), strict=True)}
    return check_recipe(told | {"sources": sources, "mixture": mixture, "modules": modules})


def judged(plan: StepPlan, name: str, placed: ItemPlan, modality: Modality) -> dict[str, float]:
    """What one encoder does in a step."""
    items, cost, ranks = placed.items, placed.cost_of_item, placed.num_consumers
    of_replica = ranks // plan.layout.dp
    home = plan.placement.dp_rank_of_sample[items.sample]
    at_home = home * of_replica + np.arange(len(items)) % of_replica
    after = lpt(cost, ranks)
    row_bytes = 2 * 2 * WIDTH
    unit_bytes = 2 * modality.unit_values * UNIT_COPIES[modality.kind]
    moved = after != at_home
    first_bytes = int(items.tokens[moved].sum()) * row_bytes + int(items.size[moved].sum()) * unit_bytes
    slowest_at_home = int(np.bincount(at_home, cost, ranks).max())
    return {
        "items": len(items),
        "over_bound": placed.balance.ratio,
        "at_home_over_bound": slowest_at_home / placed.balance.lower_bound,
        "bytes": plan.rows_that_travel(name) * row_bytes,
        "loading_first_bytes": first_bytes,
        "left_text": placed.balance.left_text,
    }


def try_case(seed: int, number: int) -> dict[str, Any]:
    """One case: what each encoder does, in the mean of the steps, and at worst."""
    rng = np.random.default_rng([seed, number])
    ranks, replica = RANKS[number % len(RANKS)], REPLICA[number // len(RANKS) % len(REPLICA)]
    samples = ranks * SAMPLES_OF_RANK[replica]
    recipe = recipe_of(rng, samples)
    kinds = {name: open_modality(name, words) for name in ENCODERS for words in items_of(recipe.sources[name]).values()}
    tokens = STEPS * samples * LENGTH
    sizes = {
        name: sizes_of(rng, kinds.get(name), tokens * int(str(share).rstrip("%")) // 100 + 20 * LENGTH)
        for name, share in recipe.mixture.items()
    }
    planner = Planner(part_of(recipe, "train"), sizes, Layout(dp=ranks // replica, tp=replica))
    cursor, found, taken = planner.start(), [], []
    for _ in range(STEPS):
        began = time.thread_time()
        plan, cursor = planner.step(cursor)
        taken.append(1000 * (time.thread_time() - began))
        found.append(
            {
                name.removesuffix("_encoder"): judged(plan, name, placed, kinds[name.removesuffix("_encoder")])
                for name, placed in plan.item_modules.items()
            }
        )
    worst = {kind: max(step[kind]["over_bound"] for step in found) for kind in ENCODERS}
    for step in found:
        for kind, one in step.items():
            assert one["over_bound"] <= MOST or ranks < RANKS[-1], (ranks, replica, kind, one)
    return {
        "ranks": ranks,
        "of_replica": replica,
        "shares": dict(recipe.mixture),
        "plan_ms": round(median(taken), 1),
        "kinds": {
            kind: {key: round(float(np.mean([step[kind][key] for step in found])), 4) for key in found[0][kind]}
            for kind in ENCODERS
        },
        "worst": round(max(worst.values()), 4),
    }


def table_of(found: Mapping[str, Any]) -> str:
    """By ranks and kind: the worst of all cases, how many are above `MOST`, and the means of what moves."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for ranks in RANKS:
        cases = [one for one in found.values() if one["ranks"] == ranks]
        for kind in ENCODERS if cases else ():
            of_kind = [one["kinds"][kind] for one in cases]
            moved = sum(one["bytes"] for one in of_kind) / max(1, sum(one["loading_first_bytes"] for one in of_kind))
            worst, home = (max(one[key] for one in of_kind) for key in ("over_bound", "at_home_over_bound"))
            above = sum(one["over_bound"] > MOST for one in of_kind)
            least, most = (pick(one["items"] / ranks for one in of_kind) for pick in (min, max))
            items = f"{least:.1f} to {most:.1f}"
            lines.append(
                f"| {ranks} | {kind} | {len(cases)} | {items} | {worst:.3f} | {above} | {home:.2f} | {moved:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    asked = trial_parser(__doc__, count=24, out="encoder_balance.json").parse_args()
    print(table_of(continued(asked, try_case)))


if __name__ == "__main__":
    main()
