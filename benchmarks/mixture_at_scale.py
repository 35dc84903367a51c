"""A mixture of 15 trillion tokens in 306 sources: time and memory of opening its catalog and planning steps of it.

    python benchmarks/mixture_at_scale.py [--tokens 15e12] [--steps 100] [--quick]

The catalog is written as `torchmix index` writes it, from files that do not exist: documents of 8,192 tokens on
average, 32 in a page, and sizes of sources as 1/n. 15 trillion tokens take 8 GB of disk, 4 bytes for each document's
length and 8 for each page. A process of its own, with all modules imported, opens the catalog and plans steps of 1024
samples of 8192 tokens, once with shares for all sources (`shares`, on a ramp), and once with one flat over all of them
(`flat`). *Private* is the most anonymous memory beyond the imports'; *at once* is the most memory of any kind that the
process had (peak RSS), with the pages of the catalog that it touched, which are the kernel's and shared by all
processes of a host. The kernel refuses the process more than 300 MB of data beyond the imports' (`RLIMIT_DATA`).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
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
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe

SOURCES, MEAN_TOKENS, PAGE_DOCUMENTS, CHUNK_PAGES = 306, 8192, 32, 64
FILE_DOCUMENTS = (1 << 20, 1 << 15)
"""A source has as many large files as fit, and small ones for the rest."""
MOST_PRIVATE = 300 * 10**6
KINDS = ("shares", "flat")
NAMES = [f"source-{s:03d}" for s in range(SOURCES)]


def recipe_of(kind: str) -> Recipe:
    plain: dict[str, Any] = {
        "version": 1,
        "seed": 1,
        "batch": {"samples": 1024, "length": 8192},
        "sources": {name: {"path": f"{name}/*.parquet", "tokens": "ids"} for name in NAMES},
        "mixture": {name: 1 / (s + 1) for s, name in enumerate(NAMES)},
    }
    if kind == "flat":
        plain["mixture"] = {"all": {"share": 1, "flat": NAMES}}
    else:
        plain["schedule"] = [{"from": "0 tokens", "to": "12T tokens", "mixture": dict.fromkeys(NAMES, 1)}]
    return check_recipe(plain)


def file_index(num_documents: int) -> FileIndex:
    """A file; all files of one number of documents are alike."""
    rng = np.random.default_rng(num_documents)
    spread = rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, num_documents)
    tokens = np.clip(spread, 8, 1 << 20).astype(np.int32)
    num_pages = num_documents // PAGE_DOCUMENTS
    num_bytes = rng.integers(300_000, 900_000, num_pages)
    chunk_of_page = np.arange(num_pages) // CHUNK_PAGES
    pages = table_of_file(
        PageColumns(
            chunk_of_page=chunk_of_page,
            page_offset=4 + np.cumsum(num_bytes) - num_bytes,
            page_bytes=num_bytes,
            page_rows=np.full(num_pages, PAGE_DOCUMENTS),
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


def write_catalog(place: Path, num_tokens: float) -> int:
    """A catalog of about so many tokens; returns its bytes."""
    recipe = recipe_of("shares")
    settings = settings_of(recipe.sources, recipe.shuffle)
    large, small = map(file_index, FILE_DOCUMENTS)
    whole = sum(1 / (s + 1) for s in range(SOURCES))
    entries = {}
    with catalog_lock(place):
        for s, name in enumerate(NAMES):
            documents = num_tokens / MEAN_TOKENS / (s + 1) / whole
            num_large = int(documents // FILE_DOCUMENTS[0])
            num_small = max(1, round((documents - num_large * FILE_DOCUMENTS[0]) / FILE_DOCUMENTS[1]))
            files = [
                (f"{name}/{i:04d}.parquet", large if i < num_large else small) for i in range(num_large + num_small)
            ]
            entries[name] = write_source(place, name, settings[name], "tokens-1", files)
        publish(place, entries, None)
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def contestant(folder: Path, kind: str, steps: int) -> None:
    recipe = recipe_of(kind)
    floor = memory_mib(["self"])["Pss_Anon"]
    data = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line).split()[1])
    resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + MOST_PRIVATE, resource.RLIM_INFINITY))
    began = time.perf_counter()
    catalog = open_catalog(folder, settings_of(recipe.sources, recipe.shuffle))
    planner = open_planner(part_of(recipe, "train"), catalog)
    opened = time.perf_counter()
    cursor, private, taken = planner.start(), 0.0, []
    for step in range(steps):
        before = time.perf_counter()
        _, cursor = planner.step(cursor)
        taken.append(time.perf_counter() - before)
        if step % 10 == 0:
            private = max(private, memory_mib(["self"])["Pss_Anon"])
    private = max(private, memory_mib(["self"])["Pss_Anon"])
    sources = catalog.sources.values()
    reply(
        tokens=sum(source.num_tokens for source in sources),
        documents=sum(source.num_documents for source in sources),
        pages=sum(source.pages.num_pages for source in sources),
        open_s=opened - began,
        first_s=taken[0],
        step_ms=1e3 * float(np.median(taken[1:])),
        private_mib=private - floor,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=15e12)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="a small one, to see that it runs")
    parser.add_argument("--contestant", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant is not None:
        wanted = arguments.contestant
        contestant(Path(wanted["folder"]), wanted["kind"], wanted["steps"])
        return
    num_tokens, steps = (3e11, 12) if arguments.quick else (arguments.tokens, arguments.steps)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "catalog")
        needed = 4.3 * num_tokens / MEAN_TOKENS
        if shutil.disk_usage(name).free < 2 * needed:
            parser.error(f"{name} has too little room: about {needed / 1e9:.1f} GB are needed; set TMPDIR, or --tokens")
        num_bytes = write_catalog(folder, num_tokens)
        print(
            "tokens | documents | pages | on disk GB | mixture | open s | first step s | step ms | private MiB | "
            "at once MiB"
        )
        for kind in KINDS:
            process = Contestant(__file__, folder=str(folder), kind=kind, steps=steps)
            found = process.answer()
            process.close()
            print(
                f"{found['tokens']:.3g} | {found['documents']:,} | {found['pages']:,} | {num_bytes / 1e9:.2f} | "
                f"{kind} | {found['open_s']:.2f} | {found['first_s']:.2f} | {found['step_ms']:.1f} | "
                f"{found['private_mib']:.0f} | {found['peak_mib']:.0f}",
                flush=True,
            )
            print(json.dumps({"mixture": kind, **found}), flush=True)


if __name__ == "__main__":
    main()
