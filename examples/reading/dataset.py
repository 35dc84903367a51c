"""A torch dataset over Parquet, JSON lines or Megatron's files as they are: shuffled by page, resumable, 50 lines.

python examples/reading/dataset.py "data/*.parquet" --tokens input_ids
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

import torchmix

ROWS = 128
"""Rows read by one call."""


class Rows(IterableDataset[torch.Tensor]):
    """Token ids of one row after the other, for ever. Readers, the workers of all ranks, take windows in turn."""

    def __init__(self, pages: torchmix.Pages, *, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.pages, self.seed, self.rank, self.world_size = pages, seed, rank, world_size
        self.place = (0, 0, 0)  # where the next row is; torchmix knows what it means

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "pages": self.pages.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["pages"] == self.pages.fingerprint, "the files have changed, and with them the order"
        self.place = tuple(state["place"])

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        workers, worker_id = (1, 0) if worker is None else (worker.num_workers, worker.id)
        reader, readers = self.rank * workers + worker_id, self.world_size * workers
        for batch in self.pages.batches(rows=ROWS, seed=self.seed, start=self.place, reader=reader, readers=readers):
            tokens = torch.from_dlpack(batch.rows.values)
            for used, (begin, end) in enumerate(pairwise(batch.rows.offsets.to_numpy().tolist()), 1):
                self.place = tuple(batch.place_after(used))
                yield tokens[begin:end].long()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("path")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--catalog", default="pages-index")
    parser.add_argument("--rows", type=int, default=10_000)
    options = parser.parse_args()
    pages = torchmix.open_pages(options.path, tokens=options.tokens, catalog=options.catalog)
    loader = torch.utils.data.DataLoader(Rows(pages, seed=1), batch_size=None, num_workers=1)
    began = time.perf_counter()
    num_tokens = sum(len(tokens) for tokens in islice(loader, options.rows))
    seconds = time.perf_counter() - began
    print(f"{pages.num_rows:,} rows in {pages.num_pages:,} pages; read {options.rows:,} rows, {num_tokens:,} tokens")
    print(f"{num_tokens / seconds:,.0f} tokens a second, the start of the worker included")


if __name__ == "__main__":
    main()
