"""What a way to shuffle costs: tokens decoded for each one served, and tokens per CPU-second, against `page`.

    python benchmarks/shuffle_cost.py [--tokens 20000000] [--steps 60]

One source of list<int32> in zstd, documents of 800 tokens on average, batches of 32 x 4096 tokens, read as a leader
reads them: planned, read, and pages ahead of need decoded. `kept` is how much of all decoded pages the cache holds.
*Forecast* is the figure that `torchmix check` gives for `row` beforehand. Figures are of the second half of the steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.catalog.sizes import DECODED_TOKEN_BYTES
from torchmix.catalog.store import Catalog
from torchmix.cli.findings import sources_findings
from torchmix.indexing.scan import index_recipe
from torchmix.planner.planner import open_planner
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Batch, Read, Recipe, Shuffle, Source
from torchmix.steps.windows_ahead import WindowsAhead

PARTS = {0.125: "1/8", 0.5: "1/2"}
"""What the table calls the parts of all decoded pages that the cache holds."""


def write(path: Path, num_tokens: int, page_bytes: int) -> None:
    rng = np.random.default_rng(1)
    lengths = np.maximum(1, rng.lognormal(np.log(600), 0.75, num_tokens // 800)).astype(np.int64)
    ids = pa.array(np.minimum(rng.zipf(1.2, int(lengths.sum())), 50_000).astype(np.int32))
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    table = pa.table({"ids": pa.ListArray.from_arrays(offsets, ids)})
    pq.write_table(
        table, path, compression="zstd", data_page_size=page_bytes, use_dictionary=False, write_page_index=True
    )


def recipe_of(method: str, cache: int) -> Recipe:
    return check_recipe(
        Recipe(
            version=1,
            seed=1,
            batch=Batch(samples=32, length=4096),
            sources={"web": Source(path="web.parquet", tokens="ids")},
            mixture={"web": "100%"},
            shuffle=Shuffle(method=method, window_bytes="4MiB"),
            read=Read(cache=cache),
        )
    )


def run(recipe: Recipe, catalog: Catalog, folder: Path, num_steps: int) -> tuple[float, float]:
    """Amplification, and tokens per CPU-second."""
    planner = open_planner(part_of(recipe, "train"), catalog)
    reader = Reader(catalog, folder, cache_bytes=int(recipe.read.cache))
    windows = WindowsAhead(planner, reader)
    cursor, before, cpu_s, num_tokens = planner.start(), {}, 0.0, 0
    for step in range(num_steps):
        plan, cursor = planner.step(cursor)
        pieces = plan.pieces
        if step == num_steps // 2:
            before, cpu_s, num_tokens = reader.stats(), time.process_time(), 0
        wanted = WantedPieces.end_to_end(
            source=pieces.source, row=pieces.row, epoch=pieces.epoch, start=pieces.start, tokens=pieces.tokens
        )
        reader.read(wanted)
        windows.follow(cursor)
        num_tokens += wanted.num_places
    cpu_s = time.process_time() - cpu_s
    after = reader.stats()
    reader.close()
    decoded, served = (after[key] - before[key] for key in ("bytes_decoded", "bytes_served"))
    return decoded / served, num_tokens / cpu_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print("page | rows | kept | `page` | `none` | `row` | forecast of `row` | tokens per CPU-second, `row` / `page`")
    for page_bytes in (1 << 16, 1 << 18):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write(folder / "web.parquet", options.tokens, page_bytes)
            source = index_recipe(recipe_of("page", 1), folder).sources["web"]
            rows = source.num_documents / source.pages.num_pages
            for kept in (0.125, 0.5, 1.5):
                cache = int(kept * DECODED_TOKEN_BYTES * source.num_tokens)
                found, told = {}, "-"
                for method in ("page", "row", "none"):
                    recipe = recipe_of(method, cache)
                    catalog = index_recipe(recipe, folder)
                    found[method] = run(recipe, catalog, folder, options.steps)
                    for note in sources_findings(part_of(recipe, "train"), catalog, recipe.read):
                        if note.where == "shuffle.method":
                            told = note.message.split("about ")[1].split()[0]
                rate = found["row"][1] / found["page"][1]
                decoded = " | ".join(f"{found[method][0]:.3g}" for method in ("page", "none", "row"))
                print(
                    f"{page_bytes >> 10} KB | {rows:.0f} | {PARTS.get(kept, 'all')} | {decoded} | {told} | {rate:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
