from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.reading import Pieces
from tests.support.recipes import make_recipe
from torchmix.catalog.store import Catalog
from torchmix.errors import PlanError
from torchmix.indexing.scan import index_recipe
from torchmix.reader import locate as page_starts
from torchmix.reader.locate import Locator

SOURCES = {"a": "uint16", "b": "int32", "c": "uint8"}


class Spy:
    """Lengths of a source that count how many of them are asked for."""

    def __init__(self, tokens: Any, counts: list[int]) -> None:
        self._tokens, self._counts = tokens, counts

    def take(self, rows: Any, **options: Any) -> Any:
        self._counts.append(len(rows))
        return self._tokens.take(rows, **options)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Three sources of one or two datasets, their catalog, and where each document begins in its file."""
    directory: Path = tmp_path_factory.mktemp("data")
    begins: dict[str, list[int]] = {}
    lengths: dict[str, list[int]] = {}
    for number, (name, dtype) in enumerate(SOURCES.items()):
        begins[name], lengths[name] = [], []
        for part in range(1 + number % 2):
            sequences = random_sequences(10 * number + part, 150, mean_tokens=1500, dtype=dtype, empty=0.1)
            write_dataset(directory / f"{name}{part}", sequences, dtype=dtype)
            lengths[name] += [len(sequence) for sequence in sequences]
            begins[name] += [0, *np.cumsum([len(sequence) for sequence in sequences])[:-1].tolist()]
    paths = {name: {"path": f"{name}*.idx", "tokens": None} for name in SOURCES}
    recipe = make_recipe({"a": "30%", "b": "30%", "c": "40%"}, sources=paths)
    catalog: Catalog = index_recipe(recipe, directory)
    catalogs = list(catalog.sources.values())
    return SimpleNamespace(catalogs=catalogs, locator=Locator(catalogs), begins=begins, lengths=lengths)


def asked_of(world: SimpleNamespace, rng: np.random.Generator, count: int, names: str) -> list[Any]:
    """Random pieces of some sources, as columns."""
    rows = []
    for _ in range(count):
        name = str(rng.choice(list(names)))
        row = int(rng.integers(len(world.lengths[name])))
        start = int(rng.integers(world.lengths[name][row] + 1))
        size = int(rng.integers(world.lengths[name][row] - start + 1))
        rows.append((sorted(SOURCES).index(name), row, start, size))
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return [columns[0].astype(np.int32), *columns[1:]]


@pytest.mark.parametrize("names", ["abc", "a", "b", "ac"])
@pytest.mark.parametrize("count", [0, 1, 5, 400])
def test_pieces_are_sorted_by_page_and_begin_where_their_documents_do(world, names, count):
    rng = np.random.default_rng(count)
    source, rows, starts, tokens = asked_of(world, rng, count, names)
    at = world.locator.locate(Pieces(source, rows, starts, tokens).wanted(), token_bytes=np.array([2, 4, 1]))
    np.testing.assert_array_equal(at.source, source[at.order])
    np.testing.assert_array_equal(at.tokens, tokens[at.order])
    pages = []
    for i, k in enumerate(at.order.tolist()):
        name = sorted(SOURCES)[source[k]]
        table = world.catalogs[source[k]].pages
        assert table.first_row[at.page[i]] + at.row_in_page[i] == rows[k] < table.first_row[at.page[i] + 1]
        assert at.goes_on[i] == (starts[k] + tokens[k] < world.lengths[name][rows[k]])
        if world.lengths[name][rows[k]]:
            assert at.begin_in_file[i] == world.begins[name][rows[k]] + starts[k]
        pages.append((int(source[k]), int(at.page[i])))
    assert pages == sorted(pages)
    assert [pages[i] for i in at.first_piece.tolist()] == sorted(set(pages))
    ranges = {number: (start, stop) for number, start, stop in at.ranges}
    assert ranges == {
        number: (at.source.tolist().index(number), len(at.source) - at.source.tolist()[::-1].index(number))
        for number in set(source.tolist())
    }


def test_of_a_source_that_is_decoded_only_the_asked_lengths_are_looked_up(world):
    source, rows, starts, tokens = asked_of(world, np.random.default_rng(1), 60, "abc")
    whole = world.locator.locate(Pieces(source, rows, starts, tokens).wanted(), token_bytes=np.array([2, 4, 1]))
    locator = Locator(world.catalogs)
    looked_up: list[int] = []
    locator._tokens = [Spy(tokens, looked_up) for tokens in locator._tokens]  # type: ignore[misc]
    some = locator.locate(Pieces(source, rows, starts, tokens).wanted(), token_bytes=np.array([2, 0, 0]))
    np.testing.assert_array_equal(some.goes_on, whole.goes_on)
    mine = some.source == 0
    np.testing.assert_array_equal(some.begin_in_file[mine], whole.begin_in_file[mine])
    assert looked_up[1:] == [(source == 1).sum(), (source == 2).sum()]
    assert looked_up[0] > mine.sum()


def test_many_pages_are_found_source_by_source(world, monkeypatch):
    """As where the sources have more pages than are kept in one table."""
    source, rows, starts, tokens = asked_of(world, np.random.default_rng(2), 200, "abc")
    pieces, asked = Pieces(source, rows, starts, tokens).wanted(), {"token_bytes": np.array([2, 4, 1])}
    joined = world.locator.locate(pieces, **asked)
    sizes = sorted(catalog.pages.num_pages for catalog in world.catalogs)
    for most in (0, sizes[0], sizes[0] + sizes[1]):
        monkeypatch.setattr(page_starts, "MOST_PAGES", most)
        alone = Locator(world.catalogs).locate(pieces, **asked)
        np.testing.assert_array_equal(alone.page, joined.page)
        np.testing.assert_array_equal(alone.row_in_page, joined.row_in_page)
        np.testing.assert_array_equal(alone.begin_in_file, joined.begin_in_file)


@pytest.mark.parametrize(
    ("piece", "says"),
    [
        ((0, 150, 0, 0), "source 'a': a plan asks for row 150, there are 150"),
        ((1, -1, 0, 0), "source 'b': a plan asks for row -1, there are 300"),
        ((2, 0, -1, 1), "source 'c': a plan asks for tokens -1 to 0 of row 0"),
        ((2, 0, 0, 10**7), "tokens 0 to 10000000 of row 0, which has"),
        ((0, 0, 1, -1), "tokens 1 to 0 of row 0"),
    ],
)
def test_a_piece_that_lies_in_no_document_is_an_error(world, piece, says):
    source, rows, starts, tokens = np.array([piece, (0, 0, 0, 0)], np.int64).T
    with pytest.raises(PlanError, match=says):
        world.locator.locate(
            Pieces(source.astype(np.int32), rows, starts, tokens).wanted(), token_bytes=np.array([2, 4, 1])
        )
