"""Synthetic token files for benchmarks: log-normal documents of zipf-like ids, in pages of a chosen size.

The corpus of the notes this follows: lists of int32, zstd, dictionary encoding as Arrow writes it by default, pages of
64 KB to 1 MB, mean length 800 tokens. Real text compresses better; ratios within one file are what to compare.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

MEAN_TOKENS = 800


def write_tokens(path: Path, *, num_tokens: int, page_bytes: int, row_group_rows: int = 8_000, seed: int = 1) -> None:
    """One file of about `num_tokens` tokens, in row groups of `row_group_rows` documents."""
    rng = np.random.default_rng(seed)
    num_documents = num_tokens // MEAN_TOKENS
    lengths = np.clip(rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, num_documents), 8, 32_768).astype(np.int64)
    ids = np.minimum(rng.zipf(1.2, int(lengths.sum())), 50_256).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))})
    pq.write_table(
        table,
        path,
        compression="zstd",
        data_page_size=page_bytes,
        row_group_size=row_group_rows,
        write_batch_size=16,
        write_page_index=True,
    )


def write_recipe(directory: Path, *, samples: int, length: int, cache: str, window_bytes: str = "16MiB") -> Path:
    """A recipe over all `*.parquet` in `directory` as one source."""
    path = directory / "recipe.yaml"
    path.write_text(
        f"""version: 1
seed: 1
batch: {{samples: {samples}, length: {length}}}
sources:
  tokens: {{path: "*.parquet", tokens: input_ids}}
mixture: {{tokens: 100%}}
packing: {{method: best_fit, align_tokens: 8}}
shuffle: {{window_pages: 1000000, window_bytes: {window_bytes}}}
read: {{cache: {cache}}}
"""
    )
    return path
