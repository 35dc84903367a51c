from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.indexed_datasets import random_sequences, write_dataset
from tests.support.native import native_or_not
from tests.support.reading import Pieces
from tests.support.recipes import make_recipe
from torchmix.catalog.store import Catalog
from torchmix.errors import PlanError
from torchmix.indexing.scan import index_recipe
from torchmix.reader.locate import Locator

SOURCES = {"a": "uint16", "b": "int32", "c": "uint8"}


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


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("names", ["abc", "a", "b", "ac"])
@pytest.mark.parametrize("count", [0, 1, 5, 400])
def test_pieces_are_sorted_by_page_and_begin_where_their_documents_do(world, names, count, native):
    rng = np.random.default_rng(count)
    source, rows, starts, tokens = asked_of(world, rng, count, names)
    with native_or_not(native):
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
