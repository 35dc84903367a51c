"""Megatron's datasets in an object store: found, indexed and read as on a disk, by ranges instead of mapped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.memory_store import memory_store
from tests.support.recipes import make_recipe
from torchmix.catalog.store import Catalog, IdLimit
from torchmix.cli.init.megatron_blend import num_documents, samples_of_one_pass
from torchmix.errors import SourceChanged, SourceUnreadable
from torchmix.formats.megatron.files import find_datasets
from torchmix.formats.megatron.source import IndexedSource
from torchmix.indexing.scan import index_recipe
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Recipe


class Stored:
    """Three datasets below `memory://bucket/d`, and the same on a disk."""

    def __init__(self, directory: Path, system: Any, rows: list[list[int]]) -> None:
        self.directory, self.system, self.rows = directory, system, rows

    def recipe(self, path: str, catalog: str = "far") -> Recipe:
        recipe = make_recipe({"web": "100%"}, sources={"web": {"path": path, "tokens": None}})
        return check_recipe(msgspec.structs.replace(recipe, catalog=catalog))

    def index(self, path: str = "memory://bucket/d/*.idx", catalog: str = "far") -> Catalog:
        return index_recipe(self.recipe(path, catalog), self.directory)

    def read(self, catalog: Catalog, limit: IdLimit | None = None) -> list[list[int]]:
        """All documents, from the last to the first."""
        rows = np.arange(len(self.rows))[::-1]
        tokens = catalog.sources["web"].sizes.tokens[rows].astype(np.int64)
        wanted = WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=tokens)
        with closing(Reader(catalog, self.directory, cache_bytes=1 << 22, ids=limit)) as reader:
            reader.warm(0, np.arange(catalog.sources["web"].pages.num_pages))
            found = reader.read(wanted).values
            stats = reader.stats()
        assert (
            stats["pages_decoded"] == catalog.sources["web"].pages.num_pages
            or "bucket" not in catalog.sources["web"].files[0].path
        )
        return [found[place : place + count].tolist() for place, count in zip(wanted.places, tokens, strict=True)][::-1]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stored]:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    rows: list[list[int]] = []
    for number, name in enumerate(("a", "b", "c_text_document")):
        sequences = random_sequences(number, 300, mean_tokens=800, dtype="int32")
        sequences = [np.abs(sequence) % 50_000 for sequence in sequences]
        write_dataset(tmp_path / "d" / name, sequences, dtype="int32")
        rows += [sequence.tolist() for sequence in sequences]
    with memory_store(tmp_path) as system:
        yield Stored(tmp_path, system, rows)


def test_the_catalog_and_the_tokens_are_those_of_files(stored: Stored) -> None:
    far, near = stored.index(), stored.index("d/*.idx", "near")
    assert far.fingerprint == near.fingerprint
    assert [file.path for file in far.sources["web"].files] == [
        "memory://bucket/d/a.bin",
        "memory://bucket/d/b.bin",
        "memory://bucket/d/c_text_document.bin",
    ]
    assert stored.read(far) == stored.read(near) == stored.rows


def test_a_source_may_mix_stores_and_disks(stored: Stored) -> None:
    recipe = stored.recipe("d/a.idx")
    source = msgspec.structs.replace(recipe.sources["web"], path=("d/a.idx", "memory://bucket/d/[bc]*.idx"))
    catalog = index_recipe(msgspec.structs.replace(recipe, sources={"web": source}), stored.directory)
    assert stored.read(catalog) == stored.rows


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("memory://bucket/d/a", ["a"]),
        ("memory://bucket/d/a.bin", ["a"]),
        ("memory://bucket/d/a.idx", ["a"]),
        ("memory://bucket/d/*_document", ["c_text_document"]),
        ("memory://bucket/d/*", ["a", "b", "c_text_document"]),
        ("memory://bucket/**/[ab]", ["a", "b"]),
    ],
)
def test_prefixes_files_and_globs_name_datasets(stored: Stored, pattern: str, found: list[str]) -> None:
    assert find_datasets("web", [pattern], stored.directory) == [f"memory://bucket/d/{name}.bin" for name in found]


def test_what_is_not_there_is_named(stored: Stored) -> None:
    with pytest.raises(SourceUnreadable, match=r"'memory://bucket/d/aa.idx' is missing; nearest to 'aa.idx'"):
        stored.index("memory://bucket/d/aa.idx")
    stored.system.rm_file("/bucket/d/b.bin")
    with pytest.raises(SourceUnreadable, match=r"source 'web': memory://bucket/d/b.bin.*cannot be opened"):
        stored.index()


@pytest.mark.parametrize("half", ["b.bin", "b.idx"])
def test_a_dataset_that_was_replaced_is_noticed_before_it_is_read(stored: Stored, half: str) -> None:
    catalog = stored.index()
    content = bytearray(stored.system.cat_file(f"/bucket/d/{half}"))
    content[-1] ^= 1
    stored.system.pipe_file(f"/bucket/d/{half}", bytes(content))
    with pytest.raises(SourceChanged, match=r"memory://bucket/d/b\.bin"):
        stored.read(catalog)


def test_ids_are_looked_at_as_they_are_read(stored: Stored) -> None:
    catalog = stored.index()
    largest = max(max(row, default=0) for row in stored.rows)
    assert stored.read(catalog, IdLimit(largest + 1, "x")) == stored.rows
    with pytest.raises(SourceUnreadable, match=f"memory://bucket/d/.*.bin: row [0-9]+ holds the token {largest}"):
        stored.read(catalog, IdLimit(largest, "vocab_size is smaller"))


def test_sizes_for_a_recipe_of_a_blend_come_from_stores_too(stored: Stored) -> None:
    place, local = "memory://bucket/d/a.bin", str(stored.directory / "d" / "a.bin")
    assert num_documents(place) == num_documents(local) == 300
    sizes = [samples_of_one_pass(one, seq_length=64, documents=("0%", "50%")) for one in (place, local)]
    assert sizes[0] == sizes[1] > 100


def test_check_looks_at_the_index(stored: Stored) -> None:
    IndexedSource(name="web").check("memory://bucket/d/a.bin")
    stored.system.pipe_file("/bucket/d/a.idx", b"MMIDIDX")
    with pytest.raises(SourceUnreadable, match="less than a header"):
        IndexedSource(name="web").check("memory://bucket/d/a.bin")
