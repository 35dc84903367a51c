"""Shuffle quality: how alike the rows of a batch are, under each way to shuffle a file that is sorted by topic.

    python benchmarks/shuffle_quality.py [--rows 640000] [--seeds 3] [--quick]

No data is read: a shuffle is an order of row numbers. The file has runs of 2,000 rows of one topic; a batch has 512
rows. Against a full shuffle stand what people use: a streaming buffer of 10,000 rows in file order, and the aggressive
buffer of Youmu (algorithm 2 of its paper: random pages are put into a buffer of 10,000 rows as soon as one fits).

    same page    pairs of rows of a batch that lie in one page, in percent
    same topic   pairs that lie in one run, in percent
    variance     of a batch's mean of a number that each topic has, over that of independent rows; 1 is ideal
    law          same page as r/W predicts it for a window of W rows and pages of r rows (r/2B for a buffer of B rows)

The second table: one source over several files is shuffled as if they were one. Which files meet in neighbouring
places is counted and compared with independent rows by chi-square over its degrees of freedom; 1 is expected.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.order import SourceOrder

Rows = NDArray[np.int64]
BATCH_ROWS = 512
TOPIC_ROWS = 2_000
BUFFER_ROWS = 10_000
ROWS_OF_PAGE = (22, 155, 614)
"""Documents of 800 tokens in pages of 64 KB, 256 KB and 1 MB."""


def full_shuffle(num_rows: int, rows_of_page: int, seed: int) -> Rows:
    return np.random.default_rng(seed).permutation(num_rows)


def no_shuffle(num_rows: int, rows_of_page: int, seed: int) -> Rows:
    return np.arange(num_rows)


def streaming_buffer(num_rows: int, rows_of_page: int, seed: int) -> Rows:
    """Rows in file order enter a buffer; a random one of it leaves for each that enters."""
    rng = np.random.default_rng(seed)
    slots = rng.integers(0, BUFFER_ROWS, num_rows).tolist()
    buffer = list(range(BUFFER_ROWS))
    order = []
    for row in range(BUFFER_ROWS, num_rows):
        slot = slots[row]
        order.append(buffer[slot])
        buffer[slot] = row
    return np.array(order + rng.permutation(buffer).tolist())


def youmu_aggressive(num_rows: int, rows_of_page: int, seed: int) -> Rows:
    """Random pages enter a buffer whenever one fits; batches are taken from it at random."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(num_rows // rows_of_page)
    buffer, parts, taken = np.empty(0, np.int64), [], 0
    while taken < len(pages) or len(buffer) >= BATCH_ROWS:
        new = []
        while taken < len(pages) and len(buffer) + (len(new) + 1) * rows_of_page <= BUFFER_ROWS:
            new.append(np.arange(rows_of_page) + pages[taken] * rows_of_page)
            taken += 1
        buffer = rng.permutation(np.concatenate([buffer, *new]))
        parts.append(buffer[:BATCH_ROWS])
        buffer = buffer[BATCH_ROWS:]
    return np.concatenate(parts)


