"""Time to the first microbatch above the import floor: Megatron's data builder against torchmix, on one set of files.

    python benchmarks/megatron_startup.py [--sources 8 64 306] [--rounds 5] [--quick]

Each start is a process of its own. It first imports every module that its contestant will need and makes a process
group of one rank; the clock from the process's start to there is its *import floor*. What counts is the time from there
to the first microbatch. Contestants alternate; figures are medians.

  cold  no indices of its own: Megatron builds and saves document, sample and shuffle indices and the blend; torchmix
        indexes the .idx files and saves a catalog. The data's pages are dropped from the kernel's cache first
  warm  the same again, with what the cold start saved

`--samples` is the length of the run that Megatron must be told, and builds indices for; torchmix needs no such number.
Seconds of the clock, and CPU seconds of the process tree, which other work on the machine disturbs less. A worker
process of torchmix imports torch for itself; that is counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from megatron_data import drop_page_cache, write_corpus, write_recipe
from process_trees import Contestant, cpu_seconds, reply, spread

LENGTH = 4096
CONTESTANTS: dict[str, dict[str, Any]] = {
    "megatron w0": {"of": "megatron", "workers": 0},
    "megatron w2": {"of": "megatron", "workers": 2},
    "torchmix w0": {"of": "torchmix", "loaders": "in_process"},
    "torchmix w1": {"of": "torchmix", "loaders": "node"},
}


def contestant(options: dict[str, Any]) -> None:
    import torch

    if options["of"] == "megatron":
        start_megatron(options)
    else:
        start_torchmix(options)
    torch.distributed.destroy_process_group()


def start_megatron(options: dict[str, Any]) -> None:
    from megatron.core.datasets import helpers  # noqa: F401 - imported when indices are built
    from megatron_rival import build_data_loader, build_dataset, join_job_of_one

    join_job_of_one()
    floor = Floor()
    corpus = write_corpus(Path(options["folder"]), **options["corpus"])
    dataset = build_dataset(corpus, num_samples=options["num_samples"], length=LENGTH)
    loader = build_data_loader(dataset, micro_batch_size=1, num_workers=options["workers"])
    batch = next(iter(loader))
    assert batch["tokens"].shape == (1, LENGTH)
    floor.tell_ready()


def start_torchmix(options: dict[str, Any]) -> None:
    import torch

    from torchmix.parallel.topology import Topology
    from torchmix.stateful.open import build_loader

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    floor = Floor()
    topology = Topology.from_world(world_size=1, rank=0)
    with build_loader(options["recipe"], topology=topology, loaders=options["loaders"]) as loader:
        microbatch = next(iter(loader))
        assert microbatch.tokens is not None and microbatch.tokens.shape == (1, LENGTH)
        floor.tell_ready()


class Floor:
    """What the process has cost when its imports are done."""

    def __init__(self) -> None:
        self.modules = set(sys.modules)
        self.cpu_s = cpu_seconds()
        self.at = time.monotonic()

    def tell_ready(self) -> None:
        ready_at = time.monotonic()
        late = sorted(set(sys.modules) - self.modules)
        reply(
            floor_at=self.at, floor_cpu_s=self.cpu_s, ready_at=ready_at, ready_cpu_s=cpu_seconds(), imported_late=late
        )


def start(name: str, **shared: Any) -> dict[str, float]:
    """The floor of a new process and what it took from there to its first microbatch, in seconds of clock and CPU."""
    process = Contestant(__file__, **shared, **CONTESTANTS[name])
    found = process.answer()
    process.close()
    return {
        "floor_s": found["floor_at"] - process.began_at,
        "floor_cpu_s": found["floor_cpu_s"],
        "above_s": found["ready_at"] - found["floor_at"],
        "above_cpu_s": found["ready_cpu_s"] - found["floor_cpu_s"],
        "imported_late": len(found["imported_late"]),
    }


def measure(folder: Path, num_sources: int, num_samples: int, args: argparse.Namespace) -> dict[str, Any]:
    corpus = {"num_sources": num_sources, "dtype": "u16", "num_tokens": args.tokens}
    recipe = write_recipe(write_corpus(folder, **corpus), samples=args.batch, length=LENGTH)
    shared = {"folder": str(folder), "corpus": corpus, "recipe": str(recipe), "num_samples": num_samples}
    caches = {"megatron": folder / "megatron-cache", "torchmix": folder / "catalog"}
    times: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for name in args.contestants:
            shutil.rmtree(caches[CONTESTANTS[name]["of"]], ignore_errors=True)
            drop_page_cache(folder)
            for state in ("cold", "warm"):
                times.setdefault(f"{name} {state}", []).append(start(name, **shared))
    rows = {}
    for what, starts in times.items():
        rows[what] = {key: round(statistics.median(each[key] for each in starts), 3) for key in starts[0]}
        rows[what]["spread"] = round(spread([each["above_cpu_s"] for each in starts]), 2)
    return {"sources": num_sources, "samples": num_samples, "starts": rows}


def print_table(rows: list[dict[str, Any]]) -> None:
    """CPU seconds above the floor: ours beside Megatron's without workers, and ours with one."""
    print(
        "sources | samples | Megatron w0 cold | torchmix w0 cold | ratio | Megatron w0 warm | torchmix w0 warm | "
        "ratio | torchmix w1 cold | torchmix w1 warm"
    )
    for found in rows:
        of = {what: row["above_cpu_s"] for what, row in found["starts"].items()}
        cells = []
        for state in ("cold", "warm"):
            theirs, ours = of.get(f"megatron w0 {state}"), of.get(f"torchmix w0 {state}")
            ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
            cells += [*("" if each is None else f"{each:.2f}" for each in (theirs, ours)), ratio]
        cells += [
            "" if of.get(f"torchmix w1 {state}") is None else f"{of[f'torchmix w1 {state}']:.2f}"
            for state in ("cold", "warm")
        ]
        print(f"{found['sources']} | {found['samples']:,} | {' | '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", default=[8, 64, 306])
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of a corpus, over all its sources")
    parser.add_argument("--samples", type=int, nargs="+", default=[25_000, 1_000_000], help="of the whole run")
    parser.add_argument("--batch", type=int, default=64, help="samples of torchmix's global batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one small corpus, to see that it runs")
    parser.add_argument("--contestant", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant is not None:
        contestant(args.contestant)
        return
    if args.quick:
        args.sources, args.tokens, args.samples, args.rounds = [8], 10_000_000, [25_000], 1
    rows = []
    for num_sources in args.sources:
        with tempfile.TemporaryDirectory() as name:
            for num_samples in args.samples:
                found = measure(Path(name), num_sources, num_samples, args)
                print(json.dumps(found), flush=True)
                rows.append(found)
    print_table(rows)


if __name__ == "__main__":
    main()
