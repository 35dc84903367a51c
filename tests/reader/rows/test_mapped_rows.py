"""Rows that go through a map when they are read: their epochs and seeds, what travels with them, what may not be."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.files import make_text_file, random_texts
from tests.support.maps import recipe_of_map, write_functions
from torchmix.constructor.fields import Microbatch
from torchmix.errors import CorruptPage
from torchmix.indexing.scan import index_recipe
from torchmix.mixture.keys import hash_columns, named_key
from torchmix.parallel.topology import Topology
from torchmix.reader.protocol import Tokens, WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.sources import maps_of
from torchmix.recipe.structs import Recipe
from torchmix.stateful.open import build_loader


def open_reader(recipe: Recipe, directory: Path, *, masked: tuple[str, ...] = ()) -> Reader:
    catalog = index_recipe(recipe, directory)
    return Reader(
        catalog, directory, cache_bytes=1 << 20, maps=maps_of(recipe.sources), seed=recipe.seed, masked=masked
    )


def read(reader: Reader, *asked: tuple[int, int, int, int]) -> tuple[Tokens, list[list[int]]]:
    """Pieces (row, epoch, start, tokens) of the only source."""
    row, epoch, start, tokens = np.array(asked, np.int64).T
    ends = np.cumsum(tokens)
    found = reader.read(WantedPieces.end_to_end(source=0, row=row, epoch=epoch, start=start, tokens=tokens))
    return found, [found.values[end - count : end].tolist() for end, count in zip(ends, tokens, strict=True)]


def drawn(seed: int, row: int, epoch: int, length: int) -> NDArray[np.int64]:
    """What the random function of the tests draws, by the rule of docs/formats.md."""
    key = hash_columns(named_key(seed, "map", "web"), np.array([row]), np.array([epoch]))[0]
    return np.random.Generator(np.random.Philox(key=int(key))).integers(0, 1000, length)


def test_a_random_map_draws_from_source_row_and_epoch_whatever_is_read_together(tmp_path: Path) -> None:
    make_text_file(tmp_path / "web.parquet", ["abcdefgh", "ijkl", "m"])
    recipe = recipe_of_map(f"{write_functions(tmp_path)}:drawn", tokenizer=None)
    asked = [(1, 3, 0, 4), (0, 0, 2, 6), (1, 0, 0, 4), (0, 3, 0, 8), (1, 3, 1, 2), (2, 7, 0, 1)]
    wanted = [drawn(5, row, epoch, (8, 4, 1)[row])[start : start + n].tolist() for row, epoch, start, n in asked]
    assert wanted[0] != wanted[2]
    reader = open_reader(recipe, tmp_path)
    assert read(reader, *asked)[1] == wanted
    assert reader.stats()["rows_encoded"] == 5
    for one, expected in zip(asked, wanted, strict=True):
        assert read(reader, one)[1] == [expected]
    reader.close()


def test_a_book_keeps_the_ids_of_its_epoch(tmp_path: Path) -> None:
    make_text_file(tmp_path / "web.parquet", ["a" * 300])
    reader = open_reader(recipe_of_map(f"{write_functions(tmp_path)}:drawn", tokenizer=None), tmp_path)
    zero = np.zeros(1, np.int64)
    for start in (0, 100):
        reader.hold(zero, zero, zero + start + 100)
        assert read(reader, (0, 1, start, 100))[1] == [drawn(5, 0, 1, 300)[start : start + 100].tolist()]
    assert reader.stats()["rows_encoded"] == 1
    assert read(reader, (0, 2, 200, 100))[1] == [drawn(5, 0, 2, 300)[200:].tolist()]
    assert reader.stats()["rows_encoded"] == 2
    reader.close()


def test_other_arrays_travel_with_the_first_piece_of_their_row(tmp_path: Path) -> None:
    make_text_file(tmp_path / "web.parquet", ["abc", "é", "xy"])
    reader = open_reader(recipe_of_map(f"{write_functions(tmp_path)}:letters", tokenizer=None), tmp_path)
    found, tokens = read(reader, (2, 0, 0, 2), (0, 0, 1, 2), (1, 0, 0, 1))
    assert tokens == [[120, 121], [98, 99], [233]]
    [other] = found.others
    assert other.name == "raw" and str(other.values.type) == "large_list<item: uint8>"
    assert dict(zip(other.piece.tolist(), other.values.to_pylist(), strict=True)) == {0: [120, 121], 2: [195, 169]}
    found, _ = read(reader, (0, 0, 0, 1))
    assert found.others[0].values.to_pylist() == [[97, 98, 99]] and found.others[0].piece.tolist() == [0]
    reader.close()


def test_a_first_piece_that_comes_late_has_its_other_arrays_though_the_ids_are_kept(tmp_path: Path) -> None:
    make_text_file(tmp_path / "web.parquet", ["abcd"])
    reader = open_reader(recipe_of_map(f"{write_functions(tmp_path)}:letters", tokenizer=None), tmp_path)
    zero = np.zeros(1, np.int64)
    for _ in range(2):  # the first piece waits in the pool
        reader.hold(zero, zero, zero)
        found, tokens = read(reader, (0, 0, 2, 2))
        assert tokens == [[99, 100]] and not any(len(other.piece) for other in found.others)
    assert reader.stats()["rows_encoded"] == 1
    found, tokens = read(reader, (0, 0, 0, 2))
    assert tokens == [[97, 98]] and found.others[0].values.to_pylist() == [[97, 98, 99, 100]]
    reader.close()


@pytest.mark.parametrize("is_masked", [False, True])
def test_another_length_later_is_an_error_that_names_the_row(tmp_path: Path, is_masked: bool) -> None:
    make_text_file(tmp_path / "web.parquet", ["one", "two", "three"])
    more = """
