"""Documents longer than a sample: shares step by step, borders of many sources, and pages decoded for books.

    python benchmarks/long_documents.py                # all three
    python benchmarks/long_documents.py --only books   # or: shares, borders

`shares`: a source of 30 % with documents of 34,000 tokens, steps of 512 tokens; what it has given after 5, 10, 20 and
50 steps. `borders`: 300 equal sources of equal documents, so that all reach their windows' borders in the same step;
milliseconds a step. `books`: 40 sources of books of 20,000 to 400,000 tokens, one to a page, read by the loader; tokens
decoded over tokens delivered, by the size of the cache. Files are written once, into a temporary folder.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.catalog.sizes import SourceSizes
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.planner.planner import Planner
from torchmix.recipe.load import check_recipe, load_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Batch, Packing, Recipe, Source
from torchmix.stateful.open import build_loader


def sizes_of(tokens: np.ndarray, rows_per_page: int = 20, window_pages: int = 64) -> SourceSizes:
    first_row = np.append(np.arange(0, len(tokens), rows_per_page), len(tokens)).astype(np.int64)
    return SourceSizes(first_row_of_page=first_row, tokens=tokens.astype(np.int32), window_pages=window_pages)


def planner_of(shares: dict[str, str], sizes: dict[str, SourceSizes], samples: int, length: int) -> Planner:
    recipe = Recipe(
        version=1,
        seed=1,
        batch=Batch(samples=samples, length=length),
        sources={name: Source(path="none", tokens="ids") for name in shares},
        mixture=shares,
        packing=Packing(method="best_fit"),
    )
    return Planner(part_of(check_recipe(recipe), "train"), sizes)


def measure_shares() -> None:
    rng = np.random.default_rng(1)
    sizes = {"long": sizes_of(np.full(400, 34_000)), "web": sizes_of(20 + 500 * rng.random(20_000) ** 3)}
    planner = planner_of({"long": "30%", "web": "70%"}, sizes, 4, 128)
    cursor, given, found = planner.start(), np.zeros(2, np.int64), []
    for step in range(1, 51):
        plan, cursor = planner.step(cursor)
        given += plan.delivered_tokens
        if step in (5, 10, 20, 50):
            found.append(f"{100 * given[0] / given.sum():.1f}")
    print("steps | 5 | 10 | 20 | 50 | pieces in the pool")
    print(f"share of the source of 30 %, % | {' | '.join(found)} | {len(cursor.pool)}", flush=True)


def measure_borders(num_sources: int = 300) -> None:
    print("windows an epoch | median ms | p95 ms | longest ms | first step ms")
    names = [f"source-{s:03d}" for s in range(num_sources)]
    for num_windows in (1, 4):
        rows = 8_000
        sizes = {name: sizes_of(np.full(rows, 700), 20, rows // 20 // num_windows) for name in names}
        shares = dict.fromkeys(names, f"{100 / num_sources:.8f}%")
        shares[names[0]] = f"{100 - (num_sources - 1) * float(shares[names[1]][:-1]):.8f}%"
        planner = planner_of(shares, sizes, 4096, 8192)
        cursor, taken = planner.start(), []
        for _ in range(120):
            began = time.perf_counter()
            cursor = planner.skip(cursor)
            taken.append((time.perf_counter() - began) * 1e3)
        median, p95 = np.percentile(taken[1:], [50, 95])
        print(f"{num_windows} | {median:.1f} | {p95:.1f} | {max(taken[1:]):.1f} | {taken[0]:.0f}", flush=True)


def write_books(folder: Path, num_sources: int) -> None:
    rng = np.random.default_rng(1)
    for s in range(num_sources):
        lengths = np.exp(rng.uniform(np.log(20_000), np.log(400_000), 8)).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = rng.integers(0, 50_000, int(lengths.sum())).astype(np.int32)
        table = pa.table({"ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})
        pq.write_table(
            table, folder / f"books-{s:02d}.parquet", compression="none", data_page_size=1, write_batch_size=1
        )


def measure_books(steps: int, num_sources: int = 40) -> None:
    print("\n`read.cache` | decoded over delivered | pages decoded")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_books(folder, num_sources)
        sources = "\n".join(f"  b{s:02d}: {{path: books-{s:02d}.parquet, tokens: ids}}" for s in range(num_sources))
        mixture = ", ".join(f"b{s:02d}: {100 / num_sources}%" for s in range(num_sources))
        for cache in ("1GiB", "32MiB", "1MiB"):
            recipe = folder / "recipe.yaml"
            recipe.write_text(
                f"version: 1\nseed: 1\nbatch: {{samples: 64, length: 4096}}\nsources:\n{sources}\n"
                f"mixture: {{{mixture}}}\npacking: {{method: best_fit}}\nread: {{cache: {cache}}}\n"
            )
            index_recipe(load_recipe(recipe), folder)
            with build_loader(
                recipe, topology=Topology(), loaders="in_process", max_steps=steps, micro_batch_size=8
            ) as loader:
                for _ in loader:
                    pass
                stats = loader.stats()
            over = stats["bytes_decoded"] / stats["bytes_served"]
            print(f"{cache} | {over:.2f} | {stats['pages_decoded']:,}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("shares", "borders", "books"))
    parser.add_argument("--steps", type=int, default=100, help="of the loader of books")
    options = parser.parse_args()
    if options.only in (None, "shares"):
        measure_shares()
    if options.only in (None, "borders"):
        measure_borders()
    if options.only in (None, "books"):
        measure_books(options.steps)


if __name__ == "__main__":
    main()
