"""`torchmix index`: what it prints, what it scans again, and what it does with bad data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

import torchmix.cli.index
from tests.support.files import make_text_file, make_tokens_file, random_tokens
from tests.support.projects import make_project
from torchmix.catalog.file_index import FileIndex
from torchmix.cli.main import main
from torchmix.indexing import scan_files
from torchmix.indexing.scan import IndexReport, index_sources


def index(recipe: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["index", str(recipe), "--json", *words]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    values: dict[str, Any] = json.loads(output.out)
    return values


def test_the_table_counts_what_the_files_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path)
    assert main(["index", str(recipe)]) == 0
    lines = capsys.readouterr().out.splitlines()
    columns = [pq.read_table(tmp_path / "data" / f"web-{number}.parquet")["input_ids"].to_pylist() for number in (0, 1)]
    documents = [document for column in columns for document in column]
    empty, tokens = sum(not document for document in documents), sum(map(len, documents))
    assert [line.split()[0] for line in lines[:4]] == ["source", "code", "tiny", "web"]
    web = lines[3].split()
    assert web[1] == "2"
    assert web[4:8] == [f"{len(documents):,}", f"{empty:,}", f"{tokens:,}", f"{max(map(len, documents)):,}"]
    assert f"{tmp_path / 'catalog'}: 4 files scanned, 0 kept" in lines


def test_json_holds_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = index(make_project(tmp_path), capsys)
    assert (values["scanned_files"], values["kept_files"]) == (4, 0)
    sources = {source["name"]: source for source in values["sources"]}
    texts = pq.read_table(tmp_path / "code.parquet")["text"].to_pylist()
    assert sources["code"]["num_tokens"] == sum(len(text.encode()) + 1 for text in texts)
    assert sources["tiny"]["num_documents"] == 6
    assert sources["web"]["num_pages"] > 2


def test_what_deny_lists_take_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path)
    assert index(recipe, capsys)["denied"] == []
    pq.write_table(pa.table({"source": ["code", "code"], "row": [3, 5]}), tmp_path / "spikes.parquet")
    with recipe.open("a", encoding="utf-8") as file:
        file.write("deny: [spikes.parquet]\n")
    texts = pq.read_table(tmp_path / "code.parquet")["text"].to_pylist()
    tokens = sum(len(texts[row].encode()) + 1 for row in (3, 5))
    assert index(recipe, capsys)["denied"] == [{"source": "code", "num_documents": 2, "num_tokens": tokens}]
    assert main(["index", str(recipe)]) == 0
    assert f"deny takes out of code: 2 documents of {tokens:,} tokens\n" in capsys.readouterr().out
    pq.write_table(pa.table({"source": ["tiny"], "row": [0]}), tmp_path / "small.parquet")
    other = tmp_path / "other.yaml"  # in the same catalog
    other.write_text(
        "{version: 1, seed: 1, batch: {samples: 4, length: 64}, mixture: {tiny: 100%}, deny: [small.parquet], "
        "sources: {tiny: {path: tiny.parquet, tokens: input_ids}}}"
    )
    assert [one["source"] for one in index(other, capsys)["denied"]] == ["tiny"]


def test_only_what_changed_is_scanned_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path)
    first = index(recipe, capsys)
    again = index(recipe, capsys)
    assert (again["scanned_files"], again["kept_files"]) == (0, 4)
    assert again["catalog_fingerprint"] == first["catalog_fingerprint"]
    make_tokens_file(tmp_path / "data" / "web-2.parquet", random_tokens(9, 50))
    more = index(recipe, capsys)
    assert (more["scanned_files"], more["kept_files"]) == (1, 4)
    assert more["changes"] == [{"source": "web", "path": "data/web-2.parquet", "change": "added"}]
    assert more["catalog_fingerprint"] != first["catalog_fingerprint"]
    forced = index(recipe, capsys, "--force")
    assert (forced["scanned_files"], forced["kept_files"]) == (5, 0)


def test_rows_split_over_pages_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_project(tmp_path)

    def split_report(*args: Any, **choices: Any) -> IndexReport:
        report = index_sources(*args, **choices)
        web = report.catalog.sources["web"]
        files = (msgspec.structs.replace(web.files[0], split_pages=2, tail_bytes=1000), *web.files[1:])
        sources = report.catalog.sources | {"web": replace(web, files=files)}
        return replace(report, catalog=replace(report.catalog, sources=sources))

    # No pyarrow that is current splits rows over pages, so the report is altered, not the file.
    monkeypatch.setattr(torchmix.cli.index, "index_sources", split_report)
    sources = index(recipe, capsys)["sources"]
    assert {source["name"]: source["split_row_files"] for source in sources} == {"code": 0, "tiny": 0, "web": 1}
    assert main(["index", str(recipe)]) == 0
    assert (
        "web: rows are split over pages in 1 files; reading each page to where its last row ends takes 1000 B more"
        in capsys.readouterr().out
    )


def test_bad_data_is_exit_code_3_and_leaves_no_catalog(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path)
    make_text_file(tmp_path / "tiny.parquet", ["a", "b"], column="input_ids")
    assert main(["index", str(recipe)]) == 3
    error = capsys.readouterr().err
    assert "source 'tiny'" in error and "input_ids" in error and "Traceback" not in error
    assert main(["plan", str(recipe), "--steps", "1"]) == 3
    assert "run torchmix index" in capsys.readouterr().err


def test_off_a_terminal_there_are_lines_unless_they_are_not_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_project(tmp_path)
    assert main(["index", str(recipe)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "torchmix: looking at the files of 3 sources"
    assert lines[1].startswith("torchmix: indexing ") and lines[2].startswith("torchmix: scanned ")
    assert main(["index", str(recipe)]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1, "nothing was scanned"
    assert main(["index", str(recipe), "--force", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.startswith("source")


def test_each_file_is_logged_where_that_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = make_project(tmp_path)
    with caplog.at_level("INFO"):
        assert main(["index", str(recipe), "--verbose"]) == 0
    assert sorted(line for line in caplog.messages if line.endswith("is scanned"))[-1] == (
        "source 'web': data/web-1.parquet is scanned"
    )


def test_an_interrupted_run_says_what_is_kept_and_goes_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_project(tmp_path)
    real = scan_files.save_file_index

    def interrupt(path: Path, index: FileIndex) -> None:
        real(path, index)
        raise KeyboardInterrupt

    monkeypatch.setattr(scan_files, "save_file_index", interrupt)
    monkeypatch.setattr(scan_files, "_num_threads", lambda files: 1)
    assert main(["index", str(recipe)]) == 130
    said = re.search(
        r"interrupted: the scans of (\d) files are kept, and the catalog is as it was; run torchmix index again",
        capsys.readouterr().err,
    )
    assert said is not None
    monkeypatch.undo()
    # The thread may have begun another file before it was told to stop.
    assert index(recipe, capsys)["resumed_files"] == int(said[1]) >= 1
