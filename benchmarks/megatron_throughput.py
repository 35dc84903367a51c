"""Tokens per CPU-second from the same .bin files: Megatron's datasets and DataLoader against torchmix, in one run.

    python benchmarks/megatron_throughput.py [--sources 8 64 306] [--dtypes u16 i32] [--rounds 5] [--quick]

One rank, microbatches taken as tensors and let go. CPU seconds are user and system time of the whole process tree, from
/proc. All contestants of a corpus run at once and are asked in turn for short windows, so that they meet the same
machine; each window begins after steps made ahead have been used up. Figures are medians over rounds. The page cache is
warm for all. Only tokens of documents count, not padding.

  megatron   `BlendedMegatronDatasetBuilder`, one epoch of samples, DataLoader with 0 and 2 workers: no document
             boundaries, labels across documents. `-doc`: with reset_position_ids and eod_mask_loss
  torchmix   its loader end to end, in threads of the process or with one worker process; documents packed by best fit,
             positions and boundaries by document. `-stream`: documents end to end and no boundaries, as Megatron
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from megatron_data import Corpus, write_corpus, write_recipe
from process_trees import Contestant, cpu_seconds, reply, requests, spread

LENGTH = 4096
CONTESTANTS: dict[str, dict[str, Any]] = {
    "megatron w0": {"of": "megatron", "workers": 0, "document": False},
    "megatron w2": {"of": "megatron", "workers": 2, "document": False},
    "megatron-doc w0": {"of": "megatron", "workers": 0, "document": True},
    "torchmix w0": {"of": "torchmix", "loaders": "in_process", "packing": "document"},
    "torchmix w1": {"of": "torchmix", "loaders": "node", "packing": "document"},
    "torchmix-stream w0": {"of": "torchmix", "loaders": "in_process", "packing": "stream"},
    "torchmix-stream w1": {"of": "torchmix", "loaders": "node", "packing": "stream"},
}
RIVALS = ("megatron w0", "megatron w2")
"""Without worker processes, which costs it least, and as it is by default."""


def megatron_batches(corpus: Corpus, micro_batch_size: int, options: dict[str, Any]) -> Iterator[tuple[int, float]]:
    """Tokens of each microbatch, and the share of them that is no padding."""
    import torch
    from megatron_rival import build_data_loader, build_dataset, join_job_of_one

    torch.set_num_threads(1)
    join_job_of_one()
    dataset = build_dataset(
        corpus, num_samples=corpus.num_tokens // LENGTH, length=LENGTH, document=options["document"]
    )
    while True:  # the cache of indices makes a second pass cheap to begin
        loader = build_data_loader(dataset, micro_batch_size=micro_batch_size, num_workers=options["workers"])
        for batch in loader:
            yield batch["tokens"].numel(), 1.0


def torchmix_batches(
    corpus: Corpus, micro_batch_size: int, samples: int, options: dict[str, Any]
) -> Iterator[tuple[int, float]]:
    """Tokens of each microbatch, and the share of its step that is no padding."""
    import torch

    from torchmix.parallel.topology import Topology
    from torchmix.stateful.open import build_loader

    torch.set_num_threads(1)
    recipe = write_recipe(corpus, samples=samples, length=LENGTH, packing=options["packing"])
    topology = Topology.from_world(world_size=1, rank=0)
    with build_loader(
        recipe, topology=topology, micro_batch_size=micro_batch_size, loaders=options["loaders"]
    ) as loader:
        fill = 1.0
        for microbatch in loader:
            if microbatch.index == 0:
                fill = loader.stats()["fill"]
            assert microbatch.tokens is not None
            yield microbatch.tokens.numel(), fill


def contestant(options: dict[str, Any]) -> None:
    corpus = write_corpus(Path(options["folder"]), **options["corpus"])
    if options["of"] == "megatron":
        batches = megatron_batches(corpus, options["micro_batch_size"], options)
    else:
        batches = torchmix_batches(corpus, options["micro_batch_size"], options["samples"], options)
    made_ahead = (8 * options["samples"] if options["of"] == "torchmix" else 64) * LENGTH
    take(batches, made_ahead)
    reply(ready=True)
    for request in requests():
        take(batches, made_ahead)  # while others were asked
        began_s, began = cpu_seconds(), time.perf_counter()
        tokens = 0.0
        while time.perf_counter() - began < request["window_s"]:
            tokens += take(batches, 64 * LENGTH)
        reply(tokens=tokens, cpu_s=cpu_seconds() - began_s, wall_s=time.perf_counter() - began)


def take(batches: Iterator[tuple[int, float]], num_tokens: int) -> float:
    """Take microbatches of at least so many tokens; returns those that are no padding."""
    taken, real = 0, 0.0
    while taken < num_tokens:
        tokens, fill = next(batches)
        taken += tokens
        real += tokens * fill
    return real


def measure(folder: Path, num_sources: int, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    corpus = {"num_sources": num_sources, "dtype": dtype, "num_tokens": args.tokens, "mean_tokens": args.mean}
    write_corpus(folder, **corpus)
    shared = {
        "folder": str(folder),
        "corpus": corpus,
        "samples": args.samples,
        "micro_batch_size": args.micro_batch_size,
    }
    running = {}
    for name in args.contestants:
        running[name] = Contestant(__file__, **shared, **CONTESTANTS[name])
        running[name].answer()  # one at a time: the first ones write indices that the others open
    rates: dict[str, list[float]] = {name: [] for name in running}
    walls: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(args.rounds):
        for name, process in running.items():
            found = process.ask(window_s=args.window_s)
            rates[name].append(found["tokens"] / found["cpu_s"])
            walls[name].append(found["tokens"] / found["wall_s"])
    for process in running.values():
        process.close()
    result = {}
    for name in running:
        rivals = [rival for rival in RIVALS if rival in rates and name.startswith("torchmix")]
        times = {
            rival: [round(ours / theirs, 3) for ours, theirs in zip(rates[name], rates[rival], strict=True)]
            for rival in rivals
        }
        result[name] = {
            "mtok_per_cpu_s": round(statistics.median(rates[name]) / 1e6, 1),
            "spread": round(spread(rates[name]), 2),
            "mtok_per_wall_s": round(statistics.median(walls[name]) / 1e6, 1),
            "times": {rival: round(statistics.median(each), 2) for rival, each in times.items()},
            "rounds": times,
        }
    return {"sources": num_sources, "dtype": dtype, "contestants": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", default=[8, 64, 306])
    parser.add_argument("--dtypes", nargs="+", default=["u16", "i32"])
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of a corpus, over all its sources")
    parser.add_argument("--mean", type=int, default=800, help="mean tokens of a document")
    parser.add_argument("--samples", type=int, default=256, help="of a global batch")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true", help="one small corpus, to see that it runs")
    parser.add_argument("--contestant", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant is not None:
        contestant(args.contestant)
        return
    if args.quick:
        args.sources, args.dtypes, args.tokens, args.rounds, args.window_s = [8], ["u16"], 10_000_000, 2, 0.5
    print("sources | dtype | contestant | Mtok per CPU-s (spread) | Mtok per s | times Megatron's")
    for num_sources in args.sources:
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory() as name:
                found = measure(Path(name), num_sources, dtype, args)
            for contestant_name, row in found["contestants"].items():
                times = ", ".join(f"{times:.2f} x {rival}" for rival, times in row["times"].items())
                print(
                    f"{num_sources:3} | {dtype} | {contestant_name:18} | {row['mtok_per_cpu_s']:6.1f} "
                    f"({row['spread']:.2f}) | {row['mtok_per_wall_s']:6.1f} | {times}"
                )
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
