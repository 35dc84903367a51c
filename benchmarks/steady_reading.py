"""Steady reading of Parquet: tokens per CPU-second, batches' times, memory and bytes, by reader, in one run.

    python benchmarks/steady_reading.py [--tokens 128000000] [--rounds 5] [--quick]
    python benchmarks/steady_reading.py --grow

S files share the tokens: lists of int32 in zstd with Arrow's default dictionaries, documents of 800 tokens on average.
Readers are those of `steady_rivals.py`, each a process of its own; all of a case run at once and are asked in turn for
short windows, so that they meet the same machine. A batch is 256 x 4096 tokens for everybody. CPU seconds are user and
system time of the process tree, from /proc; bytes are those of /proc/PID/io: `rchar`, what read calls returned (what is
taken from mapped memory is not in it, as Hugging Face's copy), per token that was given. Memory is the tree's PSS, and
anonymous part of it. The page cache is warm. Figures are medians over rounds; percentiles are over all batches, of
wall time and, for machines that others use, of the process's CPU time.

`--grow` measures memory as the data becomes ten times as much.
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

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from process_trees import Contestant, cpu_seconds, memory_mib, reply, requests, tree_of
from synthetic import write_tokens

SAMPLES, LENGTH = 256, 4096
WINDOW_BYTES = 40 << 20
"""Of all sources together; of the loader, which mixes them, at least a page of each."""
CASES = ((8, 256), (64, 256), (306, 256), (8, 1024))
"""Sources, KB of a page."""
MADE_AHEAD = 6
"""Batches that may wait from before a window; they are taken first."""
DECODED = 2.2
"""Bytes of int32 ids for a byte of a page that is not compressed, at most."""
READERS = ("decode", "torchdata", "HF streaming", "HF map-style", "torchmix reader", "torchmix loader")


def batches_of(options: dict[str, Any]) -> Iterator[int]:
    """Tokens of each batch of a contestant."""
    import steady_rivals as rivals
    import torch

    torch.set_num_threads(1)
    files = sorted(Path(options["folder"]).glob("*.parquet"))
    reader = options["reader"]
    window_bytes = (
        options["window_bytes"] if reader == "torchmix loader" else min(options["window_bytes"], WINDOW_BYTES)
    )
    sizes = {"cache": int(2.25 * window_bytes), "window_bytes": window_bytes}
    if reader == "HF map-style":
        copy = Path(options["folder"]) / "huggingface"
        return rivals.hf_map(files, SAMPLES, LENGTH, lambda **costs: options.update(costs=costs), copy)
    if reader.startswith("torchmix"):
        read = rivals.torchmix_reader if reader == "torchmix reader" else rivals.torchmix_loader
        return read(files, SAMPLES, LENGTH, **sizes)
    return {"decode": rivals.decode, "torchdata": rivals.torchdata, "HF streaming": rivals.hf_streaming}[reader](
        files, SAMPLES, LENGTH
    )


def contest(options: dict[str, Any]) -> None:
    """Be a contestant."""
    batches = batches_of(options)
    for request in requests():
        taken, spent, tokens = [], [], 0
        for _ in range(request["batches"]):
            began, began_cpu = time.perf_counter(), time.process_time()
            tokens += next(batches)
            taken.append((time.perf_counter() - began) * 1e3)
            spent.append((time.process_time() - began_cpu) * 1e3)
        reply(tokens=tokens, ms=taken, cpu_ms=spent, costs=options.get("costs", {}))


def bytes_read(pid: int) -> int:
    """Bytes that read calls returned to a tree that ends no process meanwhile."""
    total = 0
    for process in tree_of(pid):
        total += int(Path(f"/proc/{process}/io").read_text().split()[1])
    return total


def write_sources(folder: Path, num_sources: int, *, num_tokens: int, page_kb: int) -> None:
    """Sources of the same size."""
    folder.mkdir()
    for i in range(num_sources):
        write_tokens(
            folder / f"s{i:03d}.parquet", num_tokens=num_tokens // num_sources, page_bytes=page_kb << 10, seed=i
        )


def measure(folder: Path, *, rounds: int, batches: int, readers: tuple[str, ...], window_bytes: int) -> dict[str, Any]:
    """All readers over the files of a folder."""
    found: dict[str, Any] = {}
    contestants = {}
    for reader in readers:
        contestant = Contestant(__file__, reader=reader, folder=str(folder), window_bytes=window_bytes)
        answer = contestant.ask(batches=1)
        contestant.ask(batches=2 * batches)  # over the first windows, so that memory is used again
        contestants[reader] = contestant
        found[reader] = {
            "cpu_ns": [],
            "bytes": [],
            "tokens": [],
            "ms": [],
            "cpu_ms": [],
            "pss": [],
            "anon": [],
            **answer["costs"],
        }
    for _ in range(rounds):
        for reader, contestant in contestants.items():
            contestant.ask(batches=MADE_AHEAD)
            began_cpu, began_bytes = cpu_seconds(contestant.pid), bytes_read(contestant.pid)
            answer = contestant.ask(batches=batches)
            result = found[reader]
            result["cpu_ns"].append((cpu_seconds(contestant.pid) - began_cpu) / answer["tokens"] * 1e9)
            result["bytes"].append(bytes_read(contestant.pid) - began_bytes)
            result["tokens"].append(answer["tokens"])
            result["ms"] += answer["ms"]
            result["cpu_ms"] += answer["cpu_ms"]
            memory = memory_mib(tree_of(contestant.pid))
            result["pss"].append(memory["Pss"])
            result["anon"].append(memory["Pss_Anon"])
    for contestant in contestants.values():
        contestant.close()
    return found


def print_case(found: dict[str, Any], title: str) -> None:
    """One table."""
    print(f"\n{title}\n")
    print(
        "| reader | Mtok/CPU-s | / decode | bytes a token | PSS MiB (anonymous) | batch ms p50, p99, max | p99/p50 "
        "| of CPU ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for reader, result in found.items():
        ratio = statistics.median(np.array(found["decode"]["cpu_ns"]) / np.array(result["cpu_ns"]))
        p50, p99, most = np.percentile(result["ms"], [50, 99, 100])
        cpu_p50, cpu_p99 = np.percentile(result["cpu_ms"], [50, 99])
        print(
            f"| {reader} | {1e3 / statistics.median(result['cpu_ns']):.0f} | {ratio:.2f} | "
            f"{sum(result['bytes']) / sum(result['tokens']):.2f} | "
            f"{max(result['pss']):.0f} ({max(result['anon']):.0f}) | "
            f"{p50:.0f}, {p99:.0f}, {most:.0f} | {p99 / p50:.1f} | {cpu_p99 / cpu_p50:.1f} |"
        )
        if "copy_mib" in result:
            costs = f"{result['conversion_s']:.0f} s, {result['conversion_cpu_s']:.0f} CPU-s"
            print(f"| (its conversion) | {costs}, {result['copy_mib']:.0f} MiB | | | | | | |")
    sys.stdout.flush()


def grow(options: argparse.Namespace) -> None:
    """Memory of both readers of torchmix over some tokens, and over ten times as many."""
    for num_tokens in (options.tokens // 8, options.tokens // 8 * 10):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "files"
            write_sources(folder, 8, num_tokens=num_tokens, page_kb=256)
            readers = ("decode", "torchmix reader", "torchmix loader")
            found = measure(
                folder, rounds=options.rounds, batches=options.batches, readers=readers, window_bytes=16 << 20
            )
            print_case(found, f"{num_tokens / 1e6:.0f} M tokens in 8 files, windows of 16 MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20, help="batches of a window")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)))
    parser.add_argument("--quick", action="store_true", help="little data, one case")
    parser.add_argument("--grow", action="store_true", help="memory over ten times as much data")
    parser.add_argument("--readers", nargs="*", default=READERS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        contest(json.loads(options.contestant))
        return
    if options.quick:
        options.tokens, options.rounds, options.batches, options.cases = 16_000_000, 2, 4, [0]
    if options.grow:
        grow(options)
        return
    for case in options.cases:
        num_sources, page_kb = CASES[case]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "files"
            write_sources(folder, num_sources, num_tokens=options.tokens, page_kb=page_kb)
            found = measure(
                folder,
                rounds=options.rounds,
                batches=options.batches,
                readers=tuple(options.readers),
                window_bytes=max(
                    WINDOW_BYTES // (16 if options.quick else 1), int(num_sources * page_kb * 1024 * DECODED)
                ),
            )
            print_case(found, f"{num_sources} files, pages of {page_kb} KB, {options.tokens / 1e6:.0f} M tokens")


if __name__ == "__main__":
    main()
