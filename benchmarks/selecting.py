"""Selecting rows of a source by a query and drawing from them, beside the way of Mixtera.

    python benchmarks/selecting.py [--rows 1e7 1e8] [--quick]

A source of rows with a language, 1 of 4, and a quality, in memory; languages lie scattered, or in runs of 10,000 rows.
The query keeps German rows of the best 40 %. *Here* an expression makes a mask and the mask a view, 4 bytes a kept row;
a window of the view is made alone, at any place of the run. *Mixtera* is written again for this benchmark after its
paper (arXiv 2502.19790; an extended abstract says the same): a query with window functions makes intervals of
neighbouring kept rows with like properties, and chunks of 10,000 rows are cut off these by the mixture, one after
another. Its own code is not run, and fetching intervals into Python is counted, since chunks are cut there. The window
is as large as a chunk.
"""

from __future__ import annotations

import argparse
import time

import duckdb
import numpy as np
import pyarrow as pa

from torchmix.catalog.properties import kept_rows
from torchmix.catalog.sizes import SourceSizes, window_units_of_view
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.spaces import ViewSpace

LANGUAGES = ["en", "de", "fr", "sv"]
WHERE = "lang = 'de' and quality >= 0.6"
CHUNK_ROWS, PAGE_ROWS, RUN_ROWS = 10_000, 1000, 10_000
INTERVALS = f"""
    with kept as (select row, lang from rows where {WHERE}),
    numbered as (select row, lang, row - row_number() over (partition by lang order by row) as run from kept)
    select lang, min(row) as start, max(row) + 1 as stop from numbered group by lang, run order by start
"""


def make_table(num_rows: int, *, in_runs: bool) -> pa.Table:
    rng = np.random.default_rng(1)
    if in_runs:
        codes = np.repeat(rng.integers(0, 4, -(-num_rows // RUN_ROWS), np.int8), RUN_ROWS)[:num_rows]
    else:
        codes = rng.integers(0, 4, num_rows, np.int8)
    return pa.table(
        {
            "lang": pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(LANGUAGES)),
            "quality": pa.array(rng.random(num_rows, np.float32)),
        }
    )


def here(table: pa.Table) -> dict[str, float]:
    num_rows = len(table)
    first_row = np.append(np.arange(0, num_rows, PAGE_ROWS), num_rows)
    tokens = np.ones(num_rows, np.int32)
    sizes = SourceSizes(first_row_of_page=first_row, tokens=tokens, window_pages=CHUNK_ROWS // PAGE_ROWS)
    began = time.perf_counter()
    kept = np.flatnonzero(kept_rows(WHERE, table)).astype(np.uint32)
    queried = time.perf_counter()
    pages, window_pages = sizes.num_pages, sizes.window_pages
    units = window_units_of_view(num_pages=pages, num_rows=num_rows, num_kept=len(kept), window_pages=window_pages)
    order = StreamOrder("german", ViewSpace(0, sizes, kept, window_units=units), seed=1)
    given = [len(order.window(0, window).rows) for window in range(min(5, order.num_windows))]
    drawn = time.perf_counter()
    return {
        "kept": len(kept) / num_rows,
        "query_s": queried - began,
        "chunk_ms": 1e3 * (drawn - queried) / len(given),
        "mib": kept.nbytes / 2**20,
    }


def mixtera(table: pa.Table) -> dict[str, float]:
    rows = table.append_column("row", pa.array(np.arange(len(table))))
    began = time.perf_counter()
    with duckdb.connect() as database:
        database.register("rows", rows)
        found = database.execute(INTERVALS).fetchnumpy()
        by_key: dict[str, list[tuple[int, int]]] = {}
        for key, start, stop in zip(
            found["lang"].tolist(), found["start"].tolist(), found["stop"].tolist(), strict=True
        ):
            by_key.setdefault(key, []).append((start, stop))
    left = {key: intervals[::-1] for key, intervals in by_key.items()}
    queried = time.perf_counter()
    chunks = [cut_off(left["de"], CHUNK_ROWS) for _ in range(5)]
    drawn = time.perf_counter()
    num_intervals = sum(map(len, by_key.values()))
    return {
        "query_s": queried - began,
        "chunk_ms": 1e3 * (drawn - queried) / len(chunks),
        "mib": num_intervals * 16 / 2**20,
        "intervals": num_intervals,
    }


def cut_off(intervals: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The next rows, as intervals; the last is cut."""
    taken = []
    while count and intervals:
        start, stop = intervals.pop()
        if stop - start > count:
            intervals.append((start + count, stop))
            stop = start + count
        taken.append((start, stop))
        count -= stop - start
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, nargs="+", default=[1e7, 1e8])
    parser.add_argument("--quick", action="store_true", help="small numbers, to see that it runs")
    arguments = parser.parse_args()
    print(
        "rows | lie | kept | here: query s | window ms | view MiB | "
        "Mixtera's way: query s, over ours | chunk ms | intervals | MiB"
    )
    for num_rows in [1e5] if arguments.quick else arguments.rows:
        for in_runs in (False, True):
            table = make_table(int(num_rows), in_runs=in_runs)
            ours, other = here(table), mixtera(table)
            print(
                f"{int(num_rows):,} | {'in runs' if in_runs else 'scattered'} | {ours['kept']:.1%} | "
                f"{ours['query_s']:.2f} | {ours['chunk_ms']:.1f} | {ours['mib']:.0f} | "
                f"{other['query_s']:.2f}, {other['query_s'] / ours['query_s']:.1f} | {other['chunk_ms']:.1f} | "
                f"{other['intervals']:,} | {other['mib']:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
