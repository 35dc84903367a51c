"""Rows of text are encoded when a step asks for them, each once, and no row beside them."""

from __future__ import annotations

import logging
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.support.catalogs import World, make_world
from tests.support.files import make_text_file, random_texts
from tests.support.loaders import write_job
from tests.support.reading import Pieces, expected, pieces, read_with_successors, whole_documents
from tests.support.vocabularies import make_tokenizer
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.reader import open_documents, row_encoding
from torchmix.reader.page_cache import NO_ID
from torchmix.reader.reader import Reader
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Batch, Recipe, Source
from torchmix.stateful.open import build_loader
from torchmix.transform.bytes_tokenizer import BytesTokenizer
from torchmix.transform.vocabulary_tokenizer import VocabularyTokenizer


@pytest.mark.parametrize("cache_bytes", [0, 1 << 24])
def test_each_row_is_encoded_once_in_whatever_steps_it_is_drawn(tmp_path: Path, cache_bytes: int) -> None:
    world = make_world(
        tmp_path,
        {"peps": [random_texts(1, 400)], "prose": [random_texts(2, 100)]},
        choices={"peps": {"page_bytes": 2000}},
    )
    reader = Reader(world.index(), tmp_path, cache_bytes=cache_bytes)
    asked = whole_documents(world)
    order = np.random.default_rng(3).permutation(len(asked.rows))
    for part in np.array_split(order, 25):
        some = Pieces(*(column[part] for column in asked))
        np.testing.assert_array_equal(read_with_successors(reader, some), expected(world, some))
    stats = reader.stats()
    reader.close()
    num_rows = sum(len(document) > 0 for documents in world.documents.values() for document in documents)
    assert stats["rows_encoded"] == stats["rows_served"] == num_rows
    assert cache_bytes or stats["pages_decoded"] > 5 * num_rows / 25, "pages may come again and again, rows do not"


def test_a_row_that_a_step_asks_for_in_parts_is_encoded_once(tmp_path: Path) -> None:
    world = make_world(tmp_path, {"peps": [["abcdefgh", "ij"]]})
    reader = Reader(world.index(), tmp_path, cache_bytes=0)
    asked = pieces((0, 0, 4, 5), (0, 1, 0, 3), (0, 0, 0, 3), (0, 0, 3, 1), (0, 0, 0, 3))
    np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
    assert reader.stats()["rows_encoded"] == 2
    reader.close()


def books(tmp_path: Path) -> tuple[World, Reader, list[Pieces]]:
    """A source of books, and a piece of each in every step."""
    world = make_world(tmp_path, {"books": [random_texts(4, 3, mean_words=800)]})
    lengths = [len(document) for document in world.documents["books"]]
    steps = [
        pieces(*((0, row, start, min(100, tokens - start)) for row, tokens in enumerate(lengths) if start < tokens))
        for start in range(0, max(lengths), 100)
    ]
    assert len(steps) > 30
    return world, Reader(world.index(), tmp_path, cache_bytes=0), steps


def read_all_steps(world: World, reader: Reader, steps: list[Pieces]) -> int:
    """Read steps as a loader does; the most bytes that were kept of open documents."""
    most = 0
    for asked, coming in zip(steps, [*steps[1:], pieces()], strict=True):
        reader.hold(coming.source.astype(np.int64), coming.rows, coming.starts)
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        most = max(most, int(reader.stats()["open_document_bytes"]))
    return most


@pytest.mark.parametrize("memory_bytes", [1 << 20, 6000, 0])
def test_a_book_of_many_samples_is_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_bytes: int
) -> None:
    """Also where its ids lie in a file, because memory for them has ended."""
    monkeypatch.setattr(open_documents, "MEMORY_BYTES", memory_bytes)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    world, reader, steps = books(tmp_path)
    before = sorted(tmp_path.iterdir())
    most = read_all_steps(world, reader, steps)
    assert sorted(tmp_path.iterdir()) == before, "files of ids have no name"
    stats = reader.stats()
    assert stats["rows_encoded"] == stats["rows_served"] == 3
    assert 0 < most <= 2 * sum(map(len, world.documents["books"]))
    reader.hold(*(np.zeros(0, np.int64),) * 3)
    assert reader.stats()["open_document_bytes"] == 0
    reader.close()


