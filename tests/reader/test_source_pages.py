from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.catalogs import World, make_world
from tests.support.files import flip_byte, random_tokens
from tests.support.split_rows import make_split_file
from torchmix.errors import CorruptPage
from torchmix.formats.parquet.source import ParquetSource
from torchmix.formats.source import Documents, PageRun
from torchmix.reader import source_pages
from torchmix.reader.open_files import Descriptors, OpenFiles
from torchmix.reader.page_cache import DecodedPage, PageCache
from torchmix.reader.source_pages import SourcePages

SOURCE = ParquetSource(name="web", column="input_ids", kind="tokens")
REAL_DECODE = ParquetSource.decode


class Wrong:
    """A source whose documents are altered after decoding, as by a file that was overwritten in place."""

    name, column, transform_id = SOURCE.name, SOURCE.column, SOURCE.transform_id
    row_encoder = None
    fingerprint = staticmethod(SOURCE.fingerprint)
    scan = staticmethod(SOURCE.scan)

    def __init__(self, alter: Callable[[Documents], Documents]) -> None:
        self._alter = alter

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        return list(map(self._alter, SOURCE.decode(runs)))


def make_files(tmp_path: Path, **choices) -> World:
    files = {"web": [random_tokens(1, 100), random_tokens(2, 300, mean_tokens=50)]}
    return make_world(tmp_path, files, choices={"web": choices})


MakePages = Callable[..., SourcePages]


@pytest.fixture
def make_pages() -> Iterator[MakePages]:
    """The pages of source `web` of a world; its files are closed after the test."""
    descriptors = Descriptors()

    def make(world: World, source=SOURCE, dictionary_bytes: int = 1 << 20) -> SourcePages:
        web = world.index().sources["web"]
        files = OpenFiles(source, web.files, world.directory, descriptors)
        return SourcePages(web, source, files, PageCache(dictionary_bytes))

    yield make
    descriptors.close_all()


def documents_of(decoded: DecodedPage) -> list[list[int]]:
    return [decoded.values[start:stop].tolist() for start, stop in pairwise(decoded.offsets)]


@pytest.mark.parametrize("dictionary", [True, False])
def test_each_page_holds_its_rows(tmp_path, dictionary, make_pages):
    world = make_files(tmp_path, dictionary=dictionary)
    pages = make_pages(world)
    table = pages.catalog.pages
    asked = [0, 1, 2, 5, 6, table.num_pages - 1]
    for page, decoded in zip(asked, pages.decode(asked), strict=True):
        rows = range(int(table.first_row[page]), int(table.first_row[page + 1]))
        assert documents_of(decoded) == [world.documents["web"][row].tolist() for row in rows]
        assert len(decoded.values) == decoded.offsets[-1]


def test_what_is_decoded_together_is_no_larger_than_its_bound_unless_one_page_is(tmp_path, monkeypatch, make_pages):
    world = make_files(tmp_path)
    pages = make_pages(world)
    table = pages.catalog.pages
    calls: list[list[PageRun]] = []
    monkeypatch.setattr(ParquetSource, "decode", lambda self, runs: calls.append(runs) or REAL_DECODE(self, runs))
    num_bytes = table.place(np.arange(table.num_pages)).num_bytes
    bound = int(num_bytes[:5].sum())
    monkeypatch.setattr(source_pages, "BATCH_BYTES", bound)
    everything = list(pages.decode(range(table.num_pages)))
    assert len(everything) == table.num_pages
    of_call = [sum(len(run.pages) for run in runs) for runs in calls]
    assert max(of_call) <= bound and len(calls) < table.num_pages / 2
    assert sum(of_call) == num_bytes.sum() == pages.figures.bytes_read
    calls.clear()
    monkeypatch.setattr(source_pages, "BATCH_BYTES", 1)
    list(pages.decode(range(4)))
    assert [len(run.pages) for [run] in calls] == num_bytes[:4].tolist()


def test_a_dictionary_is_read_once_per_chunk_while_it_is_kept(tmp_path, make_pages):
    world = make_files(tmp_path, dictionary=True, row_group_rows=150)
    for kept_bytes, reads in [(1 << 20, 1), (0, 2)]:
        pages = make_pages(world, dictionary_bytes=kept_bytes)
        table = pages.catalog.pages
        first = int(table.chunk_page[1])
        second = first + 2
        for page in (first, second):
            next(pages.decode([page]))
        dictionary = int(table.companion_bytes[1])
        assert dictionary > 0
        assert (
            pages.figures.bytes_read == int(table.place(np.array([first, second])).num_bytes.sum()) + reads * dictionary
        )


def test_planned_bytes_are_those_of_the_decoded_page(tmp_path, make_pages):
    pages = make_pages(make_files(tmp_path))
    chosen = np.arange(10)
    assert pages.planned_bytes(chosen) == [decoded.num_bytes for decoded in pages.decode(chosen)]


def longer_document(documents: Documents) -> Documents:
    offsets = documents.offsets.copy()
    offsets[4] -= 1  # row 3 gets shorter by one, row 4 longer
    return replace(documents, offsets=offsets)


