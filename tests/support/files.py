"""Parquet files for tests: documents in, a file out, with each of the writer's choices that alters how pages lie.

`None` as a document is a null row. The defaults give a small file of several row groups with several pages each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WORDS = ("alpha", "Straße", "", "日本語", "naïve", "x", "🙂", "the quick brown fox ", "\n", "1234567890")


def random_tokens(
    seed: int, num_documents: int, *, mean_tokens: float = 20.0, vocabulary: int = 1000, empty: float = 0.05
) -> list[list[int]]:
    """Documents of log-normal length, zipf-like ids below `vocabulary`; a part `empty` of them has no tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(mean_tokens), 0.8, num_documents).astype(np.int64)
    lengths[rng.random(num_documents) < empty] = 0
    ids = np.minimum(rng.zipf(1.3, int(lengths.sum())), vocabulary - 1)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if num_documents else []


def random_texts(seed: int, num_documents: int, *, mean_words: float = 8.0) -> list[str]:
    """Texts of one to four bytes a character; some are empty."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(mean_words, num_documents) * (rng.random(num_documents) > 0.05)
    return ["".join(WORDS[i] for i in rng.integers(0, len(WORDS), count)) for count in counts]


def make_tokens_file(
    path: Path,
    documents: Sequence[Sequence[int] | None],
    *,
    column: str = "input_ids",
    type: pa.DataType | None = None,
    **choices: Any,
) -> Path:
    """Write documents as a list column (`type`, by default list<int32>) beside an `id` column; see `write_file`."""
    array = pa.array(documents, type or pa.list_(pa.int32()))
    return write_file(path, pa.table({"id": np.arange(len(documents)), column: array}), **choices)


def make_text_file(
    path: Path,
    texts: Sequence[str | None],
    *,
    column: str = "text",
    type: pa.DataType | None = None,
    **choices: Any,
) -> Path:
    """Write texts as a string column (`type`, by default string) beside an `id` column; see `write_file`."""
    array = pa.array(texts, type or pa.string())
    return write_file(path, pa.table({"id": np.arange(len(texts)), column: array}), **choices)


def write_file(
    path: Path,
    table: pa.Table,
    *,
    codec: str = "zstd",
    page_bytes: int = 2048,
    row_group_rows: int = 400,
    page_index: bool = True,
    page_version: str = "1.0",
    dictionary: bool = False,
    checksums: bool = False,
    encoding: dict[str, str] | None = None,
    store_schema: bool = True,
) -> Path:
    """Write a table to `path`, with its folder, and return `path`.

    `encoding` maps paths of leaf columns ("input_ids.list.element") to encodings and needs `dictionary=False`.
    Small `write_batch_size` lets pages be nearly as small as `page_bytes`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        table,
        path,
        compression=codec,
        data_page_size=page_bytes,
        row_group_size=row_group_rows,
        write_page_index=page_index,
        data_page_version=page_version,
        use_dictionary=dictionary,
        write_page_checksum=checksums,
        column_encoding=encoding,
        store_schema=store_schema,
        write_batch_size=16,
    )
    return path


def flip_byte(path: Path, offset: int) -> None:
    """Invert every bit of one byte of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)
