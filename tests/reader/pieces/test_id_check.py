"""A .bin is not decoded by the index: its ids are looked at as they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.files import make_tokens_file
from tests.support.indexed_datasets import write_dataset
from tests.support.reading import Pieces
from tests.support.recipes import make_recipe
from torchmix.catalog.store import IdLimit
from torchmix.errors import SourceUnreadable
from torchmix.indexing.scan import index_recipe
from torchmix.reader.reader import Reader, Tokens

LIMIT = IdLimit(1000, "vocab_size is 1000")
FILES = 3


def documents(dtype: str) -> list[list[int]]:
    """Five of 4 tokens in each file; all ids are below 100."""
    rng = np.random.default_rng(3)
    return rng.integers(0, 100, (FILES * 5, 4)).astype(dtype).tolist()


class Reading:
    """A source `bin` in three datasets, and beside it `web`, in which ids may be larger."""

    def __init__(self, directory: Path, rows: list[list[int]], dtype: str, limit: IdLimit | None = LIMIT) -> None:
        for number in range(FILES):
            write_dataset(directory / "d" / str(number), rows[5 * number : 5 * number + 5], dtype=dtype)
        make_tokens_file(directory / "web.parquet", [[70_000, 5, 6, 7]] * 10)
        keys = {"bin": {"path": "d/*.idx", "tokens": None}, "web": {"path": "web.parquet"}}
        recipe = make_recipe({"bin": "50%", "web": "50%"}, sources=keys)
        self.reader = Reader(index_recipe(recipe, directory), directory, cache_bytes=1 << 20, ids=limit)

    def read(self, pieces: list[tuple[int, int, int, int]], gap: int = 3) -> Tokens:
        """Pieces as (source, row, start, tokens), with a gap before each."""
        source, rows, starts, tokens = np.array(pieces, np.int64).T
        asked = Pieces(source.astype(np.int32), rows, starts, tokens)
        places = np.cumsum(tokens + gap) - tokens
        return self.reader.read(replace(asked.wanted(), places=places, num_places=int(places[-1] + tokens[-1])))


def everything() -> list[tuple[int, int, int, int]]:
    return [(0, row, 0, 4) for row in reversed(range(FILES * 5))]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32", "int64"])
def test_ids_of_the_model_are_read_in_any_width(tmp_path, dtype):
    rows = documents(dtype)
    if dtype not in ("uint8", "int8"):
        rows[7][2] = 999
    reading = Reading(tmp_path, rows, dtype)
    for _ in range(2):  # what lies between the pieces is what was read before
        values = reading.read([*everything(), (1, 3, 0, 4)]).values
        assert values[3:7].tolist() == rows[14]


@pytest.mark.parametrize(
    ("dtype", "token"),
    [
        ("uint16", 1000),
        ("uint16", 65_535),
        ("int16", -1),
        ("int16", 1000),
        ("int8", -1),
        ("int32", -1),
        ("int32", 1000),
        ("int32", -(2**31)),
        ("int64", -1),
        ("int64", 2**40),
        ("int64", 2**31),
    ],
)
def test_another_id_is_an_error_with_source_file_row_and_id(tmp_path, dtype, token):
    rows = documents(dtype)
    rows[7][2] = token
    reading = Reading(tmp_path, rows, dtype)
    fault = f"^source 'bin': d/1.bin: row 2 holds the token {token} at place 2, but vocab_size is 1000; "
    with pytest.raises(SourceUnreadable, match=fault):
        reading.read([*everything(), (1, 3, 0, 4)])
    with pytest.raises(SourceUnreadable, match=fault):
        reading.read([(0, 7, 1, 2)])
    with pytest.raises(SourceUnreadable, match=fault):  # as the label of the last token of a piece
        reading.read([(0, 3, 0, 1), (0, 7, 0, 2)])
    reading.read([(0, 7, 0, 1), (0, 7, 3, 1), (0, 8, 0, 4), (1, 2, 0, 4)])  # the rest of it is sound


def test_without_a_limit_ids_may_be_any(tmp_path):
    rows = documents("int32")
    rows[7][2] = -1
    assert -1 in Reading(tmp_path, rows, "int32", None).read(everything()).values


def test_pages_that_are_read_and_not_mapped_are_looked_at_too(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("not on this file system")

    monkeypatch.setattr("torchmix.reader.open_files.OpenFiles.map", fail)
    rows = documents("uint16")
    rows[7][2] = 1000
    with pytest.raises(SourceUnreadable, match="row 2 holds the token 1000"):
        Reading(tmp_path, rows, "uint16").read(everything())
