"""Text with the user's tokenizer: indexed, read, and told when it is another one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from tests.support.bad_rows import read_documents
from tests.support.catalogs import open_catalog
from tests.support.files import make_text_file, random_texts
from tests.support.indexing import counts
from tests.support.json_lines import plain_lines
from tests.support.vocabularies import END, TINY, install_tiny_encoding, make_tokenizer
from torchmix.cli.findings import file_findings
from torchmix.errors import CatalogStale, CorruptPage, SourceUnreadable
from torchmix.indexing.scan import index_recipe, index_sources
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Batch, Recipe, Source

TEXTS = [*random_texts(1, 150), None, f"a {END} b", *random_texts(2, 150)]


def recipe_of(path: str, tokenizer: str, **keys: Any) -> Recipe:
    source = Source(path=path, text="text", tokenizer=tokenizer, **keys)
    batch = Batch(samples=4, length=64)
    return check_recipe(Recipe(version=1, seed=1, batch=batch, sources={"web": source}, mixture={"web": "100%"}))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("kind", ["huggingface", "tiktoken"])
def test_texts_are_read_as_the_tokens_that_were_counted(
    suffix: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if suffix == "jsonl":
        (tmp_path / "web.jsonl").write_bytes(plain_lines(TEXTS))
    else:
        make_text_file(tmp_path / "web.parquet", TEXTS)
    make_tokenizer(tmp_path / "models" / "t.json")
    if kind == "tiktoken":
        words, encode = f"tiktoken:{TINY}", install_tiny_encoding(monkeypatch).encode_ordinary
    else:
        library = Tokenizer.from_file(str(tmp_path / "models" / "t.json"))
        library.encode_special_tokens = True
        words, encode = "models/t.json", lambda text: library.encode(text).ids
    recipe = recipe_of(f"web.{suffix}", words, begin_id=7, end_id=END)
    catalog = index_recipe(recipe, tmp_path)
    end = 0 if kind == "huggingface" else 300
    expected = [[] if text is None else [7, *encode(text), end] for text in TEXTS]
    assert catalog.sources["web"].sizes.tokens.tolist() == list(map(len, expected))
    assert read_documents(recipe, tmp_path) == expected


def test_another_tokenizer_at_the_same_place_is_stale_until_indexed_again(tmp_path: Path) -> None:
    make_text_file(tmp_path / "web.parquet", TEXTS)
    make_tokenizer(tmp_path / "t.json")
    recipe = recipe_of("web.parquet", "t.json")
    first = index_recipe(recipe, tmp_path)
    assert file_findings(recipe, tmp_path, first) == []
    make_tokenizer(tmp_path / "t.json", vocabulary=300)
    with pytest.raises(CatalogStale, match=r"source 'web'.*'huggingface-1:\w{16}', the tokenizer t\.json here has"):
        read_documents(recipe, tmp_path)
    [finding] = file_findings(recipe, tmp_path, open_catalog(recipe, tmp_path))
    assert finding.where == "sources.web.tokenizer" and "is another than when" in finding.message
    report = index_sources(recipe, tmp_path)
    assert counts(report) == (1, 0, 0)
    assert report.catalog.fingerprint != first.fingerprint
    assert len(read_documents(recipe, tmp_path)) == len(TEXTS)


def test_a_tokenizer_that_only_moved_costs_no_scan_and_alters_no_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_text_file(tmp_path / "web.parquet", TEXTS)
    make_tokenizer(tmp_path / "t.json")
    first = index_recipe(recipe_of("web.parquet", "t.json", end_id=END), tmp_path)
    (tmp_path / "u.json").write_text(json.dumps(json.loads((tmp_path / "t.json").read_text()), indent=3))
    moved = recipe_of("web.parquet", "u.json", end_id=0)
    with pytest.raises(CatalogStale, match=r"built with tokenizer 't\.json', the recipe says 'u\.json'"):
        open_catalog(moved, tmp_path)
    caplog.set_level(logging.WARNING, logger="torchmix")
    report = index_sources(moved, tmp_path)
    assert counts(report) == (0, 0, 1) and not caplog.records
    assert report.catalog.fingerprint == first.fingerprint
    assert report.catalog.sources["web"].tokenizer == "u.json"


def test_other_ids_around_documents_are_stale_before_anything_is_planned(tmp_path: Path) -> None:
    make_text_file(tmp_path / "web.parquet", TEXTS)
    make_tokenizer(tmp_path / "t.json")
    index_recipe(recipe_of("web.parquet", "t.json"), tmp_path)
    for keys in ({"end_id": END}, {"begin_id": 3}):
        with pytest.raises(CatalogStale, match=f"built with {next(iter(keys))} None, the recipe says"):
            open_catalog(recipe_of("web.parquet", "t.json", **keys), tmp_path)


def test_lengths_of_a_library_that_differs_unnoticed_are_found_when_a_row_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_text_file(tmp_path / "web.parquet", ["the quick", "zzzz brown", "x"])
    encoding = install_tiny_encoding(monkeypatch)
    recipe = recipe_of("web.parquet", f"tiktoken:{TINY}")
    index_recipe(recipe, tmp_path)
    encode = type(encoding).encode_ordinary
    monkeypatch.setattr(
        type(encoding), "encode_ordinary", lambda self, text: encode(self, text) + [0] * ("zzz" in text)
    )
    with pytest.raises(CorruptPage, match=r"web\.parquet: row 1 gives (\d+) tokens, the catalog says \d+: .*tokenizer"):
        read_documents(recipe, tmp_path)


def test_a_text_that_is_no_utf8_is_named_with_its_file_and_row(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "t.json")
    raw = pa.array([b"good", b"also good", b"ba\xffd"], pa.binary())
    make_text_file(tmp_path / "web.parquet", pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2]))
    with pytest.raises(
        SourceUnreadable, match=r"source 'web': .*web\.parquet: row 2 is not valid UTF-8: byte 2 is 0xff"
    ):
        index_recipe(recipe_of("web.parquet", "t.json"), tmp_path)


def test_a_missing_tokenizer_is_a_finding_at_its_key(tmp_path: Path) -> None:
    make_text_file(tmp_path / "web.parquet", TEXTS)
    recipe = recipe_of("web.parquet", "models/t.json")
    [finding] = file_findings(recipe, tmp_path, None)
    assert finding.where == "sources.web.tokenizer" and "cannot read" in finding.message
    with pytest.raises(SourceUnreadable, match=r"sources\.web\.tokenizer: cannot read"):
        index_recipe(recipe, tmp_path)


def test_sources_of_one_tokenizer_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_text_file(tmp_path / "web.parquet", TEXTS)
    make_tokenizer(tmp_path / "t.json")
    one = recipe_of("web.parquet", "t.json")
    sources = dict.fromkeys(("a", "b", "c"), one.sources["web"])
    recipe = msgspec.structs.replace(one, sources=sources, mixture={"a": "50%", "b": "25%", "c": "25%"})
    opened: list[Path] = []
    read = Path.read_text

    def count(path: Path, *rest: Any, **options: Any) -> str:
        opened.append(path)
        return read(path, *rest, **options)

    monkeypatch.setattr(Path, "read_text", count)
    index_recipe(recipe, tmp_path)
    assert [path.name for path in opened] == ["t.json"]
