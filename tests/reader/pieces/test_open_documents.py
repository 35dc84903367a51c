"""What is left of open documents: the same tokens, without the page."""

from __future__ import annotations

import tempfile

import numpy as np
import pytest

from tests.support.catalogs import World, make_world
from tests.support.files import random_tokens
from tests.support.reading import Pieces, expected, pieces, random_pieces, read_with_successors
from torchmix.reader import open_documents
from torchmix.reader.locate import row_keys
from torchmix.reader.open_documents import OpenDocuments
from torchmix.reader.reader import Reader


def world_of_books(tmp_path) -> World:
    tmp_path.mkdir(exist_ok=True)
    files = {"books": [random_tokens(3, 12, mean_tokens=4000)], "web": [random_tokens(4, 60, mean_tokens=300)]}
    return make_world(tmp_path, files, choices={"books": {"page_bytes": 20_000}, "web": {"page_bytes": 3000}})


def hold(reader: Reader, asked: Pieces) -> None:
    """Let the documents be open, each from the first of its tokens that is asked for."""
    first: dict[tuple[int, int], int] = {}
    for source, row, start, _ in zip(*(column.tolist() for column in asked), strict=True):
        first[source, row] = min(start, first.get((source, row), start))
    table = np.array([(*place, start) for place, start in first.items()], np.int64).reshape(-1, 3)
    reader.hold(table[:, 0], table[:, 1], table[:, 2])


def steps_through(world: World, rows: list[int], size: int) -> list[Pieces]:
    """A piece of each of these books in each step, until all have ended."""
    books = [(row, len(world.documents["books"][row])) for row in rows]
    most = max(tokens for _, tokens in books)
    return [
        pieces(*((0, row, start, min(size, tokens - start)) for row, tokens in books if start < tokens))
        for start in range(0, most, size)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("cache_bytes", "memory_bytes"), [(0, 1 << 26), (1 << 24, 1 << 26), (0, 9000), (0, 0)])
def test_a_book_read_in_a_hundred_steps_is_decoded_once(tmp_path, monkeypatch, cache_bytes, memory_bytes):
    """Also where its rest lies in a file, because memory for rests has ended."""
    world = world_of_books(tmp_path / "world")
    monkeypatch.setattr(open_documents, "MEMORY_BYTES", memory_bytes)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reader = Reader(world.index(), world.directory, cache_bytes=cache_bytes)
    rows = [row for row, document in enumerate(world.documents["books"]) if len(document) > 2000][:3]
    steps = steps_through(world, rows, 64)
    assert len(steps) > 30
    most_bytes = 0
    for step, asked in enumerate(steps):
        hold(reader, steps[step + 1] if step + 1 < len(steps) else pieces())
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        most_bytes = max(most_bytes, reader.stats()["open_document_bytes"])
    hold(reader, pieces())
    assert reader.stats()["pages_decoded"] <= len(rows)
    assert 0 < most_bytes <= 4 * sum(len(world.documents["books"][row]) for row in rows)
    assert reader.stats()["open_document_bytes"] == 0, "all have ended"
    assert [path.name for path in tmp_path.iterdir()] == ["world"], "files of rests have no name"
    reader.close()


def test_a_rest_in_a_file_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(open_documents, "MEMORY_BYTES", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    documents, rng = OpenDocuments(), np.random.default_rng(1)
    tokens = [rng.integers(0, 100, 400).astype(np.uint16) for _ in range(4)]
    keys = row_keys(np.zeros(4, np.int64), np.arange(4))
    documents.follow(np.zeros(4, np.int64), np.arange(4), np.array([10, 20, 30, 40]))
    for key, one in zip(keys.tolist(), tokens, strict=True):
        documents.keep(key, 0, one)
    kinds = [rest.is_in_memory for rest in documents._rests.values()]
    assert kinds == [True, False, False, False], "the first has 780 bytes"
    assert documents.num_bytes == 2 * (390 + 380 + 370 + 360)
    found = documents.find(keys, np.array([10, 25, 29, 399]), np.zeros(4, np.int64))
    assert [(piece, list(begins)) for _, piece, begins in found] == [(0, [0]), (1, [5]), (3, [359])]
    for values, piece, [begin] in found:
        np.testing.assert_array_equal(values[begin:], tokens[piece][[10, 25, 29, 399][piece] :])
    assert documents.find(keys, np.array([10, 25, 29, 399]), np.ones(4, np.int64)) == [], "of another epoch"
    none = np.zeros(0, np.int64)
    documents.follow(none, none, none)
    documents.follow(none, none, none)
    assert documents.num_bytes == documents._memory_bytes == 0


def test_what_is_left_takes_no_more_than_twice_its_tokens(tmp_path):
    world = world_of_books(tmp_path)
    reader = Reader(world.index(), world.directory, cache_bytes=0)
    row = max(range(12), key=lambda row: len(world.documents["books"][row]))
    steps, tokens = steps_through(world, [row], 64), len(world.documents["books"][row])
    for step, asked in enumerate(steps[:-1]):
        hold(reader, steps[step + 1])
        read_with_successors(reader, asked)
        assert reader.stats()["open_document_bytes"] <= 4 * 2 * (tokens - 64 * step)
    reader.close()
    assert reader.stats()["open_document_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("cache_bytes", [0, 30_000, 1 << 24])
def test_any_pieces_are_the_tokens_of_the_files_whatever_is_held(tmp_path, cache_bytes):
    world, rng = world_of_books(tmp_path), np.random.default_rng(9)
    reader = Reader(world.index(), world.directory, cache_bytes=cache_bytes)
    for _ in range(40):
        hold(reader, random_pieces(world, rng, int(rng.integers(0, 30))))
        asked = random_pieces(world, rng, int(rng.integers(0, 60)))
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
    reader.close()
