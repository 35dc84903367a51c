"""What a selection reads, and how well it is shuffled, as one JSON.

    python -m tests.trials.selection_reads --seed 1 --count 5 --out reads.json

In: a seed and a number of rounds. Out: for 0.1, 1 and 10 % of a source, scattered and clustered: pages decoded in one
epoch over the pages that hold a kept row; and pairs of rows of one page within a batch, over those of a file that holds
the kept rows alone. Must hold: an epoch decodes no page without a kept row, and each other at most 1.1 times, where the
cache holds four windows of the whole source; pairs are at most 1.5 times those of the file, with three standard
deviations of a count in addition. A run goes on where it stopped. Cost: some seconds a round.
"""

from __future__ import annotations

import math
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.support.trial import continued, trial_parser
from torchmix.catalog.sizes import SourceSizes, window_units_of_view
from torchmix.indexing.scan import index
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.spaces import SourceSpace, ViewSpace

SHARES = (0.001, 0.01, 0.1)
LAYOUTS = ("scattered", "clustered")
PAGE_ROWS = 32
WINDOW_PAGES = 16
BATCH_ROWS = 64
ROW_TOKENS = 100


def kept_rows(seed: int, num_rows: int, share: float, layout: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Some rows, anywhere or in runs of ten pages."""
    draw = np.random.default_rng(seed)
    if layout == "scattered":
        return np.flatnonzero(draw.random(num_rows) < share)
    run = 10 * PAGE_ROWS
    num_runs = max(1, round(share * num_rows / run))
    starts = draw.choice(num_rows // run, num_runs, replace=False) * run
    return np.sort((starts[:, None] + np.arange(run)).ravel())


def pairs_of_pages(order: StreamOrder, epochs: int) -> int:
    """Pairs of rows of one page within batches of consecutive rows."""
    pairs = 0
    for epoch in range(epochs):
        rows = np.concatenate([order.window(epoch, window).rows for window in range(order.num_windows)])
        pages = rows // PAGE_ROWS
        for start in range(0, len(pages), BATCH_ROWS):
            counts = np.unique(pages[start : start + BATCH_ROWS], return_counts=True)[1]
            pairs += int((counts * (counts - 1) // 2).sum())
    return pairs


def sizes_of(num_rows: int) -> SourceSizes:
    """Pages of 32 rows, documents of one length."""
    first = np.arange(0, num_rows + PAGE_ROWS, PAGE_ROWS, np.int64).clip(max=num_rows)
    return SourceSizes(first_row_of_page=first, tokens=np.full(num_rows, 8, np.int32), window_pages=WINDOW_PAGES)


def try_order(seed: int, share: float, layout: str, *, num_rows: int = 1 << 20) -> dict[str, Any]:
    """Compare the pairs of a selection with those of a file of its rows."""
    sizes, kept = sizes_of(num_rows), kept_rows(seed, num_rows, share, layout)
    window = window_units_of_view(
        num_pages=sizes.num_pages, num_rows=num_rows, num_kept=len(kept), window_pages=WINDOW_PAGES
    )
    epochs = max(1, (1 << 14) // len(kept))
    view = StreamOrder("selection", ViewSpace(0, sizes, kept, window_units=window), seed=seed)
    alone = StreamOrder("alone", SourceSpace(0, sizes_of(len(kept))), seed=seed)
    found, expected = pairs_of_pages(view, epochs), pairs_of_pages(alone, epochs)
    assert found <= 1.5 * expected + 3 * math.sqrt(max(1, expected)), (share, layout, found, expected)
    return {"pairs": found, "pairs_of_file": expected, "epochs": epochs}


def try_reads(seed: int, share: float, layout: str, folder: Path, *, num_rows: int = 48_000) -> dict[str, Any]:
    """Read one epoch of a selection, and count pages."""
    from torchmix.parallel.topology import Topology
    from torchmix.stateful.open import build_loader

    kept = kept_rows(seed, num_rows, share, layout)
    is_kept = np.zeros(num_rows, np.bool_)
    is_kept[kept] = True
    table = pa.table({"ids": [[row] * ROW_TOKENS for row in range(num_rows)], "chosen": is_kept})
    small_pages = {"write_batch_size": ROW_TOKENS * PAGE_ROWS, "data_page_size": 1, "row_group_size": 1 << 20}
    pq.write_table(table, folder / "rows.parquet", compression="none", use_dictionary=False, **small_pages)
    recipe = {
        "version": 1,
        "seed": seed,
        "batch": {"samples": 8, "length": 512},
        "packing": {"align_tokens": 1},
        "sources": {
            "rows": {"path": "rows.parquet", "tokens": "ids", "properties": ["chosen"]},
            "some": {"from": "rows", "where": "chosen"},
        },
        "mixture": {"some": "100%"},
        "shuffle": {"window_pages": WINDOW_PAGES},
        "read": {"cache": 4 * WINDOW_PAGES * PAGE_ROWS * ROW_TOKENS * 4},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    catalog = index(path)
    pages = catalog.sources["rows"].pages
    wanted = len(np.unique(pages.page_of_rows(kept)))
    seen: list[int] = []
    with build_loader(path, topology=Topology(dp=1), micro_batch_size=8, one_pass=True, loaders="in_process") as loader:
        for microbatch in loader:
            seen += microbatch.tokens[microbatch.source_index >= 0].tolist()
        decoded = loader.stats()["pages_decoded"]
    assert sorted(seen) == sorted(kept.tolist() * ROW_TOKENS)
    assert abs(pages.num_pages - num_rows // PAGE_ROWS) <= 2, "pages are small"
    assert wanted <= decoded <= 1.1 * wanted + 1, (share, layout, wanted, decoded)
    return {"pages": pages.num_pages, "pages_with_kept_rows": wanted, "pages_decoded": decoded}


def try_round(seed: int, number: int) -> dict[str, Any]:
    """All shares and layouts once."""
    found = {}
    for share, layout in product(SHARES, LAYOUTS):
        with tempfile.TemporaryDirectory() as folder:
            reads = try_reads(seed + number, share, layout, Path(folder))
        found[f"{share:.1%} {layout}"] = reads | try_order(seed + number, share, layout)
    return found


def main() -> None:
    """Run the rounds that are not in the file yet."""
    continued(trial_parser(__doc__, count=3).parse_args(), try_round)


if __name__ == "__main__":
    main()
