"""Rows that cannot be read, when they are indexed: an error, or none but counted, listed, and passed over for ever."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support.bad_rows import read_documents, recipe_over
from tests.support.catalogs import open_catalog
from tests.support.files import make_tokens_file, write_file
from tests.support.json_lines import write_lines
from tests.support.split_rows import make_split_file
from torchmix.catalog.manifest import MOST_LISTED
from torchmix.errors import CatalogError, CatalogStale, CorruptPage, RecipeError, SourceUnreadable, TooManyBadRows
from torchmix.indexing.scan import index_recipe, index_sources
from torchmix.recipe.structs import Recipe
from torchmix.transform.tokenizer import PROBE

TEXTS = [f"text number {i}" for i in range(40)]
GARBAGE = (b"not JSON at all", b'{"text": "cut', b'{"other": 1}', b'{"text": 7}', b"\xff\xfe\x00", b'{"text": "\xff"}')


def as_bytes(texts: list[str | None]) -> list[list[int]]:
    return [[] if text is None else [*text.encode(), 256] for text in texts]


def bad_rows_of(recipe: Recipe, directory: Path) -> list[tuple[str, int, str]]:
    files = open_catalog(recipe, directory).sources["web"].files
    return [(file.path, bad.row, bad.reason) for file in files for bad in file.bad_rows]


@pytest.mark.parametrize("name", ["web.jsonl", "web.jsonl.gz", "web.jsonl.zst"])
def test_lines_of_garbage_have_no_tokens_and_are_listed_by_row_with_their_line_and_reason(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    expected: list[str | None] = list(TEXTS)
    places = [0, 3, 4, 20, 38, 45]  # the first and the last line, too
    for place, garbage in zip(places, GARBAGE, strict=True):
        lines.insert(place, garbage)
        expected.insert(place, None)
    lines.insert(10, b"")  # no row, but a line
    for at_lines in (True, False):
        write_lines(tmp_path / name, b"\n".join(lines), mean_bytes=150, at_lines=at_lines)
        recipe = recipe_over(name, text="text", tokenizer="bytes")
        caplog.clear()
        catalog = index_recipe(recipe, tmp_path)
        source = catalog.sources["web"]
        assert (source.num_documents, source.num_bad_rows, source.num_empty) == (46, 6, 6)
        listed = bad_rows_of(recipe, tmp_path)
        assert [row for _, row, _ in listed] == places
        assert [int(reason.split()[1].rstrip(":")) for _, _, reason in listed] == [1, 4, 5, 22, 40, 47]
        assert "malformed" in listed[0][2] and "missing required field `text`" in listed[2][2]
        assert read_documents(recipe, tmp_path) == as_bytes(expected)
        assert "6 of 46 rows cannot be read" in caplog.text and f"{name} row 0: line 1: " in caplog.text
    with pytest.raises(CorruptPage, match="line 1, at byte 0"):  # as without the key
        index_recipe(recipe_over(name, text="text", tokenizer="bytes", bad_rows="error", max_bad=None), tmp_path)


def test_a_text_that_is_not_utf8_and_one_that_the_tokenizer_refuses_are_bad_and_a_null_is_none(tmp_path: Path) -> None:
    known = sorted({word for text in [*TEXTS, PROBE] for word in text.split()})
    words = {word: i for i, word in enumerate(known)}
    vocabulary = Tokenizer(models.WordLevel(words, unk_token="missing"))  # of an unknown word it makes an error
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    vocabulary.save(str(tmp_path / "t.json"))
    content: list[bytes | None] = [text.encode() for text in TEXTS]
    content[5], content[6], content[17], content[39] = b"text \xff", None, b"text unknownword", b"\xc3"
    table = pa.table({"text": pa.array(content, pa.binary())})
    write_file(tmp_path / "web.parquet", table, page_bytes=64)
    with pa.OSFile(str(tmp_path / "web.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=13)
    expected = [[words[word] for word in text.split()] for text in TEXTS]
    for row in (5, 6, 17, 39):
        expected[row] = []
    for name in ("web.parquet", "web.arrow"):
        recipe = recipe_over(name, text="text", tokenizer="t.json")
        source = index_recipe(recipe, tmp_path).sources["web"]
        assert (source.num_bad_rows, source.num_empty) == (3, 4)
        listed = bad_rows_of(recipe, tmp_path)
        assert [row for _, row, _ in listed] == [5, 17, 39]
        assert "not valid UTF-8" in listed[0][2] and "cannot encode a text" in listed[1][2]
        assert not any(name in reason for _, _, reason in listed)
        assert read_documents(recipe, tmp_path) == expected


DOCUMENTS: list[list[Any]] = [[i, i + 1, i + 2][: i % 4] for i in range(60)]


@pytest.mark.parametrize("split", [False, True])
def test_rows_of_tokens_with_a_null_inside_are_bad_also_where_rows_are_split_over_pages(
    split: bool, tmp_path: Path
) -> None:
    documents = list(DOCUMENTS)
    documents[2], documents[31], documents[59] = [None], [7, None, 9, 10, 11, 12, 13, None], [1, 2, 3, 4, 5, None]
    if split:
        make_split_file(tmp_path / "web.parquet", documents, page_values=5)
    else:
        make_tokens_file(tmp_path / "web.parquet", documents, page_bytes=32)
    recipe = recipe_over("web.parquet", tokens="input_ids")
    source = index_recipe(recipe, tmp_path).sources["web"]
    assert source.pages.num_pages > 3
    assert [row for _, row, _ in bad_rows_of(recipe, tmp_path)] == [2, 31, 59] and source.num_bad_rows == 3
    for row in (2, 31, 59):
        documents[row] = []
    assert read_documents(recipe, tmp_path) == documents


@pytest.mark.parametrize(("token", "width"), [(2**64 - 5, pa.uint64()), (-5, pa.int32()), (2**31, pa.int64())])
def test_values_of_bad_rows_never_come_in_the_place_of_those_behind_them(
    token: int, width: pa.DataType, tmp_path: Path
) -> None:
    """A bad row of one value that the file holds is not the empty row that its length alone would make it."""
    documents = [[1], [token], [3], [], [4]]
    make_tokens_file(tmp_path / "web.parquet", documents, type=pa.list_(width))
    recipe = recipe_over("web.parquet", tokens="input_ids")
    index_recipe(recipe, tmp_path)
    assert [row for _, row, _ in bad_rows_of(recipe, tmp_path)] == [1]
    assert read_documents(recipe, tmp_path) == [[1], [], [3], [], [4]]


def test_no_more_than_a_few_rows_of_a_file_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    for file in range(2):
        lines = [b"garbage" if i % 2 else b'{"text": "a"}' for i in range(100)]
        (tmp_path / f"{file}.jsonl").write_bytes(b"\n".join(lines))
    recipe = recipe_over("*.jsonl", text="text", tokenizer="bytes")
    source = index_recipe(recipe, tmp_path).sources["web"]
    assert [(file.num_bad_rows, len(file.bad_rows)) for file in source.files] == [(50, MOST_LISTED)] * 2
    assert [bad.row for bad in source.files[1].bad_rows] == list(range(1, 2 * MOST_LISTED, 2))


def test_more_bad_rows_than_the_recipe_allows_are_an_error_and_what_was_scanned_is_kept(tmp_path: Path) -> None:
    lines = [b'{"text": "a"}'] * 1998 + [b"x", b"y"]
    (tmp_path / "web.jsonl").write_bytes(b"\n".join(lines))
    keys = {"text": "text", "tokenizer": "bytes"}
    for max_bad in ("0%", "0.09%"):
        with pytest.raises(TooManyBadRows, match=r"2 of 2000 rows cannot be read, which is 0\.1000%.*row 1998: line"):
            index_recipe(recipe_over("web.jsonl", **keys, max_bad=max_bad), tmp_path)
    report = index_sources(recipe_over("web.jsonl", **keys, max_bad=None), tmp_path)  # 0.1%, the default
    assert (report.scanned_files, report.resumed_files) == (0, 1)
    with pytest.raises(TooManyBadRows, match="2 of 2000 rows could not be indexed"):
        open_catalog(recipe_over("web.jsonl", **keys, max_bad="0.09%"), tmp_path)
    with pytest.raises(TooManyBadRows, match="2 of 2000 rows cannot be read"):
        index_recipe(recipe_over("web.jsonl", **keys, max_bad="0.09%"), tmp_path)
    (tmp_path / "web.jsonl").write_bytes(b"\n".join([b"x"] * 10))
    with pytest.raises(SourceUnreadable, match="10 documents, all without tokens"):
        index_recipe(recipe_over("web.jsonl", **keys), tmp_path)


def test_a_catalog_with_bad_rows_is_not_for_a_recipe_for_which_they_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\nx\n')
    masked = recipe_over("*.jsonl", text="text", tokenizer="bytes")
    strict = recipe_over("*.jsonl", text="text", tokenizer="bytes", bad_rows="error", max_bad=None)
    fingerprint = index_recipe(masked, tmp_path).fingerprint
    with pytest.raises(CatalogStale, match=r"1 of 2 rows.*a\.jsonl row 1: line 2: .*bad_rows: mask"):
        open_catalog(strict, tmp_path)
    with pytest.raises(CatalogError, match="line 2, at byte 14"):
        index_recipe(strict, tmp_path)
    assert open_catalog(masked, tmp_path).fingerprint == fingerprint
    (tmp_path / "b.jsonl").write_bytes(b'y\n{"text": "b"}\n')
    report = index_sources(masked, tmp_path)
    assert (report.scanned_files, report.kept_files) == (1, 1)
    assert [(path, row) for path, row, _ in bad_rows_of(masked, tmp_path)] == [("a.jsonl", 1), ("b.jsonl", 0)]
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "b"}\n')
    index_recipe(strict, tmp_path)
    assert open_catalog(masked, tmp_path).fingerprint == open_catalog(strict, tmp_path).fingerprint


def test_a_run_that_failed_under_error_leaves_no_part_for_one_that_masks_and_the_other_way_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\nx\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "b"}\n')
    masked = recipe_over("*.jsonl", text="text", tokenizer="bytes", max_bad="1%")
    with pytest.raises(TooManyBadRows, match="max_bad"):
        index_recipe(masked, tmp_path)
    with pytest.raises(CorruptPage, match="line 2"):  # a part of the run that masked would have no fault
        index_recipe(recipe_over("*.jsonl", text="text", tokenizer="bytes", bad_rows="error", max_bad=None), tmp_path)


def test_a_bound_stands_with_mask_alone_and_is_a_percentage() -> None:
    with pytest.raises(RecipeError, match=r"sources\.web\.max_bad: bounds what bad_rows: mask leaves out"):
        recipe_over("a.parquet", tokens="t", bad_rows="error", max_bad="1%")
    for wrong in ("101%", "-1%"):
        with pytest.raises(RecipeError, match="from 0% to 100%"):
            recipe_over("a.parquet", tokens="t", max_bad=wrong)
    with pytest.raises(RecipeError, match="did you mean 'mask'"):
        recipe_over("a.parquet", tokens="t", bad_rows="masks", max_bad=None)
