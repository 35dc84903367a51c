"""Opening the catalog of a source of up to a trillion tokens: time, private memory, bytes on disk.

    python benchmarks/catalog_open.py [--tokens 1e9 1e10 1e11 1e12] [--quick]

The catalog is written as `torchmix index` writes it, from files that do not exist: each has 2^20 documents of 800
tokens on average in pages of 80 documents, 64 pages a column chunk. A process of its own, with all modules imported,
then opens it and plans one step of 256 samples of 8192 tokens. *Private* is anonymous memory beyond the imports';
mapped files are the kernel's, shared by all processes of a host. A trillion tokens take 5 GB of disk, 4 bytes for each
document's length and 8 for each page. Figures are the least of the rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from process_trees import Contestant, memory_mib, reply

from torchmix.catalog.file_index import FileIndex
from torchmix.catalog.page_table import PageColumns, table_of_file
from torchmix.catalog.publish import catalog_lock, publish, write_source
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import open_catalog
from torchmix.planner.planner import open_planner
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of

FILE_DOCUMENTS, PAGE_DOCUMENTS, CHUNK_PAGES, MEAN_TOKENS = 1 << 20, 80, 64, 800
PAGE_BYTES = 150_000
RECIPE = """\
version: 1
seed: 1
batch: {samples: 256, length: 8192}
sources:
  tokens: {path: "*.parquet", tokens: input_ids}
mixture: {tokens: 100%}
"""


def file_index() -> FileIndex:
    """One file; all files of a catalog are alike."""
    rng = np.random.default_rng(1)
    tokens = np.clip(rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, FILE_DOCUMENTS), 8, 65_536).astype(np.int32)
    num_pages = -(-FILE_DOCUMENTS // PAGE_DOCUMENTS)
    rows = np.full(num_pages, PAGE_DOCUMENTS)
    rows[-1] = FILE_DOCUMENTS - PAGE_DOCUMENTS * (num_pages - 1)
    num_bytes = rng.integers(PAGE_BYTES // 2, 2 * PAGE_BYTES, num_pages)
    chunk_of_page = np.arange(num_pages) // CHUNK_PAGES
    pages = table_of_file(
        PageColumns(
            chunk_of_page=chunk_of_page,
            page_offset=4 + np.cumsum(num_bytes) - num_bytes,
            page_bytes=num_bytes,
            page_rows=rows,
            kind=np.full(int(chunk_of_page[-1]) + 1, 6, np.int8),
        )
    )
    return FileIndex(
        num_bytes=int(num_bytes.sum()) + 1000,
        footer_hash="0" * 32,
        split_pages=0,
        whole_chunks=False,
        schema=b"",
        ids=None,
        pages=pages,
        tokens=tokens,
    )


def write_catalog(folder: Path, num_tokens: float) -> int:
    """A catalog of about so many tokens and its recipe; returns its bytes."""
    (folder / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(folder / "recipe.yaml")
    index = file_index()
    files = [(f"{i:04d}.parquet", index) for i in range(max(1, round(num_tokens / FILE_DOCUMENTS / MEAN_TOKENS)))]
    place = folder / recipe.catalog
    settings = settings_of(recipe.sources, recipe.shuffle)["tokens"]
    with catalog_lock(place):
        publish(place, {"tokens": write_source(place, "tokens", settings, "tokens-1", files)}, None)
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def contestant(folder: Path) -> None:
    recipe = load_recipe(folder / "recipe.yaml")
    floor = memory_mib(["self"])
    began = time.process_time()
    catalog = open_catalog(folder / recipe.catalog, settings_of(recipe.sources, recipe.shuffle))
    opened = time.process_time()
    opened_memory = memory_mib(["self"])
    planner = open_planner(part_of(recipe, "train"), catalog)
    planner.step(planner.start())
    planned = time.process_time()
    reply(
        documents=catalog.sources["tokens"].num_documents,
        pages=catalog.sources["tokens"].pages.num_pages,
        open_ms=1e3 * (opened - began),
        open_mib=opened_memory["Pss_Anon"] - floor["Pss_Anon"],
        step_ms=1e3 * (planned - opened),
        step_mib=memory_mib(["self"])["Pss_Anon"] - floor["Pss_Anon"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e9, 1e10, 1e11, 1e12])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small ones, to see that it runs")
    parser.add_argument("--contestant", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant is not None:
        contestant(Path(args.contestant["folder"]))
        return
    if args.quick:
        args.tokens, args.rounds = [1e9, 4e9], 1
    first: dict[str, float] = {}
    print(
        "tokens | documents | pages | catalog on disk | opening, over the first's | private | "
        "with the first step, over the first's | private"
    )
    for num_tokens in args.tokens:
        with tempfile.TemporaryDirectory() as name:
            num_bytes = write_catalog(Path(name), num_tokens)
            found = [answer_of(name) for _ in range(args.rounds)]
            least: dict[str, float] = {key: min(each[key] for each in found) for key in found[0]}
            first = first or least
            print(
                f"{num_tokens:.0e} | {least['documents']:,.0f} | {least['pages']:,.0f} | {num_bytes >> 20:,} MiB | "
                f"{least['open_ms'] / first['open_ms']:.1f} | {least['open_mib']:.1f} MiB | "
                f"{least['step_ms'] / first['step_ms']:.1f} | {least['step_mib']:.1f} MiB"
            )
            print(json.dumps(least), flush=True)


def answer_of(folder: str) -> dict[str, Any]:
    process = Contestant(__file__, folder=folder)
    found = process.answer()
    process.close()
    return found


if __name__ == "__main__":
    main()