def later(columns, *, row, epoch, seed):
    texts = columns["text"].to_pylist()
    return {"text": pa.array([text + "!" * (LATER and text == "two") for text in texts])}
later.version = 1
LATER = False
"""
    name = write_functions(tmp_path, more)
    recipe = recipe_of_map(f"{name}:later", **({"bad_rows": "mask"} if is_masked else {}))
    reader = open_reader(recipe, tmp_path, masked=("web",) if is_masked else ())
    sys.modules[name].LATER = True  # type: ignore[attr-defined]
    if is_masked:
        assert read(reader, (0, 0, 0, 4), (1, 0, 0, 4), (2, 0, 0, 6))[1] == [
            [*b"one", 256],
            [-1] * 4,
            [*b"three", 256],
        ]
        assert reader.stats()["bad_rows"] == 1
    else:
        with pytest.raises(CorruptPage, match=r"web\.parquet: row 1 gives 5 tokens, the catalog says 4: .*its map"):
            read(reader, (0, 0, 0, 4), (1, 0, 0, 4), (2, 0, 0, 6))
    reader.close()


@pytest.mark.parametrize("where", ["in_process", pytest.param("node", marks=pytest.mark.system)])
def test_over_an_epoch_of_a_loader_each_row_goes_through_its_map_once(tmp_path: Path, where: str) -> None:
    texts = random_texts(8, 120)
    make_text_file(tmp_path / "web.parquet", texts)
    recipe = recipe_of_map(f"{write_functions(tmp_path)}:noted", length=256, samples=4)
    index_recipe(recipe, tmp_path)
    log = tmp_path / "rows.log"
    log.unlink()
    with build_loader(recipe, topology=Topology(), directory=tmp_path, loaders=where) as loader:
        for _ in islice(loader, 4 * 60):
            pass
    noted = Counter(tuple(map(int, line.split())) for line in log.read_text().splitlines())
    epochs = max(epoch for _, epoch in noted)
    assert epochs >= 3
    whole = {
        (row, epoch) for row, text in enumerate(texts) if text is not None for epoch in range(epochs - 1)
    }  # some of the last wait
    assert whole <= set(noted) and max(noted.values()) == 1


@pytest.mark.parametrize("where", ["in_process", pytest.param("node", marks=pytest.mark.system)])
def test_a_random_map_gives_the_same_after_a_resume(tmp_path: Path, where: str) -> None:
    make_text_file(tmp_path / "web.parquet", random_texts(8, 40, mean_words=60))
    recipe = recipe_of_map(f"{write_functions(tmp_path)}:drawn", tokenizer=None, length=64, samples=4)
    index_recipe(recipe, tmp_path)

    def tokens(loader: Iterable[Microbatch], count: int) -> list[list[int]]:
        return [microbatch.tokens.flatten().tolist() for microbatch in islice(loader, count)]

    with build_loader(recipe, topology=Topology(), directory=tmp_path, loaders=where) as loader:
        tokens(loader, 4 * 7)
        state = loader.state_dict()
        expected = tokens(loader, 4 * 30)
        whole = loader.stats()
    with build_loader(recipe, topology=Topology(), directory=tmp_path, loaders="in_process") as loader:
        loader.load_state_dict(state)
        assert tokens(loader, 4 * 30) == expected
        resumed = loader.stats()
    assert whole["rows_encoded"] == whole["rows_served"]
    again = resumed["rows_encoded"] - resumed["rows_served"]
    assert 0 <= again <= 3, "documents that were open or deferred are encoded once more"
