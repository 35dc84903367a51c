"""Readers of the same Parquet files, each an endless iterator of batches: what `steady_reading.py` compares.

A batch is int64 [rows, length] tokens and as many labels, made of shuffled documents laid end to end and cut, by every
reader but two: `decode`, the bound, only decodes; `torchmix loader` gives five tensors per token, documents packed by
best fit and never attending to each other, a mixture of S sources, and a state after each batch. Nobody else here gives
boundaries of documents, a mixture, an exact resume, or a shuffle that another number of ranks would repeat. All of them
read all files as one corpus.

  decode          pyarrow, whole row groups of all files in random order: `read_row_group`, one thread, no pre-buffering
  torchdata       torchdata's StatefulDataLoader over those row groups, rows through a buffer of 1000
  HF streaming    `load_dataset("parquet", streaming=True).shuffle(buffer_size=1000)`
  HF map-style    `Dataset.from_parquet`, which converts to Arrow files first; then rows in random order
  torchmix reader `torchmix.open_pages`, rows in permuted order: the reader alone
  torchmix loader `torchmix.build_loader`: the whole road
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

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
            if microbatch.is_last_of_step:
                yield samples * length  # padding counts: best fit leaves below 1 %
