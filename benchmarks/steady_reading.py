"""Steady reading of Parquet: tokens per CPU-second, batches' times, memory and bytes, by reader, in one run.

    python benchmarks/steady_reading.py [--tokens 128000000] [--rounds 5] [--quick]
    python benchmarks/steady_reading.py --grow

S files share the tokens: lists of int32 in zstd with Arrow's default dictionaries, documents of 800 tokens on average.
Each reader is a process of its own; all of a case run at once and are asked in turn for short windows, so that they
meet the same machine. A batch is 256 x 4096 tokens for everybody. CPU seconds are user and
system time of the process tree, from /proc; bytes are those of /proc/PID/io: `rchar`, what read calls returned (what is
taken from mapped memory is not in it, as Hugging Face's copy), per token that was given. Memory is the tree's PSS, and
anonymous part of it. The page cache is warm. Figures are medians over rounds; percentiles are over all batches, of
wall time and, for machines that others use, of the process's CPU time.

`--grow` measures memory as the data becomes ten times as much.

A batch is int64 [rows, length] tokens and as many labels, made of shuffled documents laid end to end and cut, by every
reader but two: `decode`, the bound, only decodes; `torchmix loader` gives five tensors per token, documents packed by
best fit and never attending to each other, a mixture of S sources, and a state after each batch. Nobody else here gives
boundaries of documents, an exact resume, or a shuffle that another number of ranks would repeat; nobody but torchdata's
nodes mixes, all others read all files as one corpus.

  decode          pyarrow, whole row groups of all files in random order: `read_row_group`, one thread, no pre-buffering
  torchdata       torchdata's StatefulDataLoader over those row groups, rows through a buffer of 1000
  torchdata nodes its nodes: `MultiNodeWeightedSampler` over a node for each file, which gives the rows of its row
                  groups in random order; then cut
  HF streaming    `load_dataset("parquet", streaming=True).shuffle(buffer_size=1000)`
  HF map-style    `Dataset.from_parquet`, which converts to Arrow files first; then rows in random order
  torchmix reader `torchmix.open_pages`, rows in permuted order: the reader alone
  torchmix loader `torchmix.build_loader`: the whole road
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import IterableDataset
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

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
NODES = "torchdata nodes"
BUFFER_ROWS = 1000
ROWS_A_CALL = 1024
"""Rows that readers of rows are asked for at once; a batch is some 1300."""


class Cut:
    """Documents end to end, cut into tokens and labels."""

    def __init__(self, samples: int, length: int) -> None:
        self._shape, self._want = (samples, length), samples * length + 1
        self._parts: list[np.ndarray] = []
        self._held = 0

    def add(self, tokens: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Add tokens; batches that are full."""
        self._parts.append(tokens)
        self._held += len(tokens)
        while self._held >= self._want:
            joined = np.concatenate(self._parts) if len(self._parts) > 1 else self._parts[0]
            block = torch.from_numpy(joined[: self._want].astype(np.int64))
            self._parts, self._held = [joined[self._want - 1 :]], self._held - self._want + 1
            yield block[:-1].view(self._shape), block[1:].view(self._shape)


def row_groups(files: list[Path]) -> Iterator[Any]:
    """Row groups of all files in random order, for ever."""
    opened = [pq.ParquetFile(file, pre_buffer=False) for file in files]
    places = [(file, group) for file in opened for group in range(file.num_row_groups)]
    rng = np.random.default_rng(0)
    while True:
        for i in rng.permutation(len(places)):
            file, group = places[i]
            yield file.read_row_group(group, columns=["input_ids"], use_threads=False)["input_ids"].combine_chunks()


class RowGroups(IterableDataset):
    """Rows of row groups through a shuffle buffer."""

    def __init__(self, files: list[Path], samples: int, length: int) -> None:
        self.files, self.samples, self.length = files, samples, length

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rng, buffer, cut = np.random.default_rng(1), [], Cut(self.samples, self.length)
        for column in row_groups(self.files):
            values, offsets = column.values.to_numpy(), column.offsets.to_numpy().tolist()
            for start, stop in pairwise(offsets):
                row = values[start:stop]
                if len(buffer) < BUFFER_ROWS:
                    buffer.append(row)
                    continue
                place = int(rng.random() * BUFFER_ROWS)
                row, buffer[place] = buffer[place], row
                yield from cut.add(row)


def decode(files: list[Path], samples: int, length: int) -> Iterator[int]:
    """No batches: how many tokens were decoded."""
    held = 0
    for column in row_groups(files):
        held += len(column.values)
        while held >= samples * length:
            held -= samples * length
            yield samples * length


def torchdata(files: list[Path], samples: int, length: int) -> Iterator[int]:
    """See the top of the file; so the following."""
    for tokens, _ in StatefulDataLoader(RowGroups(files, samples, length), batch_size=None, num_workers=0):
        yield tokens.numel()


