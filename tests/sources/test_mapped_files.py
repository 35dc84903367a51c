from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.recipes import make_recipe
from torchmix.errors import SourceChanged
from torchmix.recipe.structs import Recipe
from torchmix.sources import mapped_files
from torchmix.sources.reader import Reader, Tokens
from torchmix.sources.scan import index_recipe

RECIPE: Recipe = make_recipe({"web": "100%"}, sources={"web": {"path": "*.idx", "tokens": None}})
NUM_FILES = 3


class Reading:
    """A reader of three datasets of one source, and their documents."""

    def __init__(self, directory: Path) -> None:
        self.paths: list[Path] = []
        self.documents: list[list[int]] = []
        for number in range(NUM_FILES):
            sequences = random_sequences(number, 120, mean_tokens=3000, empty=0)
            self.paths.append(write_dataset(directory / str(number), sequences))
            self.documents += [sequence.tolist() for sequence in sequences]
        self.catalog = index_recipe(RECIPE, directory)
        self.reader = Reader(self.catalog, directory, cache_bytes=1 << 22)

    def read(self, rows: NDArray[np.int64]) -> Tokens:
        tokens = self.catalog.sources["web"].sizes.tokens[rows].astype(np.int64)
        return self.reader.read(
            np.zeros(len(rows), np.int32),
            rows,
            np.zeros(len(rows), np.int64),
            tokens,
            places=np.cumsum(tokens) - tokens,
            num_places=int(tokens.sum()),
        )

    def check(self, rows: NDArray[np.int64]) -> None:
        expected = [token for row in rows.tolist() for token in self.documents[row]]
        assert self.read(rows).values.tolist() == expected


@pytest.fixture
def reading(tmp_path: Path) -> Iterator[Reading]:
    reading = Reading(tmp_path)
    yield reading
    reading.reader.close()


def mappings(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors(path: Path) -> int:
    return sum(os.path.realpath(link) == str(path) for link in Path("/proc/self/fd").iterdir())


ALL = np.random.default_rng(1).permutation(NUM_FILES * 120)


def test_pages_are_views_that_take_no_memory_of_the_cache(reading):
    reading.check(ALL)
    stats = reading.reader.stats()
    num_pages = reading.catalog.sources["web"].pages.num_pages
    assert stats["cache_pages"] == num_pages > 20
    assert stats["cache_bytes"] == 8 * (len(ALL) + num_pages) + 512 * num_pages
    assert stats["bytes_served"] == 2 * sum(map(len, reading.documents))
    assert reading.read(ALL[:5]).values.dtype == np.uint16
    assert [mappings(path) for path in reading.paths] == [1] * NUM_FILES


def test_a_mapping_holds_no_descriptor_and_ends_with_its_last_page(reading):
    reading.check(ALL)
    assert reading.reader.stats()["files_open"] == NUM_FILES
    pages = np.arange(reading.catalog.sources["web"].pages.num_pages)
    reading.reader.forget(0, pages[: len(pages) // 2])
    gc.collect()
    assert sum(mappings(path) for path in reading.paths) < NUM_FILES  # that of the first file has gone
    reading.check(ALL)
    reading.reader.forget(0, pages)
    gc.collect()
    assert sum(mappings(path) for path in reading.paths) == 0
    assert [descriptors(path) for path in reading.paths] == [1] * NUM_FILES  # what `pread` would use


def test_pages_that_are_warmed_are_there_when_they_are_read(reading):
    pages = np.arange(reading.catalog.sources["web"].pages.num_pages)
    reading.reader.warm(0, pages)
    reading.check(ALL)
    assert reading.reader.stats()["cache_misses"] == 0


def test_a_file_that_cannot_be_mapped_is_read(reading, monkeypatch, caplog):
    def refuse(*rest: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(pa, "memory_map", refuse)
    with caplog.at_level(logging.WARNING):
        reading.check(ALL)
        reading.check(ALL)
    assert [record.getMessage().split(": ", 1)[1] for record in caplog.records] == [
        f"{reading.paths[0]} cannot be memory-mapped ([Errno 19] No such device); it is read instead"
    ]
    stats = reading.reader.stats()
    assert stats["bytes_read"] == stats["bytes_decoded"] == 2 * sum(map(len, reading.documents))


def test_a_file_that_is_cut_under_us_is_told_before_it_is_used(reading, monkeypatch):
    reading.check(ALL)
    size = reading.paths[1].stat().st_size
    os.truncate(reading.paths[1], size - 2)
    monkeypatch.setattr(mapped_files, "CHECK_EVERY_S", 0)
    with pytest.raises(SourceChanged, match=rf"1\.bin has {size - 2} bytes; it was indexed with {size}"):
        reading.read(ALL)


def test_a_file_that_is_overwritten_in_place_is_told(reading, monkeypatch):
    reading.check(ALL)
    content = reading.paths[2].read_bytes()
    with reading.paths[2].open("r+b") as file:
        file.write(content[::-1])
    os.utime(reading.paths[2], ns=(1, 1))
    monkeypatch.setattr(mapped_files, "CHECK_EVERY_S", 0)
    with pytest.raises(SourceChanged, match=r"2\.bin has footer hash"):
        reading.read(ALL)


def test_a_file_that_is_replaced_touched_or_deleted_stays_the_indexed_one(reading, monkeypatch, tmp_path):
    reading.check(ALL)
    monkeypatch.setattr(mapped_files, "CHECK_EVERY_S", 0)
    (tmp_path / "new").write_bytes(b"something else")
    shutil.move(tmp_path / "new", reading.paths[0])
    os.utime(reading.paths[1], ns=(1, 1))
    reading.paths[2].unlink()
    for _ in range(3):
        reading.check(ALL)


def test_files_are_looked_at_no_more_often_than_that(reading, monkeypatch):
    reading.check(ALL)
    looked: list[int] = []
    monkeypatch.setattr(mapped_files, "CHECK_EVERY_S", 1e9)
    monkeypatch.setattr(reading.reader._sources[0]._files, "check_in_place", looked.append)
    for _ in range(5):
        reading.check(ALL)
    assert not looked
