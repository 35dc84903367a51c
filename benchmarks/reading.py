"""From Parquet to finished tensors: tokens per CPU-second against pure decoding and a plain DataLoader, in one run.

    python benchmarks/reading.py [--tokens 30000000] [--rounds 3]

Per page size it measures, interleaved, over the same file:
  decode   pyarrow decodes every row group, and nothing else: the bound for whoever reads Parquet
  plain    a torch DataLoader over shuffled row groups that cuts tokens and labels; no mixture, no boundaries, no resume
  torchmix the whole road: plan, page reads, packing, five tensors per token
CPU seconds are of all threads of the process. Then: latency per global batch, and how often a page is decoded when
several leaders read the same source, or the cache is smaller than the windows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import write_recipe, write_tokens

from torchmix.indexing.scan import index_recipe
from torchmix.parallel.place_tree import Layout
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.stateful.stream import StepStream
from torchmix.steps.replica_steps import StreamSettings

SAMPLES, LENGTH = 64, 8192
STEP_TOKENS = SAMPLES * LENGTH
CACHE = "48MiB"
"""Three windows of 16 MiB: less than the data, so that memory is used again as in a long run."""
SMALL_CACHE = "4MiB"
"""Half a window, whose ids take two bytes each."""
WARM_TOKENS = 12 << 20


class PlainRowGroups(IterableDataset):
    """What people write first: row groups in random order, rows shuffled inside, tokens laid end to end and cut."""

    def __init__(self, path: Path, micro_batch_size: int) -> None:
        self.path, self.micro_batch_size = path, micro_batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        file = pq.ParquetFile(self.path, pre_buffer=False)
        rng = np.random.default_rng(0)
        want = self.micro_batch_size * LENGTH + 1
        rest = np.zeros(0, np.int32)
        for group in rng.permutation(file.num_row_groups):
            column = file.read_row_group(group, columns=["input_ids"], use_threads=False)["input_ids"].combine_chunks()
            shuffled = column.take(rng.permutation(len(column)))
            rest = np.concatenate([rest, shuffled.flatten().to_numpy()])
            start = 0
            while len(rest) - start >= want:
                block = rest[start : start + want].astype(np.int64)
                shape = (self.micro_batch_size, LENGTH)
                yield torch.from_numpy(block[:-1]).view(shape), torch.from_numpy(block[1:]).view(shape)
                start += want - 1
            rest = rest[start:]


def decode_rate(path: Path) -> float:
    began, tokens = time.process_time(), 0
    file = pq.ParquetFile(path, pre_buffer=False)
    for group in range(file.num_row_groups):
        tokens += len(file.read_row_group(group, columns=["input_ids"], use_threads=False)["input_ids"].chunk(0).values)
    return tokens / (time.process_time() - began)


def plain_rate(path: Path) -> float:
    began, tokens = time.process_time(), 0
    for batch, _ in DataLoader(PlainRowGroups(path, 8), batch_size=None):
        tokens += batch.numel()
    return tokens / (time.process_time() - began)


def open_stream(directory: Path, *, dp: int = 1, cache: str = CACHE) -> StepStream:
    path = write_recipe(directory, samples=SAMPLES, length=LENGTH, cache=cache)
    loaded = load_recipe(path)
    index_recipe(loaded, directory)
    settings = StreamSettings(
        part=part_of(loaded, "train"),
        base=str(directory),
        catalog_folder=str(directory / loaded.catalog),
        cache_bytes=parse_bytes(loaded.read.cache, where="read.cache"),
        replica=0,
        layout=Layout(dp=dp),
    )
    return StepStream(settings)


def run_stream(directory: Path, num_tokens: int) -> tuple[float, np.ndarray]:
    """Tokens per CPU-second, and milliseconds of each global batch, after a warm-up of three windows."""
    stream = open_stream(directory)
    steps = iter(stream)
    for _ in range(WARM_TOKENS // STEP_TOKENS):
        next(steps)
    began_cpu, taken = time.process_time(), []
    for _ in range(num_tokens // STEP_TOKENS):
        began = time.perf_counter()
        next(steps)
        taken.append((time.perf_counter() - began) * 1e3)
    rate = len(taken) * STEP_TOKENS / (time.process_time() - began_cpu)
    stream.close()
    return rate, np.array(taken)


def amplification(directory: Path, num_tokens: int, *, dp: int = 1, cache: str = CACHE) -> float:
    """Bytes decoded over bytes served, by one of dp leaders that read for themselves."""
    stream = open_stream(directory, dp=dp, cache=cache)
    report = None
    for _, step in zip(range(num_tokens // STEP_TOKENS), stream, strict=False):
        report = step.header.report
    stream.close()
    assert report is not None
    return report.reading["bytes_decoded"] / report.reading["bytes_served"]


def amplification_table(num_tokens: int) -> None:
    """How often leaders decode a page of 256 KB."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tokens(directory / "tokens.parquet", num_tokens=num_tokens, page_bytes=256 << 10)
        found = [amplification(directory, num_tokens, dp=dp) for dp in (1, 2, 4)]
        found.append(amplification(directory, num_tokens // 3, cache=SMALL_CACHE))
    print("dp 1 | dp 2 | dp 4 | cache of half a window")
    print(" | ".join(f"{each:.2f}" for each in found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=30_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("amplification",))
    args = parser.parse_args()
    torch.set_num_threads(1)
    amplification_table(args.tokens)
    if args.only:
        return
    print(
        "\npage KB | decode Mtok/CPU-s | plain / decode | torchmix / decode | torchmix / plain | "
        "batch ms p50, p99, max | p99/p50"
    )
    for page_kb in (64, 256, 1024):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            path = directory / "tokens.parquet"
            write_tokens(path, num_tokens=args.tokens, page_bytes=page_kb << 10)
            rates, times = [], []
            for _ in range(args.rounds):
                ours, batches = run_stream(directory, args.tokens)
                rates.append((decode_rate(path), plain_rate(path), ours))
                times.append(np.percentile(batches, [50, 99, 100]))
            decode, plain, ours = np.median(rates, axis=0)
            of_decode = np.median([(row[1] / row[0], row[2] / row[0]) for row in rates], axis=0)
            p50, p99, top = np.median(times, axis=0)
            print(
                f"{page_kb} | {decode / 1e6:.1f} | {of_decode[0]:.2f} | {of_decode[1]:.2f} | "
                f"{ours / plain:.2f} | {p50:.1f}, {p99:.1f}, {top:.1f} | {p99 / p50:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
