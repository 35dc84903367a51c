"""What a longer run costs at its start: Megatron's indices for 1e6 to 1e9 samples, against torchmix, on the same files.

    python benchmarks/megatron_blending.py [--sources 8 306] [--samples 1e6 1e7 1e8 1e9] [--length 64] [--quick]

Megatron builds, for all samples of the run, which source each is from (blend), and for each source the order of its
documents for all epochs, where each sample begins, and the order of samples (document, sample and shuffle index).
torchmix has an order by function: it is not told how long the run is. Each start is a process of its own that has
imported all it needs; from there it counts CPU seconds and seconds of the clock to the finished dataset, or the first
microbatch, the most memory beyond that of its imports, and the bytes that it saved.

Samples are short here, so that 1e9 of them fit the disk: Megatron's document index grows with documents x epochs, and
with samples of 4096 tokens would be 64 times as large. A billion samples of 306 sources need 12 GB of memory, 30 GB of
disk and some minutes.
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

sys.path.insert(0, str(Path(__file__).parent))
from megatron_data import write_corpus, write_recipe
from process_trees import Contestant, cpu_seconds, reply

CACHES = {"megatron": "megatron-cache", "torchmix": "catalog"}


def contestant(options: dict[str, Any]) -> None:
    import torch

    if options["of"] == "megatron":
        build_indices(options)
    else:
        take_first(options)
    torch.distributed.destroy_process_group()


def build_indices(options: dict[str, Any]) -> None:
    """All indices of Megatron's run; no sample is read."""
    from megatron.core.datasets import helpers  # noqa: F401 - imported when indices are built
    from megatron_rival import build_dataset, join_job_of_one

    join_job_of_one()
    floor = Floor()
    corpus = write_corpus(Path(options["folder"]), **options["corpus"])
    dataset = build_dataset(corpus, num_samples=options["num_samples"], length=options["length"])
    assert len(dataset) >= options["num_samples"]
    floor.tell_ready()


def take_first(options: dict[str, Any]) -> None:
    """torchmix's catalog, and its first microbatch."""
    import torch

    from torchmix.parallel.topology import Topology
    from torchmix.stateful.open import build_loader

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    floor = Floor()
    with build_loader(
        options["recipe"], topology=Topology.from_world(world_size=1, rank=0), loaders="in_process"
    ) as loader:
        next(iter(loader))
        floor.tell_ready()


class Floor:
    """What the process has cost when its imports are done."""

    def __init__(self) -> None:
        self.cpu_s, self.at, self.peak_mib = cpu_seconds(), time.monotonic(), peak_mib()

    def tell_ready(self) -> None:
        reply(cpu_s=cpu_seconds() - self.cpu_s, clock_s=time.monotonic() - self.at, peak_mib=peak_mib() - self.peak_mib)


def peak_mib() -> float:
    """The most memory that this process has held, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def start(of: str, folder: Path, **options: Any) -> dict[str, float]:
    """A cold start of one contestant; what it saved is removed."""
    cache = folder / CACHES[of]
    shutil.rmtree(cache, ignore_errors=True)
    process = Contestant(__file__, of=of, folder=str(folder), **options)
    found = process.answer()
    process.close()
    found["saved_mib"] = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / (1 << 20)
    shutil.rmtree(cache)
    return {key: round(value, 2) for key, value in found.items()}


def print_table(found: dict[int, dict[str, dict[str, float]]]) -> None:
    """A row for each length of the run, its figures side by side for each number of sources."""
    heads = [f"{count} sources: CPU seconds | over torchmix | peak MiB | saved MiB" for count in found]
    print(f"samples | {' | '.join(heads)}")
    for what in next(iter(found.values())):
        cells = []
        for rows in found.values():
            row, ours = rows[what], next(iter(rows.values()))
            cells.append(
                f"{row['cpu_s']} | {row['cpu_s'] / ours['cpu_s']:.3g} | {row['peak_mib']:.0f} | {row['saved_mib']:.0f}"
            )
        print(f"{what} | {' | '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", default=[8, 306])
    parser.add_argument("--samples", type=float, nargs="+", default=[1e6, 1e7, 1e8, 1e9], help="of the whole run")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of a corpus, over all its sources")
    parser.add_argument("--quick", action="store_true", help="one small corpus, to see that it runs")
    parser.add_argument("--contestant", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant is not None:
        contestant(args.contestant)
        return
    if args.quick:
        args.sources, args.samples, args.tokens = [8], [1e5, 1e6], 10_000_000
    found: dict[int, dict[str, dict[str, float]]] = {}
    for num_sources in args.sources:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            corpus = {"num_sources": num_sources, "dtype": "u16", "num_tokens": args.tokens}
            recipe = write_recipe(write_corpus(folder, **corpus), samples=64, length=args.length)
            rows = found[num_sources] = {"torchmix, any": start("torchmix", folder, recipe=str(recipe))}
            for num_samples in args.samples:
                asked = {"corpus": corpus, "num_samples": int(num_samples), "length": args.length}
                rows[f"Megatron, {num_samples:.0e}"] = start("megatron", folder, **asked)
            print(json.dumps({num_sources: rows}), flush=True)
    print_table(found)


if __name__ == "__main__":
    main()