def no_folder(**_: Any) -> NoReturn:
    raise OSError(28, "No space left on device")


def no_room(**_: Any) -> Any:
    return Path("/dev/full").open("w+b")


@pytest.mark.parametrize("full", [no_folder, no_room])
def test_where_ids_cannot_be_kept_a_book_is_encoded_again_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full: Any
) -> None:
    monkeypatch.setattr(open_documents, "MEMORY_BYTES", 0)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    world, reader, steps = books(tmp_path)
    caplog.set_level(logging.WARNING, logger="torchmix")
    assert read_all_steps(world, reader, steps) == 0
    assert reader.stats()["rows_encoded"] > 30
    assert [record.message for record in caplog.records if "No space left" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1
    reader.close()


def test_a_loader_encodes_no_row_twice_in_an_epoch(tmp_path: Path) -> None:
    with build_loader(write_job(tmp_path, method="concat"), topology=Topology(), loaders="in_process") as loader:
        for _ in islice(loader, 8 * 60):
            pass
        stats = loader.stats()
    assert stats["rows_served"] > 100
    assert stats["rows_encoded"] == stats["rows_served"]


def test_rows_of_sources_with_one_tokenizer_are_encoded_together_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path, {"a": [["x" * 400] * 6], "b": [["y" * 400] * 6], "c": [["z" * 3000]]})
    calls: list[int] = []
    tokenize = BytesTokenizer.tokenize

    def counted(self: BytesTokenizer, texts: Any, first_row: int) -> Any:
        calls.append(pc.sum(pc.binary_length(texts)).as_py())
        return tokenize(self, texts, first_row)

    monkeypatch.setattr(BytesTokenizer, "tokenize", counted)
    asked = whole_documents(world)
    for bound, most in ((1 << 20, 1), (2000, 5)):
        monkeypatch.setattr(row_encoding, "BATCH_BYTES", bound)
        reader = Reader(world.index(), tmp_path, cache_bytes=1 << 20)
        calls.clear()
        np.testing.assert_array_equal(read_with_successors(reader, asked), expected(world, asked))
        reader.close()
        assert len(calls) <= most and sum(calls) == 12 * 400 + 3000
        assert all(size <= bound or size == 3000 for size in calls)


def test_a_row_of_another_length_is_masked_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer(tmp_path / "t.json")
    make_text_file(tmp_path / "web.parquet", ["one", "two three", "four"])
    source = Source(path="web.parquet", text="text", tokenizer="t.json", bad_rows="mask", max_bad="50%")
    recipe = check_recipe(
        Recipe(version=1, seed=1, batch=Batch(samples=1, length=8), sources={"web": source}, mixture={"web": "100%"})
    )
    catalog = index_recipe(recipe, tmp_path)
    lengths = catalog.sources["web"].sizes.tokens.tolist()
    reader = Reader(catalog, tmp_path, cache_bytes=1 << 20, masked={"web"})
    encode = VocabularyTokenizer.tokenize

    def other(self: VocabularyTokenizer, texts: pa.Array, first_row: int) -> Any:
        doubled = [2 * text if "two" in text else text for text in texts.to_pylist()]
        return encode(self, pa.array(doubled, pa.large_string()), first_row)

    monkeypatch.setattr(VocabularyTokenizer, "tokenize", other)
    asked = pieces(*((0, row, 0, tokens) for row, tokens in enumerate(lengths)))
    found = reader.read(asked.wanted()).values
    assert (found[lengths[0] : lengths[0] + lengths[1]] == NO_ID).all()
    assert (np.delete(found, np.arange(lengths[0], lengths[0] + lengths[1])) >= 0).all()
    assert reader.stats()["bad_rows"] == 1
    reader.close()
