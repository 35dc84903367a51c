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
from torchmix.indexing.scan import index_recipe
from torchmix.reader import reader
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader, Tokens
from torchmix.recipe.structs import Recipe

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
        return self.reader.read(WantedPieces.end_to_end(source=0, row=rows, epoch=0, start=0, tokens=tokens))

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


def test_pieces_come_from_the_mapping_and_nothing_is_kept(reading):
    reading.check(ALL)
    stats = reading.reader.stats()
    assert (stats["cache_pages"], stats["cache_bytes"], stats["pages_decoded"]) == (0, 0, 0)
    assert stats["bytes_read"] == stats["bytes_served"] == 2 * sum(map(len, reading.documents))
    assert stats["decode_amplification"] == 1
    assert reading.read(ALL[:5]).values.dtype == np.uint16
    assert [mappings(path) for path in reading.paths] == [1] * NUM_FILES


def test_a_mapping_holds_no_descriptor_and_ends_with_its_window(reading):
    reading.check(ALL)
    reading.reader.forget(0, np.arange(3))
    gc.collect()
    assert sum(mappings(path) for path in reading.paths) == 0
    reading.check(ALL[:2])
    assert [descriptors(path) for path in reading.paths] == [1] * NUM_FILES  # what `pread` would use
    reading.reader.close()
    gc.collect()
    assert sum(descriptors(path) + mappings(path) for path in reading.paths) == 0


def test_a_whole_page_is_a_view_that_outlives_its_mapping(reading):
    table = reading.catalog.sources["web"].pages
    for page in range(table.num_pages):
        found = reading.reader.page(0, page)
        first, stop = table.first_row[page : page + 2].tolist()
        assert np.diff(found.offsets).tolist() == [len(document) for document in reading.documents[first:stop]]
        reading.reader.forget(0, np.array([page]))
        assert found.values.tolist() == [token for document in reading.documents[first:stop] for token in document]
        assert not found.values.flags.writeable
    assert reading.reader.stats()["decode_amplification"] == 1
    assert reading.reader.stats()["cache_pages"] == 0


def test_pages_that_are_warmed_are_asked_of_the_kernel(reading, monkeypatch):
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: asked.append((offset, length, advice)))
    table = reading.catalog.sources["web"].pages
    pages = np.array([5, 0, table.num_pages - 1])
    reading.reader.warm(0, pages)
    place = table.place(np.array(pages))
    ranges = [
        (int(at), int(size), os.POSIX_FADV_WILLNEED) for at, size in zip(place.offset, place.num_bytes, strict=True)
    ]
    assert sorted(asked) == sorted(ranges)
    assert reading.reader.stats()["cache_pages"] == 0


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
    monkeypatch.setattr(reader, "CHECK_EVERY_S", 0)
    with pytest.raises(SourceChanged, match=rf"1\.bin: it has {size - 2} bytes; it was indexed with {size}"):
        reading.read(ALL)


def test_a_file_that_is_overwritten_in_place_is_told(reading, monkeypatch):
    reading.check(ALL)
    content = reading.paths[2].read_bytes()
    with reading.paths[2].open("r+b") as file:
        file.write(content[::-1])
    os.utime(reading.paths[2], ns=(1, 1))
    monkeypatch.setattr(reader, "CHECK_EVERY_S", 0)
    with pytest.raises(SourceChanged, match=r"2\.bin: it has footer hash"):
        reading.read(ALL)


def test_a_file_that_is_replaced_touched_or_deleted_stays_the_indexed_one(reading, monkeypatch, tmp_path, caplog):
    reading.check(ALL)
    monkeypatch.setattr(reader, "CHECK_EVERY_S", 0)
    (tmp_path / "new").write_bytes(b"something else")
    shutil.move(tmp_path / "new", reading.paths[0])
    os.utime(reading.paths[1], ns=(1, 1))
    reading.paths[2].unlink()
    for _ in range(3):
        reading.check(ALL)
    [record] = caplog.records
    assert f"{reading.paths[0].name}: another file lies there" in record.getMessage()


def test_files_are_looked_at_no_more_often_than_that(reading, monkeypatch):
    reading.check(ALL)
    looked: list[int] = []
    monkeypatch.setattr(reader, "CHECK_EVERY_S", 1e9)
    monkeypatch.setattr(reading.reader._sources[0]._files, "check_in_place", looked.append)
    for _ in range(5):
        reading.check(ALL)
    assert not looked
