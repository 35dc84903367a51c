"""What the kernel says of files: when it is believed, and that nothing is hashed while it stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.catalogs import open_catalog
from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.recipes import make_recipe
from torchmix.catalog.store import Catalog
from torchmix.errors import SourceChanged
from torchmix.formats.megatron import source as indexed
from torchmix.formats.megatron.source import IndexedSource
from torchmix.indexing.scan import index_recipe
from torchmix.reader.open_files import Descriptors, OpenFiles
from torchmix.recipe.structs import Recipe
from torchmix.storage import random_access as file_status
from torchmix.storage.random_access import LocalFile, settled_statuses, statuses


def recipe_of(name: str) -> Recipe:
    recipe = make_recipe({"web": "100%"})
    source = msgspec.structs.replace(recipe.sources["web"], path=name, tokens=None, format="megatron")
    return msgspec.structs.replace(recipe, sources={"web": source})


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A .bin that was last written long ago, as was its .idx."""
    path = write_dataset(tmp_path / "web", random_sequences(3, 40))
    for half in (path, path.with_suffix(".idx")):
        os.utime(half, ns=(1, 1))
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Files count as settled at once; an entry for each dataset that is hashed from now on."""
    monkeypatch.setattr(file_status, "SETTLED_S", -60.0)
    calls: list[int] = []
    real = indexed._fingerprint

    def counted(file: LocalFile, index: LocalFile) -> tuple[int, str]:
        calls.append(file.num_bytes)
        return real(file, index)

    monkeypatch.setattr(indexed, "_fingerprint", counted)
    return calls


def status_of(path: Path, *beside: Path) -> tuple[object, ...]:
    file = LocalFile(path)
    file.close()
    return statuses(file, list(map(str, beside)))


def read_first(catalog: Catalog, directory: Path) -> bytes:
    """The first bytes of the dataset, by a reader that has just begun."""
    descriptors = Descriptors()
    try:
        files = catalog.sources["web"].files
        return OpenFiles(IndexedSource(name="web"), files, directory, descriptors).read(0, 0, 8)
    finally:
        descriptors.close_all()


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def replace(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.write_bytes(path.with_name("old").read_bytes())
    os.utime(path, ns=(1, 1))


def touch(path: Path) -> None:
    os.utime(path, ns=(2, 2))


@pytest.mark.parametrize("alter", [rewrite, replace, touch])
def test_any_writing_shows(dataset, alter):
    before = status_of(dataset)
    assert status_of(dataset) == before and len(before) == 1
    alter(dataset)
    assert status_of(dataset) != before


def test_files_beside_count_and_one_that_is_missing_leaves_nothing(dataset):
    index = dataset.with_suffix(".idx")
    assert status_of(dataset, index) == (*status_of(dataset), *status_of(index))
    assert status_of(dataset, dataset.with_name("none")) == ()


def test_a_file_that_was_just_written_or_named_is_not_believed(dataset, monkeypatch):
    file = LocalFile(dataset)  # its time of writing is old, that of its inode is not
    try:
        monkeypatch.setattr(file_status, "SETTLED_S", 3600.0)
        assert settled_statuses(file) == ()
        monkeypatch.setattr(file_status, "SETTLED_S", -60.0)
        assert settled_statuses(file) == statuses(file) != ()
    finally:
        file.close()


def test_a_dataset_is_hashed_once_and_then_its_status_is_compared(dataset, tmp_path, hashed):
    catalog = index_recipe(recipe_of("web"), tmp_path)
    assert catalog.sources["web"].files[0].status == status_of(dataset, dataset.with_suffix(".idx"))
    assert len(hashed) == 1
    again = open_catalog(recipe_of("web"), tmp_path)
    assert again.sources["web"].files == catalog.sources["web"].files
    assert read_first(again, tmp_path) == dataset.read_bytes()[:8]
    assert len(hashed) == 1


def test_the_status_is_no_part_of_the_identity(dataset, tmp_path, hashed):
    catalog = index_recipe(recipe_of("web"), tmp_path)
    replace(dataset)
    assert read_first(catalog, tmp_path) == dataset.read_bytes()[:8]
    assert len(hashed) == 2
    assert index_recipe(recipe_of("web"), tmp_path).fingerprint == catalog.fingerprint


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("alter", [rewrite, lambda path: path.write_bytes(path.read_bytes() + b"12")])
def test_a_change_of_either_half_is_found(dataset, tmp_path, hashed, suffix: str, alter: Callable[[Path], None]):
    catalog = index_recipe(recipe_of("web"), tmp_path)
    alter(dataset.with_suffix(suffix))
    with pytest.raises(SourceChanged, match="run torchmix index"):
        read_first(catalog, tmp_path)


def test_a_missing_half_is_told_as_it_is_without_a_status(dataset, tmp_path, hashed):
    catalog = index_recipe(recipe_of("web"), tmp_path)
    dataset.with_suffix(".idx").unlink()
    with pytest.raises(SourceChanged, match=r"web\.idx cannot be opened: No such file"):
        read_first(catalog, tmp_path)


def test_a_catalog_without_statuses_is_read_by_hashing(dataset, tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(file_status, "SETTLED_S", 3600.0)
    catalog = index_recipe(recipe_of("web"), tmp_path)
    assert catalog.sources["web"].files[0].status == ()
    before = len(hashed)
    assert read_first(catalog, tmp_path) == dataset.read_bytes()[:8]
    assert len(hashed) == before + 1
