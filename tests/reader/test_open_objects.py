"""Sources in a store: the same pages as from local files, asked for together and ahead, and refused if they changed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.catalogs import World
from tests.support.formats import format_world
from tests.support.memory_store import in_store, memory_store
from tests.support.reading import expected, random_pieces, read_with_successors
from torchmix.catalog.store import Catalog
from torchmix.errors import SourceChanged, SourceUnreadable
from torchmix.indexing.scan import catalog_of_part, index_recipe
from torchmix.reader import page_store as coming_pages
from torchmix.reader.open_files import RangeFetch
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.parts import part_of


class Stored:
    """A world of all formats in a store of this process."""

    def __init__(self, directory: Path, world: World, system: Any) -> None:
        self.world = world
        self.system = system
        self.directory = directory

    def index(self) -> Catalog:
        recipe = in_store(self.world.recipe, "memory://bucket", str(self.directory / "far"))
        return index_recipe(recipe, self.directory / "data")

    def key(self, name: str) -> str:
        return f"/bucket/{name}"


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stored]:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    (tmp_path / "data").mkdir()
    world = format_world(tmp_path / "data", 3, num_documents=120)
    with memory_store(tmp_path / "data") as system:
        yield Stored(tmp_path, world, system)


@pytest.fixture
def make_reader(stored: Stored) -> Iterator[Any]:
    readers: list[Reader] = []

    def make(catalog: Catalog, cache_bytes: int = 1 << 22) -> Reader:
        readers.append(Reader(catalog, stored.directory, cache_bytes=cache_bytes))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, stored: Stored) -> list[tuple[str, int, int]]:
    """Ranges that the store was asked for: path, first byte, byte behind the last."""
    asked: list[tuple[str, int, int]] = []
    real = type(stored.system).cat_file

    def cat_file(self, path, start=None, end=None, **options):
        asked.append((path, start, end))
        return real(self, path, start=start, end=end, **options)

    monkeypatch.setattr(type(stored.system), "cat_file", cat_file)
    return asked


def test_a_catalog_of_objects_is_that_of_files_and_pieces_are_the_same(stored, make_reader) -> None:
    far = stored.index()
    near = stored.world.index()
    assert far.fingerprint == near.fingerprint
    paths = [file.path for source in far.sources.values() for file in source.files]
    assert len(paths) == 14 and all(path.startswith("memory://bucket/") for path in paths)
    rng = np.random.default_rng(1)
    for cache_bytes in (1 << 22, 0):
        reader = make_reader(far, cache_bytes)
        for _ in range(5):
            pieces = random_pieces(stored.world, rng, 200)
            found = read_with_successors(reader, pieces)
            assert found.tolist() == expected(stored.world, pieces).tolist()


def test_pages_of_a_call_are_asked_for_together(stored, make_reader, asked) -> None:
    far = stored.index()
    reader = make_reader(far)
    pieces = random_pieces(stored.world, np.random.default_rng(2), 3000)
    asked.clear()
    read_with_successors(reader, pieces)
    of_file: dict[str, int] = {}
    for path, _, _ in asked:
        of_file[path] = of_file.get(path, 0) + 1
    # Each is smaller than a gap: a request for its ends, by which it is known, and one for all of its pages.
    assert len(of_file) == 14 and set(of_file.values()) == {2}


def test_pages_that_were_warmed_are_on_their_way_until_they_are_due(stored, make_reader, asked, monkeypatch) -> None:
    far = stored.index()
    source = list(far.sources).index("parquet")
    pages = far.sources["parquet"].pages
    reader = make_reader(far)
    whole = [reader.page(source, page).values.tolist() for page in range(pages.num_pages)]
    reader = make_reader(far)
    first, rest = np.arange(2), np.arange(2, pages.num_pages)
    reader.warm(source, first)
    with monkeypatch.context() as patched:
        patched.setattr(RangeFetch, "is_here", False)
        reader.warm(source, rest)
    assert reader.stats()["pages_decoded"] == 0 and reader.stats()["cache_pages"] == 0
    monkeypatch.setattr(RangeFetch, "is_here", True)
    num_asked = len(asked)
    reader.warm(source, rest)  # they are on their way already
    assert len(asked) - num_asked <= 2 and reader.stats()["cache_pages"] == pages.num_pages
    asked.clear()
    assert [reader.page(source, page).values.tolist() for page in range(pages.num_pages)] == whole
    assert not asked and reader.stats()["cache_misses"] == 0


def test_a_page_that_is_needed_before_the_next_call_is_waited_for(stored, make_reader, asked) -> None:
    far = stored.index()
    reader = make_reader(far)
    reader.warm(0, np.arange(3))
    assert reader.page(0, 1).values is not None
    assert reader.stats()["cache_misses"] == 0 and reader.stats()["pages_decoded"] == 3


def test_no_more_calls_are_on_their_way_than_may_be(stored, make_reader, monkeypatch) -> None:
    far = stored.index()
    source = list(far.sources).index("parquet")
    monkeypatch.setattr(coming_pages, "MOST_COMING", 2)
    monkeypatch.setattr(RangeFetch, "is_here", False)
    reader = make_reader(far)
    for page in range(5):
        reader.warm(source, np.array([page]))
    assert reader.stats()["cache_pages"] == 2


def test_what_fails_on_its_way_is_told_to_who_needs_it(stored, make_reader, monkeypatch) -> None:
    monkeypatch.setattr(RangeFetch, "is_here", True)
    far = stored.index()
    source = list(far.sources).index("lines")
    stored.system.rm(stored.key("lines/0.jsonl"))
    reader = make_reader(far)
    reader.warm(source, np.arange(1))
    with pytest.raises(SourceUnreadable, match=r"memory://bucket/lines/0.jsonl.*deleted or moved"):
        reader.warm(source, np.arange(1, 2))
    with pytest.raises(SourceUnreadable, match=r"memory://bucket/lines/0.jsonl.*deleted or moved"):
        reader.page(source, 0)


def test_a_reader_may_be_closed_while_pages_are_on_their_way(stored, make_reader) -> None:
    reader = make_reader(stored.index())
    reader.warm(0, np.arange(3))
    reader.close()
    assert reader._store._requests.held_bytes == 0


@pytest.mark.parametrize("name", ["parquet/0.parquet", "lines/1.jsonl", "gzip/0.jsonl.gz", "stream/1.arrow"])
def test_an_object_that_changed_since_it_was_indexed_is_not_read(stored, make_reader, name: str) -> None:
    far = stored.index()
    key = stored.key(name)
    content = stored.system.cat_file(key)
    source = list(far.sources).index(name.split("/")[0])
    last = far.sources[name.split("/")[0]].pages.num_pages - 1
    altered = bytearray(content)
    altered[-20] ^= 1
    for other, says in ((content + b"x", "has [0-9]+ bytes; it was indexed with"), (bytes(altered), "has footer hash")):
        stored.system.pipe_file(key, other)
        with pytest.raises(SourceChanged, match=f"memory://bucket/{name}: it {says}"):
            make_reader(far).page(source, 0 if "/0." in name else last)
    stored.system.pipe_file(key, content)
    make_reader(far).page(source, 0 if "/0." in name else last)


def test_a_changed_object_is_scanned_again_and_others_are_not(stored, tmp_path, caplog) -> None:
    before = stored.index()
    content = (tmp_path / "data" / "numbers" / "0.ndjson").read_bytes()
    stored.system.pipe_file(stored.key("numbers/0.ndjson"), content + b"\n" + b'{"v": [1, 2, 3]}\n')
    after = stored.index()
    assert "changed memory://bucket/numbers/0.ndjson" in caplog.text
    assert after.sources["numbers"].num_documents == before.sources["numbers"].num_documents + 1
    same = [name for name in before.sources if before.sources[name].fingerprint == after.sources[name].fingerprint]
    assert sorted(set(before.sources) - set(same)) == ["numbers"]


def test_sources_and_catalog_may_lie_in_one_store(stored, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHMIX_CACHE", str(tmp_path / "cache"))
    near = stored.index()
    whole = check_recipe(in_store(stored.world.recipe, "memory://bucket", "memory://bucket/run/catalog"))
    index_recipe(whole, tmp_path)
    far = catalog_of_part(part_of(whole, "train"), whole, tmp_path)
    assert far.fingerprint == near.fingerprint and str(far.directory).startswith(str(tmp_path / "cache"))
