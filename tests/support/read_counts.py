"""Data that no process maps, and what all processes of a test decode and encode of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.catalogs import open_catalog
from tests.support.files import make_tokens_file, random_texts, random_tokens
from tests.support.json_lines import framed, json_lines
from tests.support.patient_fleets import SITE
from tests.support.read_notes import note_all
from torchmix.indexing.scan import index_recipe
from torchmix.reader.page_cache import DecodeCount, PageCache
from torchmix.recipe.load import load_recipe
from torchmix.transform.tokenizer import TextEncoder

HOOK = f"""
from tests.support.read_notes import note_all
note_all()
{SITE}
"""
"""Runs as an interpreter starts. A slow loader is waited for: what others read in its place would count twice."""
READING = """\
version: 1
seed: 3
batch: {samples: 64, length: 64}
sources:
  lists: {path: "lists-*.parquet", tokens: input_ids}
  lines: {path: lines.jsonl.gz, text: text, tokenizer: bytes}
  books: {path: books.parquet, tokens: input_ids}
mixture: {lists: 40%, lines: 30%, books: 30%}
shuffle: {window_pages: 8}
read: {cache: 160KiB}
"""
NUM_LINES = 1200


def write_reading(folder: Path) -> Path:
    """Sources that no process maps, of more windows than fit the cache; one has documents of 300 samples."""
    for number in range(2):
        make_tokens_file(folder / f"lists-{number}.parquet", random_tokens(number, 1500), codec="zstd", page_bytes=900)
    lines = framed(json_lines(random_texts(7, NUM_LINES)), ".gz", mean_bytes=900, at_lines=True)
    (folder / "lines.jsonl.gz").write_bytes(lines)
    books = [*random_tokens(9, 30, mean_tokens=500.0, empty=0.0), list(range(64 * 300))]
    make_tokens_file(folder / "books.parquet", books, codec="zstd", page_bytes=900)
    path = folder / "recipe.yaml"
    path.write_text(READING)
    index_recipe(load_recipe(path), folder)
    return path


class Kept(NamedTuple):
    """The caches of a room, after a change."""

    process: int
    room_bytes: int
    cache_bytes: int
    """Of all caches of the room."""
    num_in_use: int
    """Caches that hold something."""


class ReadCounts:
    """What this process, and those that it starts from now on, decode and encode."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """`folder` is new."""
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HOOK)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
        patch.setenv("DECODES", str(folder / "decodes"))
        patch.setenv("ENCODES", str(folder / "encodes"))
        patch.setenv("KEPT", str(folder / "kept"))
        self._folder = folder
        patch.setattr(DecodeCount, "add", DecodeCount.add)  # restored afterwards
        patch.setattr(TextEncoder, "encode", TextEncoder.encode)
        patch.setattr(PageCache, "_count", PageCache._count)
        note_all()

    def amplification(self, recipe: Path) -> float:
        """Pages decoded over pages of the catalog, all of which must have been."""
        found = (self._folder / "decodes").read_text().split()
        catalog = open_catalog(load_recipe(recipe), recipe.parent)
        assert len(set(found)) == sum(source.pages.num_pages for source in catalog.sources.values())
        return len(found) / len(set(found))

    @property
    def kept(self) -> list[Kept]:
        """What caches of decoded pages held, each time that it changed."""
        return [Kept(*map(int, line.split())) for line in (self._folder / "kept").read_text().splitlines()]

    @property
    def rows_encoded(self) -> int:
        """Rows of text, each time that they were encoded."""
        return sum(map(int, (self._folder / "encodes").read_text().split()))