def torchmix_window(window_rows: int) -> Callable[[int, int, int], Rows]:
    def order(num_rows: int, rows_of_page: int, seed: int) -> Rows:
        return source_rows(num_rows, rows_of_page, max(1, window_rows // rows_of_page), seed)

    return order


def source_rows(num_rows: int, rows_of_page: int, window_pages: int, seed: int) -> Rows:
    """One epoch of a source in torchmix's own order."""
    first_row = np.append(np.arange(0, num_rows, rows_of_page), num_rows).astype(np.int64)
    sizes = SourceSizes(first_row_of_page=first_row, tokens=np.ones(num_rows, np.int32), window_pages=window_pages)
    source = SourceOrder("rows", sizes, seed=seed)
    return np.concatenate([source.window(0, window).rows for window in range(source.num_windows)])


SCHEMES: dict[str, tuple[Callable[[int, int, int], Rows], int | None]] = {
    "full shuffle": (full_shuffle, None),
    "none": (no_shuffle, None),
    "streaming buffer 10K": (streaming_buffer, None),
    "pages alone": (torchmix_window(1), None),
    "Youmu buffer 10K": (youmu_aggressive, 2 * BUFFER_ROWS),
    "torchmix window 10K": (torchmix_window(BUFFER_ROWS), BUFFER_ROWS),
    "torchmix window 20K": (torchmix_window(2 * BUFFER_ROWS), 2 * BUFFER_ROWS),
    "torchmix window 80K": (torchmix_window(8 * BUFFER_ROWS), 8 * BUFFER_ROWS),
}


def same_pairs(labels: Rows) -> float:
    """Share of pairs of a batch with one label; labels [batches, rows of a batch]."""
    ordered = np.sort(labels, axis=1)
    starts = np.ones(ordered.shape, bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    runs = np.diff(np.append(np.flatnonzero(starts), ordered.size)).astype(np.float64)
    pairs = ordered.shape[0] * BATCH_ROWS * (BATCH_ROWS - 1)
    return float((runs * (runs - 1)).sum() / pairs)


def measure(order: Rows, rows_of_page: int, seed: int) -> tuple[float, float, float]:
    batches = order[: len(order) // BATCH_ROWS * BATCH_ROWS].reshape(-1, BATCH_ROWS)
    topics = batches // TOPIC_ROWS
    feature = np.random.default_rng(1000 + seed).standard_normal(int(topics.max()) + 1)
    values = feature[topics]
    variance = values.mean(axis=1).var() * BATCH_ROWS / values.var()
    return same_pairs(batches // rows_of_page), same_pairs(topics), float(variance)


def chi_square_of_files(order: Rows, file_of_row: NDArray[np.int64]) -> float:
    """Chi-square per degree of freedom of the files of neighbours, against independent rows."""
    files = file_of_row[order]
    pairs = files[: len(files) // 2 * 2].reshape(-1, 2)  # disjoint pairs, so that they are independent
    num_files = int(file_of_row.max()) + 1
    counts = np.bincount(pairs[:, 0] * num_files + pairs[:, 1], minlength=num_files**2)
    share = np.bincount(file_of_row, minlength=num_files) / len(file_of_row)
    expected = np.outer(share, share).ravel() * len(pairs)
    return float(((counts - expected) ** 2 / expected).sum() / (num_files**2 - num_files))


def print_quality(num_rows: int, seeds: int) -> list[dict[str, Any]]:
    columns = [f"{r} rows a page: same page % (law), same topic %, variance" for r in ROWS_OF_PAGE]
    print(f"| scheme | {' | '.join(columns)} |")
    print("|---" * (1 + len(ROWS_OF_PAGE)) + "|")
    results = []
    for name, (make, window_rows) in SCHEMES.items():
        cells = []
        for rows_of_page in ROWS_OF_PAGE:
            runs = [measure(make(num_rows, rows_of_page, seed), rows_of_page, seed) for seed in range(seeds)]
            page, topic, variance = np.mean(runs, axis=0)
            law = None if window_rows is None else rows_of_page / window_rows
            cells.append(
                f"{100 * page:.3g}{'' if law is None else f' ({100 * law:.3g})'}, {100 * topic:.2f}, {variance:.2g}"
            )
            results.append(
                {"scheme": name, "rows_of_page": rows_of_page, "same_page": page, "law": law, "same_topic": topic}
                | {"variance": variance}
            )
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return results


def print_files(num_rows: int, seeds: int) -> list[dict[str, Any]]:
    """Eight files of unequal size, in pages of 22 rows, in one window that holds all, and in small ones."""
    ends = (np.cumsum([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005]) * num_rows).astype(np.int64)
    file_of_row = np.searchsorted(ends, np.arange(num_rows), side="right").clip(max=7)
    results = []
    print("\n| one source over 8 files | chi-square / df |\n|---|---|")
    for name, window_pages in (
        ("concatenated, then shuffled", None),
        ("torchmix, window 20K", 909),
        ("window 80K", 3636),
    ):
        values = [
            chi_square_of_files(
                full_shuffle(num_rows, 22, seed)
                if window_pages is None
                else source_rows(num_rows, 22, window_pages, seed),
                file_of_row,
            )
            for seed in range(seeds)
        ]
        print(f"| {name} | {', '.join(f'{value:.2f}' for value in values)} |")
        results.append({"files": name, "chi_square_per_df": values})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=640_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer rows, one seed")
    options = parser.parse_args()
    num_rows, seeds = (160_000, 1) if options.quick else (options.rows, options.seeds)
    results = print_quality(num_rows, seeds) + print_files(num_rows, seeds)
    print(json.dumps({"benchmark": "shuffle_quality", "rows": num_rows, "seeds": seeds, "results": results}))


if __name__ == "__main__":
    main()