def fewer_documents(documents: Documents) -> Documents:
    return replace(documents, offsets=documents.offsets[:-1])


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (longer_document, r"row 3, in page {page}, decodes to \d+ tokens, the catalog says \d+; the file"),
        (fewer_documents, r"row 0, in page {page}, begins \d+ documents, the catalog says \d+; the file"),
    ],
)
def test_documents_of_other_lengths_than_planned_are_an_error_that_names_page_and_row(
    tmp_path, alter, says, make_pages
):
    world = make_files(tmp_path)
    pages = make_pages(world, Wrong(alter))
    first = int(pages.catalog.pages.page_of_rows(np.array([100]))[0])  # the first page of the second file
    assert pages.catalog.pages.first_row[first + 1] > 104
    with pytest.raises(CorruptPage, match=f"source 'web': .*web/1.parquet: {says.format(page=first)}"):
        next(pages.decode([first]))
    assert pages.figures.pages_decoded == 0


def test_a_flipped_byte_of_a_page_with_checksums_is_an_error_that_names_the_file(tmp_path, make_pages):
    world = make_files(tmp_path, checksums=True)
    pages = make_pages(world)
    table = pages.catalog.pages
    flip_byte(tmp_path / "web" / "0.parquet", int(table.place(np.array([3])).offset[0]) - 3)
    next(pages.decode([1]))
    with pytest.raises(CorruptPage, match=r"source 'web': .*web/0\.parquet"):
        next(pages.decode([2]))


@pytest.mark.slow
@pytest.mark.parametrize("page_values", [3, 40, 1000])
def test_pages_with_split_rows_hold_the_rows_that_begin_in_them(tmp_path, page_values, make_pages, monkeypatch):
    world = make_files(tmp_path)
    documents = random_tokens(3, 200, mean_tokens=60)
    make_split_file(tmp_path / "web" / "0.parquet", documents, page_values=page_values)
    documents += random_tokens(2, 300, mean_tokens=50)
    pages = make_pages(world)
    table = pages.catalog.pages
    assert len(table.tail_bytes) == table.num_pages
    rng = np.random.default_rng(4)
    every = np.arange(table.num_pages)
    for bound in (1, 2000, 1 << 20):
        monkeypatch.setattr(source_pages, "BATCH_BYTES", bound)
        for asked in (every, every[::2], np.flatnonzero(rng.random(len(every)) < 0.4), every[-1:]):
            for page, decoded in zip(asked, pages.decode(asked.tolist()), strict=True):
                rows = range(int(table.first_row[page]), int(table.first_row[page + 1]))
                assert documents_of(decoded) == [documents[row] for row in rows]


def test_a_page_with_split_rows_is_read_alone_up_to_where_its_last_row_ends(tmp_path, make_pages):
    world = make_files(tmp_path)
    make_split_file(tmp_path / "web" / "0.parquet", random_tokens(3, 200, mean_tokens=60), page_values=40)
    pages = make_pages(world)
    place = pages.catalog.pages.place(np.arange(100))
    assert (place.tail_bytes > 0).sum() > 50
    for page in np.flatnonzero(place.tail_bytes)[:20].tolist():
        before = pages.figures.bytes_read
        next(pages.decode([page]))
        assert pages.figures.bytes_read - before == place.num_bytes[page] + place.tail_bytes[page]


@pytest.mark.parametrize("dictionary", [False, True])
def test_bytes_are_compared_with_the_checksums_of_the_catalog_page_by_page(tmp_path, dictionary, make_pages):
    world = make_files(tmp_path, dictionary=dictionary, codec="none", page_index=False)
    pages = make_pages(world, dictionary_bytes=0)
    table = pages.catalog.pages
    place = table.place(np.arange(table.num_pages))
    rng = np.random.default_rng(3)
    for _ in range(5):  # neighbours, gaps, several chunks and files
        chosen = np.flatnonzero(rng.random(table.num_pages) < 0.6)
        assert len(list(pages.decode(chosen))) == len(chosen)
    page = table.num_pages - 2
    file = Path(pages._files.path(int(table.file_of_chunk[place.chunk[page]])))
    place_in_page = int(place.offset[page] + place.num_bytes[page] - 1)
    flip_byte(file, place_in_page)
    with pytest.raises(CorruptPage, match=rf"{file}: the page at bytes \[{place.offset[page]}, .* has checksum"):
        list(pages.decode(range(table.num_pages)))
    assert len(list(pages.decode([*range(page), page + 1]))) == table.num_pages - 1
    flip_byte(file, place_in_page)
    assert len(list(pages.decode(range(table.num_pages)))) == table.num_pages
    if dictionary:
        chunk = int(place.chunk[page])
        flip_byte(file, int(table.companion_offset[chunk] + table.companion_bytes[chunk] - 1))
        with pytest.raises(CorruptPage, match=rf"the page at bytes \[{table.companion_offset[chunk]}, .* has checksum"):
            list(pages.decode([page]))