class RowsOfFile:
    """Rows of the row groups of one file in random order, for ever."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __iter__(self) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(2)
        for column in row_groups([self.file]):
            values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
            for row in rng.permutation(len(column)).tolist():
                yield values[offsets[row] : offsets[row + 1]]


def torchdata_nodes(files: list[Path], samples: int, length: int) -> Iterator[int]:
    """A source for each file, in equal shares of documents."""
    each = {file.stem: nodes.IterableWrapper(RowsOfFile(file)) for file in files}
    mixed = nodes.MultiNodeWeightedSampler(each, dict.fromkeys(each, 1.0), nodes.StopCriteria.CYCLE_FOREVER)
    cut = Cut(samples, length)
    for row in nodes.Loader(mixed):
        for tokens, _ in cut.add(row):
            yield tokens.numel()


def hf_streaming(files: list[Path], samples: int, length: int) -> Iterator[int]:
    """Epoch after epoch."""
    import datasets

    stream = datasets.load_dataset("parquet", data_files=[str(file) for file in files], split="train", streaming=True)
    shuffled = stream.shuffle(seed=1, buffer_size=BUFFER_ROWS).with_format("arrow")  # the cheapest of its formats
    cut = Cut(samples, length)
    for epoch in count():
        shuffled.set_epoch(epoch)
        for row in shuffled:
            for tokens, _ in cut.add(row["input_ids"].combine_chunks().values.to_numpy()):
                yield tokens.numel()


def hf_map(files: list[Path], samples: int, length: int, told: Callable[..., None], folder: Path) -> Iterator[int]:
    """`told` is given what the conversion costs."""
    import datasets

    datasets.disable_progress_bars()
    began, began_cpu = time.perf_counter(), time.process_time()
    data = datasets.Dataset.from_parquet([str(file) for file in files], cache_dir=str(folder))
    copy_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    told(
        conversion_s=time.perf_counter() - began,
        conversion_cpu_s=time.process_time() - began_cpu,
        copy_mib=copy_bytes / 2**20,
    )
    data = data.with_format("arrow")
    rng, cut = np.random.default_rng(1), Cut(samples, length)
    while True:
        rows = rng.permutation(len(data)).tolist()
        for start in range(0, len(rows), ROWS_A_CALL):
            found = data[rows[start : start + ROWS_A_CALL]]["input_ids"].combine_chunks()
            for tokens, _ in cut.add(found.flatten().to_numpy()):
                yield tokens.numel()


def torchmix_reader(files: list[Path], samples: int, length: int, *, cache: int, window_bytes: int) -> Iterator[int]:
    """`cache` and `window_bytes` are for all files together."""
    import torchmix

    folder = files[0].parent
    pages = torchmix.open_pages(
        [str(file) for file in files],
        tokens="input_ids",
        catalog=folder / "pages-index",
        cache=cache,
        window_pages=1 << 20,
        window_bytes=window_bytes,
    )
    cut = Cut(samples, length)
    for batch in pages.batches(rows=ROWS_A_CALL, seed=1):
        for tokens, _ in cut.add(batch.rows.values.to_numpy()):
            yield tokens.numel()


def torchmix_loader(files: list[Path], samples: int, length: int, *, cache: int, window_bytes: int) -> Iterator[int]:
    """A source for each file, in equal shares."""
    import torchmix
    from torchmix.indexing.scan import index_recipe
    from torchmix.recipe.load import load_recipe

    folder = files[0].parent
    names = [file.stem for file in files]
    path = folder / f"recipe-{len(names)}.yaml"
    units = [10**8 // len(names) + (i < 10**8 % len(names)) for i in range(len(names))]  # millionths of a percent
    lines = [f"  {name}: {{path: {name}.parquet, tokens: input_ids}}" for name in names]
    path.write_text(
        "version: 1\nseed: 1\n"
        f"batch: {{samples: {samples}, length: {length}}}\n"
        f"catalog: loader-index\nsources:\n{chr(10).join(lines)}\n"
        f"mixture: {{{', '.join(f'{name}: {n / 1e6:.6f}%' for name, n in zip(names, units, strict=True))}}}\n"
        f"shuffle: {{window_pages: 1000000, window_bytes: {window_bytes // len(files)}}}\n"
        f"read: {{cache: {cache}}}\n"
    )
    index_recipe(load_recipe(path), folder)
    with torchmix.build_loader(path, micro_batch_size=8, loaders="in_process") as loader:
        for microbatch in loader:
            taken = microbatch.tokens, microbatch.labels, microbatch.position_ids, microbatch.loss_mask
            assert all(each is not None for each in taken)
            if microbatch.is_last_of_step:
                yield samples * length  # padding counts: best fit leaves below 1 %


def batches_of(options: dict[str, Any]) -> Iterator[int]:
    """Tokens of each batch of a contestant."""
    torch.set_num_threads(1)
    files = sorted(Path(options["folder"]).glob("*.parquet"))
    reader, samples = options["reader"], options["samples"]
    window_bytes = (
        options["window_bytes"] if reader == "torchmix loader" else min(options["window_bytes"], WINDOW_BYTES)
    )
    sizes = {"cache": int(2.25 * window_bytes), "window_bytes": window_bytes}
    if reader == "HF map-style":
        copy = Path(options["folder"]) / "huggingface"
        return hf_map(files, samples, LENGTH, lambda **costs: options.update(costs=costs), copy)
    if reader.startswith("torchmix"):
        read = torchmix_reader if reader == "torchmix reader" else torchmix_loader
        return read(files, samples, LENGTH, **sizes)
    return {"decode": decode, "torchdata": torchdata, NODES: torchdata_nodes, "HF streaming": hf_streaming}[reader](
        files, samples, LENGTH
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


def measure(
    folder: Path,
    *,
    rounds: int,
    batches: int,
    readers: tuple[str, ...],
    window_bytes: int,
    samples: int = SAMPLES,
    warm_up: int = 2,
) -> dict[str, Any]:
    """All readers over the files of a folder, after `warm_up` turns of each."""
    found: dict[str, Any] = {}
    contestants = {}
    for reader in readers:
        contestant = Contestant(__file__, reader=reader, folder=str(folder), window_bytes=window_bytes, samples=samples)
        answer = contestant.ask(batches=1)
        contestant.ask(batches=warm_up * batches)  # over the first windows, so that memory is used again
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
            contestant.ask(batches=MADE_AHEAD * SAMPLES // samples)
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
