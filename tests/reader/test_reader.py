from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from tests.support.catalogs import World, make_world, random_world
from tests.support.files import random_texts, random_tokens
from tests.support.process_table import open_descriptors
from tests.support.reading import Pieces, expected, pieces, random_pieces, read_with_successors, whole_documents
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogStale, LoaderClosed, PlanError
from torchmix.formats.parquet.source import ParquetSource
from torchmix.indexing.scan import index_recipe
from torchmix.reader.page_cache import CacheRoom
from torchmix.reader.reader import Reader

MakeReader = Callable[..., Reader]


@pytest.fixture
def make_reader() -> Iterator[MakeReader]:
    """A reader of a world, or of a catalog of it, that is closed after the test."""
    readers: list[Reader] = []

    def make(
        world: World, cache_bytes: int = 1 << 24, catalog: Catalog | None = None, room: CacheRoom | None = None
    ) -> Reader:
        readers.append(Reader(catalog or world.index(), world.directory, cache_bytes=cache_bytes, room=room))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def assert_reads(reader: Reader, world: World, asked: Pieces) -> None:
    np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))


def test_readers_of_a_room_keep_no_more_than_one_would(tmp_path, make_reader):
    world, room = random_world(tmp_path, seed := 23), CacheRoom()
    rng = np.random.default_rng(seed)
    budget = 60_000
    train, valid = (make_reader(world, budget, room=room) for _ in range(2))
    kept = []
    for _ in range(20):
        for reader in (train, valid):
            assert_reads(reader, world, random_pieces(world, rng, 6))
            kept.append((int(train.stats()["cache_bytes"]), int(valid.stats()["cache_bytes"])))
    assert all(sum(both) <= budget for both in kept)
    assert max(sum(both) for both in kept) > budget / 2 and any(all(both) for both in kept)
    valid.close()
    assert room.num_bytes == int(train.stats()["cache_bytes"])


@pytest.mark.parametrize("cache_bytes", [0, 1, 3_000, 100_000, 1 << 24])
def test_random_pieces_are_the_tokens_of_the_files_at_any_size_of_the_cache(tmp_path, cache_bytes, make_reader):
    world = random_world(tmp_path, seed := 21)
    rng = np.random.default_rng(seed)
    reader = make_reader(world, cache_bytes)
    for count in [0, 1, 2, 50, 400, 3]:
        assert_reads(reader, world, random_pieces(world, rng, count))
        assert reader.stats()["cache_bytes"] <= cache_bytes


@pytest.mark.parametrize(
    "choices",
    [
        {"dictionary": True, "codec": "snappy"},
        {"page_index": False, "page_version": "2.0", "codec": "none"},
        {"page_bytes": 256, "dictionary": True, "page_version": "2.0"},
        {"row_group_rows": 7, "codec": "gzip", "checksums": True},
    ],
    ids=str,
)
def test_pieces_are_the_same_however_the_file_was_written(tmp_path, choices, make_reader):
    files = {"text": [random_texts(1, 300)], "web": [random_tokens(2, 300, mean_tokens=50), random_tokens(3, 100)]}
    world = make_world(tmp_path, files, choices={"text": choices, "web": choices})
    reader = make_reader(world, 50_000)
    assert_reads(reader, world, whole_documents(world))
    assert_reads(reader, world, random_pieces(world, np.random.default_rng(1), 200))


def test_the_successor_is_of_the_document_also_where_page_and_file_end(tmp_path, make_reader):
    documents = [[[11, 12, 13], [], None, [21]], [[31, 32]]]
    world = make_world(tmp_path, {"web": documents}, choices={"web": {"row_group_rows": 2}})
    reader = make_reader(world)
    asked = pieces((0, 0, 0, 3), (0, 0, 0, 2), (0, 0, 2, 1), (0, 0, 3, 0), (0, 0, 1, 0), (0, 1, 0, 0), (0, 2, 0, 0))
    assert read_with_successors(reader, asked).tolist() == [11, 12, 13, 0, 11, 12, 13, 13, 0, 0, 12, 0, 0]
    asked = pieces((0, 4, 0, 2), (0, 3, 0, 1), (0, 4, 0, 1))
    assert read_with_successors(reader, asked).tolist() == [31, 32, 0, 21, 0, 31, 32]


def test_the_order_asked_is_the_order_given_with_repetitions(tmp_path, make_reader):
    world = random_world(tmp_path, 22)
    reader = make_reader(world, 5_000)
    asked = random_pieces(world, np.random.default_rng(2), 60)
    shuffled = np.random.default_rng(3).integers(0, 60, 150)
    assert_reads(reader, world, Pieces(*(column[shuffled] for column in asked)))


