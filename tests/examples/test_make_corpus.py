"""The corpus of the example: real, of many kinds, the same each time, whole or not there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.example import EXAMPLE, example_module
from torchmix.recipe.load import load_recipe

make_corpus = example_module("make_corpus")
LIBRARY = Path(asyncio.__file__).parent
"""Modules enough for every kind of document; the whole standard library takes ten seconds to parse."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus") / "corpus"
    make_corpus.main(directory, LIBRARY)
    return directory


def texts(path: Path) -> list[str]:
    return pq.read_table(path).column("text").to_pylist()


@pytest.mark.slow
def test_the_sources_are_of_different_kinds_and_lengths(corpus: Path) -> None:
    rows = {path.stem: pq.ParquetFile(path).metadata.num_rows for path in corpus.glob("*.parquet")}
    assert set(rows) == {"code", "docstrings", "packages-0", "packages-1", "messages", "names", "zen"}
    assert rows["zen"] < rows["code"] < rows["messages"] < rows["docstrings"]
    mean_length = {name: sum(map(len, texts(corpus / f"{name}.parquet"))) / rows[name] for name in ("code", "messages")}
    assert mean_length["code"] > 100 * mean_length["messages"]
    assert any("def " in text for text in texts(corpus / "code.parquet"))
    assert "Beautiful is better than ugly." in texts(corpus / "zen.parquet")


@pytest.mark.slow
def test_token_ids_spell_names_and_end_each_document(corpus: Path) -> None:
    documents = pq.read_table(corpus / "names.parquet").column("tokens").to_pylist()
    assert {document[-1] for document in documents} == {256}
    assert "LATIN SMALL LETTER A" in {bytes(document[:-1]).decode() for document in documents}


def test_files_differ_in_codec_page_version_and_page_index(corpus: Path) -> None:
    chunks = [pq.ParquetFile(path).metadata.row_group(0).column(0) for path in sorted(corpus.glob("*.parquet"))]
    assert len({chunk.compression for chunk in chunks}) >= 4
    assert {chunk.has_column_index for chunk in chunks} == {True, False}
    assert {chunk.has_dictionary_page for chunk in chunks} == {True, False}


@pytest.mark.slow
def test_it_writes_the_same_bytes_again(corpus: Path, tmp_path: Path) -> None:
    make_corpus.main(tmp_path / "again", LIBRARY)
    for path in corpus.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_modules_that_do_not_parse_and_folders_of_tests_are_left_out(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "package/c.py", "test/d.py", "package/__pycache__/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"name = {name!r}")
    (tmp_path / "template.py").write_text("class {{ name }}:")
    (tmp_path / "old.py").write_text("old = '\\d'  # an escape that Python warns of")
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    (tmp_path / "empty.py").touch()
    found = [source for source, _ in make_corpus.parsed_modules(tmp_path)]
    assert [source.split("#")[0].strip() for source in found] == [
        *("name = 'a.py'", "name = 'b.py'", "old = '\\d'", "name = 'package/c.py'")
    ]


def test_a_corpus_that_is_there_is_left_alone(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in corpus.iterdir()}
    make_corpus.main(corpus, LIBRARY)
    assert {path.name: path.stat().st_mtime_ns for path in corpus.iterdir()} == before
    assert "is there already" in capsys.readouterr().out


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: Path, library: Path) -> None:
        (directory / "code.parquet").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(make_corpus, "write_corpus", fail)
    with pytest.raises(OSError, match="disk full"):
        make_corpus.main(tmp_path / "corpus")
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_names_every_file_of_the_corpus(corpus: Path) -> None:
    recipe = load_recipe(EXAMPLE / "recipe.yaml")
    patterns = [Path(str(source.path)).name for source in recipe.sources.values()]
    named = {path.name for pattern in patterns for path in corpus.glob(pattern)}
    assert named == {path.name for path in corpus.iterdir()}
