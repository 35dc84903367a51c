"""Mixtures: what a ramp costs, how far from its shares a run is, and what selecting rows costs.

    python benchmarks/mixtures.py [--quick]

Synthetic sizes, no files. *Ramp*: each step is planned with constant shares and with shares on a ramp, one after the
other, so other work on the machine meets both; `x constant` is the ratio of lower quartiles. *Error*: half the sum,
over 306 sources with shares as 1/n, of how far the part of the tokens that each has given is from its share, after n
documents; *unseen*: sources that have given nothing. Rivals are simulated in numpy by their rule, document by document,
and count documents: a random choice by weight (Hugging Face `interleave_datasets`, LitData), and the most owed source
(Grain; Megatron's blend does so with samples, which have one length). Documents vary about the mean of their source,
which is the same for all (`equal`), or from 200 to 8,000 tokens (`mixed`). *Select*: an expression over two properties
of each row, and the next window of the view, against that of the whole source.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import pyarrow as pa

from torchmix.catalog.properties import kept_rows
from torchmix.catalog.sizes import SourceSizes, window_units_of_view
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.spaces import SourceSpace, ViewSpace
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of

SOURCES = 306


def make_sizes(mean: int, salt: int, num_documents: int = 20_000) -> SourceSizes:
    rng = np.random.default_rng(salt)
    tokens = np.maximum(1, (mean * rng.lognormal(-0.3, 0.8, num_documents)).astype(np.int32))
    first_row = np.append(np.arange(0, num_documents, 100), num_documents)
    return SourceSizes(first_row_of_page=first_row, tokens=tokens, window_pages=64)


def means(mixed: bool = True) -> list[int]:
    if not mixed:
        return [2000] * SOURCES
    order = np.random.default_rng(5).permutation(SOURCES)
    return [int(200 * 40 ** (k / (SOURCES - 1))) for k in order]


def make_planner(samples: int, *, ramp: bool, mixed: bool = True) -> Planner:
    names = [f"source-{s:03d}" for s in range(SOURCES)]
    start = {name: 1 / (s + 1) for s, name in enumerate(names)}
    recipe: dict[str, Any] = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": samples, "length": 8192},
        "sources": {name: {"path": "none", "tokens": "ids"} for name in names},
        "mixture": start,
    }
    if ramp:
        end = {**start, names[0]: 0.9}  # nearly the same sources are drawn from
        recipe["schedule"] = [{"from": "0 steps", "to": "100000 steps", "mixture": end}]
    sizes = {name: make_sizes(mean, s) for s, (name, mean) in enumerate(zip(names, means(mixed), strict=True))}
    return Planner(part_of(check_recipe(recipe), "train"), sizes)


def ramp_table(steps: int) -> None:
    print("samples x length | constant, CPU ms | ramp, CPU ms | x constant")
    for samples in (512, 4096):
        planners = [make_planner(samples, ramp=ramp) for ramp in (False, True)]
        cursors = [planner.start() for planner in planners]
        taken: list[list[float]] = [[], []]
        for _ in range(steps):
            for i, planner in enumerate(planners):
                began = time.thread_time()
                _, cursors[i] = planner.step(cursors[i])
                taken[i].append(1e3 * (time.thread_time() - began))
        constant, ramp = (float(np.percentile(each[3:], 25)) for each in taken)
        print(f"{samples} x 8192 | {constant:.2f} | {ramp:.2f} | {ramp / constant:.3f}", flush=True)


def error_of(tokens: np.ndarray, shares: np.ndarray) -> tuple[float, int]:
    return float(np.abs(tokens / tokens.sum() - shares).sum() / 2), int((tokens == 0).sum())


def ours(counts: list[int], *, mixed: bool) -> list[tuple[float, int]]:
    planner = make_planner(64, ramp=False, mixed=mixed)
    cursor, tokens, documents, found = planner.start(), np.zeros(SOURCES), 0, []
    shares = planner.shares((), step=0) / 2**32
    left = list(counts)
    while left:
        plan, cursor = planner.step(cursor)
        tokens += plan.drawn_tokens
        documents += int((plan.pieces.start == 0).sum())
        if documents >= left[0]:
            left.pop(0)
            found.append(error_of(tokens, shares))
    return found


def rival(counts: list[int], *, random: bool, mixed: bool) -> list[tuple[float, int]]:
    shares = 1 / np.arange(1, SOURCES + 1)
    shares /= shares.sum()
    rng = np.random.default_rng(3)
    lengths = [make_sizes(mean, s).tokens for s, mean in enumerate(means(mixed))]
    if random:
        chosen = rng.choice(SOURCES, max(counts), p=shares)
    else:
        chosen, given = np.empty(max(counts), np.int64), np.zeros(SOURCES)
        for n in range(max(counts)):
            chosen[n] = s = int(np.argmax(shares * (n + 1) - given))
            given[s] += 1
    tokens = np.empty(len(chosen))
    for s in range(SOURCES):
        mine = np.flatnonzero(chosen == s)
        tokens[mine] = rng.choice(lengths[s], len(mine))
    return [error_of(np.bincount(chosen[:n], tokens[:n], SOURCES), shares) for n in counts]


def error_table(counts: list[int]) -> None:
    print("lengths | documents | this: error | unseen | random choice: error | unseen | most owed: error | unseen")
    for mixed in (False, True):
        rivals = [rival(counts, random=random, mixed=mixed) for random in (True, False)]
        for n, *results in zip(counts, ours(counts, mixed=mixed), *rivals, strict=True):
            cells = " | ".join(f"{error:.4f} | {unseen}" for error, unseen in results)
            print(f"{'mixed' if mixed else 'equal'} | {n:,} | {cells}", flush=True)


def select_table(num_rows: int) -> None:
    rng = np.random.default_rng(1)
    table = pa.table(
        {
            "lang": pa.array(np.array(["en", "de", "fr", "sv"])[rng.integers(0, 4, num_rows)]),
            "quality": pa.array(rng.random(num_rows)),
        }
    )
    first_row = np.append(np.arange(0, num_rows, 1000), num_rows)
    sizes = SourceSizes(
        first_row_of_page=first_row, tokens=rng.integers(1, 2000, num_rows).astype(np.int32), window_pages=64
    )
    whole = StreamOrder("s", SourceSpace(0, sizes), seed=1)
    print("rows | kept | select, CPU s | M rows a CPU-second | window of the view, CPU ms | of the source, CPU ms")
    for where in ("lang = 'de' and quality >= 0.6", "lang = 'de' and quality >= 0.96"):
        began = time.process_time()
        kept = np.flatnonzero(kept_rows(where, table)).astype(np.int32)
        select_s = time.process_time() - began
        units = window_units_of_view(
            num_pages=sizes.num_pages, num_rows=num_rows, num_kept=len(kept), window_pages=sizes.window_pages
        )
        view = StreamOrder("v", ViewSpace(0, sizes, kept, window_units=units), seed=1)
        taken = []
        for order in (view, whole):
            began = time.process_time()
            windows = range(min(5, order.num_windows))
            for window in windows:
                order.window(0, window)
            taken.append((time.process_time() - began) / len(windows) * 1e3)
        part = len(kept) / num_rows
        print(
            f"{num_rows:,} | {part:.1%} | {select_s:.2f} | {num_rows / select_s / 1e6:.1f} | {taken[0]:.1f} | "
            f"{taken[1]:.1f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that it runs")
    arguments = parser.parse_args()
    ramp_table(6 if arguments.quick else 120)
    print()
    error_table([1000] if arguments.quick else [1000, 10_000, 100_000])
    print()
    select_table(100_000 if arguments.quick else 10_000_000)


if __name__ == "__main__":
    main()