@pytest.mark.parametrize(
    ("value_type", "largest", "dtype"),
    [
        (pa.uint8(), 2**8 - 1, np.uint16),
        (pa.uint16(), 2**16 - 1, np.uint16),
        (pa.int64(), 2**16 - 1, np.uint16),
        (pa.int32(), 2**16, np.int32),
        (pa.int32(), 2**31 - 1, np.int32),
        (pa.uint32(), 2**31 - 1, np.int32),
        (pa.uint32(), 2**32 - 1, np.int64),
        (pa.int64(), 2**31 - 1, np.int32),
        (pa.int64(), 2**31, np.int64),
        (pa.int64(), 2**62, np.int64),
    ],
    ids=str,
)
def test_the_result_is_as_narrow_as_the_ids_of_the_sources_allow(tmp_path, value_type, largest, dtype, make_reader):
    documents = [[1, 2, 3], [largest, 5], [6]]
    world = make_world(
        tmp_path,
        {"text": [["abc", "d"]], "wide": [documents], "x": [[[7, 8]]]},
        choices={"wide": {"type": pa.list_(value_type)}},
    )
    reader = make_reader(world, catalog=index_recipe(world.recipe, world.directory, any_rows=True))
    asked = whole_documents(world)
    for _ in range(2):  # decoded, then kept
        assert read_with_successors(reader, asked).dtype == dtype
        assert_reads(reader, world, asked)
    assert read_with_successors(reader, pieces((0, 0, 0, 3), (2, 0, 0, 2))).dtype == np.uint16


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((1, 0, 0, 4), "source 'web': a plan asks for tokens 0 to 4 of row 0, which has 3"),
        ((1, 1, 2, 1), "tokens 2 to 3 of row 1, which has 2"),
        ((1, 0, -1, 1), "tokens -1 to 0 of row 0"),
        ((1, 0, 2, -1), "tokens 2 to 1 of row 0"),
        ((1, 2, 0, 0), "source 'web': a plan asks for row 2, there are 2"),
        ((1, -1, 0, 0), "row -1, there are 2"),
    ],
)
def test_a_piece_outside_its_document_is_an_error_of_the_plan(tmp_path, asked, says, make_reader):
    world = make_world(tmp_path, {"peps": [[[1]]], "web": [[[1, 2, 3], [4, 5]]]})
    with pytest.raises(PlanError, match=says):
        read_with_successors(make_reader(world), pieces((0, 0, 0, 1), asked))


def test_every_page_is_decoded_once_while_all_fit_the_cache(tmp_path, make_reader):
    world = random_world(tmp_path, 23)
    catalog = world.index()
    reader = make_reader(world, 1 << 24, catalog)
    asked = whole_documents(world)
    order = np.random.default_rng(4).permutation(len(asked.rows))
    for part in np.array_split(order, 20):
        assert_reads(reader, world, Pieces(*(column[part] for column in asked)))
    stats = reader.stats()
    pages = sum(source.pages.num_pages for source in catalog.sources.values())
    assert stats["pages_decoded"] == stats["cache_misses"] == stats["cache_pages"] == pages
    peps = catalog.sources["peps"]
    num_bytes = peps.num_tokens - (peps.num_documents - peps.num_empty)  # a text has an end beside its bytes
    assert stats["bytes_decoded"] == stats["bytes_served"] - 2 * peps.num_tokens + num_bytes
    assert stats["decode_amplification"] == 1.0
    text = 2 * catalog.sources["peps"].num_tokens
    lists = 2 * (catalog.sources["web"].num_tokens + catalog.sources["tiny"].num_tokens)
    assert stats["bytes_served"] == text + lists
    assert stats["bytes_read"] == sum(
        int(source.pages.chunk_bytes.sum() + source.pages.companion_bytes.sum()) for source in catalog.sources.values()
    )


def test_a_small_cache_decodes_again_and_says_so(tmp_path, make_reader):
    world = make_world(tmp_path, {"web": [random_tokens(5, 400, mean_tokens=100)]})
    reader = make_reader(world, 10_000)
    for row in np.random.default_rng(5).permutation(400).tolist():
        read_with_successors(reader, pieces((0, row, 0, len(world.documents["web"][row]))))
    stats = reader.stats()
    assert stats["decode_amplification"] > 2 and stats["cache_hits"] > 0
    assert stats["cache_hits"] + stats["cache_misses"] == 400
    assert stats["cache_misses"] == stats["pages_decoded"]


def test_a_page_larger_than_the_cache_is_served_and_not_kept(tmp_path, make_reader):
    world = make_world(tmp_path, {"web": [[list(range(5000))]]}, choices={"web": {"page_bytes": 1 << 20}})
    reader = make_reader(world, 4_000)
    for _ in range(2):
        assert_reads(reader, world, whole_documents(world))
    assert reader.stats()["pages_decoded"] == 2 and reader.stats()["cache_bytes"] == 0


