"""Indexes of files made from numbers alone, without data files, and catalogs published from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from torchmix.catalog.file_index import FileIndex
from torchmix.catalog.manifest import IdRange, Manifest
from torchmix.catalog.page_table import PageColumns, PageTable, table_of_file
from torchmix.catalog.publish import catalog_lock, publish, write_source
from torchmix.catalog.settings import settings_of
from torchmix.recipe.structs import Recipe


def make_table(rows_of_chunk: Sequence[Sequence[int]], *, dictionary: bool = False) -> PageTable:
    """The table of one file: for each chunk the rows of its pages; a page has 100 bytes and one more per row."""
    rows = np.array([rows for chunk in rows_of_chunk for rows in chunk], np.int64)
    chunks = len(rows_of_chunk)
    num_bytes = 100 + rows
    return table_of_file(
        PageColumns(
            chunk_of_page=np.repeat(np.arange(chunks, dtype=np.int32), [len(chunk) for chunk in rows_of_chunk]),
            page_offset=4 + np.cumsum(num_bytes) - num_bytes,
            page_bytes=num_bytes,
            page_rows=rows,
            companion_offset=np.full(chunks, 4 if dictionary else -1, np.int64),
            companion_bytes=np.full(chunks, 7 if dictionary else 0, np.int64),
            kind=np.arange(chunks).astype(np.int8),
        )
    )


def make_file_index(rows_of_chunk: Sequence[Sequence[int]], *, seed: int = 0, schema: bytes = b"schema") -> FileIndex:
    """The index of one file of that shape, with lengths drawn in 0 ... 49."""
    table = make_table(rows_of_chunk)
    tokens = np.random.default_rng(seed).integers(0, 50, table.num_rows).astype(np.int32)
    return FileIndex(
        num_bytes=10_000 + seed,
        footer_hash=f"{seed:032x}",
        split_pages=0,
        whole_chunks=False,
        schema=schema,
        pages=table,
        tokens=tokens,
        ids=IdRange(seed, 50_000 + seed),
    )


def publish_files(
    recipe: Recipe, directory: Path, files: Mapping[str, Sequence[tuple[str, FileIndex]]], old: Manifest | None = None
) -> Manifest:
    """Publish these indexes as the recipe's sources, as an index run does."""
    folder = directory / recipe.catalog
    with catalog_lock(folder):
        entries = {
            name: write_source(folder, name, settings_of(recipe.sources, recipe.shuffle)[name], "none-1", indexes)
            for name, indexes in files.items()
        }
        return publish(folder, entries, old)