def test_adjacent_missing_pages_are_read_at_once_and_others_alone(tmp_path, monkeypatch, make_reader):
    world = make_world(
        tmp_path, {"web": [random_tokens(6, 300, mean_tokens=50)]}, choices={"web": {"row_group_rows": 150}}
    )
    catalog = world.index()
    table = catalog.sources["web"].pages
    assert table.num_chunks == 2 and table.num_pages >= 20
    boundary = int(table.chunk_page[1])
    reader = make_reader(world, 1 << 24, catalog)
    read_with_successors(reader, page_rows(world, table, [0]))  # opens the file
    read: list[tuple[int, int]] = []
    real = os.pread

    def pread(descriptor: int, num_bytes: int, offset: int) -> bytes:
        read.append((offset, num_bytes))
        return real(descriptor, num_bytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    asked = [0, 1, 2, 3, 5, boundary - 1, boundary, boundary + 1]
    assert_reads(reader, world, page_rows(world, table, asked))
    runs = [(1, 4), (5, 6), (boundary - 1, boundary), (boundary, boundary + 2)]
    place = table.place(np.arange(table.num_pages))
    assert read == [(int(place.offset[a]), int(place.num_bytes[a:b].sum())) for a, b in runs]


def page_rows(world: World, table, pages: list[int]) -> Pieces:
    """The last row of each page, in reversed order."""
    rows = [int(table.first_row[page + 1]) - 1 for page in pages[::-1]]
    return pieces(*((0, row, 0, len(world.documents["web"][row])) for row in rows))


def test_warmed_pages_are_found_and_no_more_are_decoded_than_fit(tmp_path, make_reader):
    world = make_world(tmp_path, {"peps": [random_texts(7, 50)], "web": [random_tokens(7, 400, mean_tokens=100)]})
    catalog = world.index()
    pages = np.arange(catalog.sources["web"].pages.num_pages)
    reader = make_reader(world, 1 << 24, catalog)
    reader.warm(1, pages[[3, 1, 2, 3]])
    reader.warm(1, pages[[2, 1]])
    assert reader.stats()["pages_decoded"] == 3
    first_row = catalog.sources["web"].pages.first_row
    rows = np.arange(first_row[1], first_row[4])
    read_with_successors(reader, pieces(*((1, row, 0, 0) for row in rows.tolist())))
    assert (reader.stats()["cache_hits"], reader.stats()["cache_misses"]) == (3, 0)

    small = make_reader(world, 30_000, catalog)
    read_with_successors(small, pieces((0, 0, 0, 0)))
    needed_first = pages[::-1]
    small.warm(1, needed_first)
    decoded = small.stats()["pages_decoded"] - 1
    assert 1 < decoded < len(pages) and small.stats()["cache_pages"] == decoded + 1
    small.warm(1, needed_first)  # full: nothing more, and nothing is pushed out
    assert small.stats()["pages_decoded"] == decoded + 1
    read_with_successors(small, pieces((0, 0, 0, 0), (1, 399, 0, 1)))
    assert small.stats()["cache_hits"] == 2


def test_forgotten_pages_make_room(tmp_path, make_reader):
    world = make_world(tmp_path, {"peps": [random_texts(7, 50)], "web": [random_tokens(7, 400, mean_tokens=100)]})
    catalog = world.index()
    pages = np.arange(catalog.sources["web"].pages.num_pages)
    reader = make_reader(world, 30_000, catalog)
    reader.warm(1, pages)
    decoded = reader.stats()["pages_decoded"]
    reader.forget(1, pages[: decoded - 1])
    assert reader.stats()["cache_pages"] == 1
    reader.warm(1, pages[decoded:])
    assert reader.stats()["pages_decoded"] > decoded
    assert_reads(reader, world, whole_documents(world))


def test_after_close_reading_is_an_error_and_all_files_are_closed(tmp_path, make_reader):
    world = random_world(tmp_path, 24)
    catalog = world.index()
    before = open_descriptors()
    reader = make_reader(world, 1 << 20, catalog)
    assert open_descriptors() <= before
    assert_reads(reader, world, whole_documents(world))
    assert len(open_descriptors() - before) == 4 == reader.stats()["files_open"]
    reader.close()
    reader.close()
    assert open_descriptors() <= before
    for use in (lambda: read_with_successors(reader, pieces((0, 0, 0, 0))), lambda: reader.warm(0, np.array([0]))):
        with pytest.raises(LoaderClosed):
            use()


def test_lengths_of_another_version_of_a_transform_are_stale(tmp_path, make_reader):
    world = make_world(tmp_path, {"web": [[[1, 2]]]})
    catalog = world.index()
    web = replace(catalog.sources["web"], transform_id="none-0")
    source = ParquetSource(name="web", column="input_ids", kind="tokens")
    with pytest.raises(CatalogStale, match=f"'none-0', this torchmix has '{source.transform_id}'; run torchmix index"):
        make_reader(world, 0, replace(catalog, sources={"web": web}))
