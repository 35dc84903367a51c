"""Views of the catalog: the rows of selections, what they leave to each other, and when they are made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.selections import Selected, make_rows, make_selected, write_rows
from torchmix.errors import CatalogMissing, CatalogStale, RecipeError

GERMAN = {"from": "web", "where": "lang = 'de' and quality >= 0.7"}
WEB = {"path": "web/*.parquet", "id": "url", "properties": ["lang", "quality"]}


def web(directory: Path, mixture: Any, *, web: Any = WEB, **selections: Any) -> Selected:
    """A source of 300 and 200 rows in two files, and selections of its rows."""
    if not (directory / "web").exists():
        write_rows(directory / "web" / "0.parquet", 0, 300)
        write_rows(directory / "web" / "1.parquet", 300, 200)
    return make_selected(directory, {"web": web, **selections}, mixture)


def kept(test: Any, count: int = 500) -> list[int]:
    """Rows that pass a test in Python, on the values of the files; null passes none."""
    return [row for row, one in enumerate(make_rows(0, count).to_pylist()) if test(one)]


def is_german(row: dict[str, Any]) -> bool:
    return row["lang"] == "de" and row["quality"] is not None and row["quality"] >= 0.7


def test_a_selection_keeps_the_rows_for_which_its_expression_is_true(tmp_path: Path) -> None:
    world = web(tmp_path, ["german"], german=GERMAN)
    world.index()
    rows = kept(is_german)
    assert rows and world.rows("german") == rows
    view = world.open().views["german"]
    tokens = world.open().sources["web"].sizes.tokens[rows]
    assert (view.source, view.num_tokens, view.longest_tokens) == ("web", tokens.sum(), tokens.max())
    assert view.kept.dtype == np.int32


def test_a_window_of_a_selection_holds_as_many_rows_as_one_of_its_source(tmp_path: Path) -> None:
    write_rows(tmp_path / "web" / "0.parquet", 0, 4000)
    world = make_selected(tmp_path, {"web": WEB, "german": GERMAN}, ["german"], shuffle={"window_pages": 4})
    world.index()
    view, sizes = world.open().views["german"], world.open().sources["web"].sizes
    assert view.window_units == -(-4 * sizes.num_documents // len(view.kept)) < sizes.num_pages


def test_the_wider_of_two_streams_leaves_common_rows_to_the_narrower(tmp_path: Path) -> None:
    world = web(tmp_path, ["web", "german", "good"], german=GERMAN, good={"from": "web", "where": "quality > 0.5"})
    world.index()
    german = kept(is_german)
    good = kept(lambda row: row["quality"] is not None and row["quality"] > 0.5)
    assert world.rows("german") == german
    assert world.rows("good") == sorted(set(good) - set(german))
    assert world.rows("web") == sorted(set(range(500)) - set(good) - set(german))
    assert world.view("web").left == {"german": len(german), "good": len(good)}
    assert world.view("good").left == {"german": len(german)}


def test_allowed_overlaps_stay(tmp_path: Path) -> None:
    world = web(tmp_path, ["web", "german"], german={**GERMAN, "overlap": "allow"})
    world.index()
    assert world.rows("german") == kept(is_german)
    assert world.rows("web") == list(range(500))
    assert "web" not in world.open().views, "all rows need no view"


def test_a_selection_may_keep_all_rows(tmp_path: Path) -> None:
    world = web(tmp_path, ["all"], all={"from": "web", "where": "tokens > 0"})
    world.index()
    assert np.asarray(world.open().views["all"].kept).tolist() == list(range(500))


def test_the_fingerprint_is_of_the_rows_and_not_of_the_text(tmp_path: Path) -> None:
    web(tmp_path, ["german"], german=GERMAN).index()
    first = web(tmp_path, ["german"], german=GERMAN).open()
    other = web(tmp_path, ["german"], german={**GERMAN, "where": "not (quality < 0.7) and 'de' = lang"})
    with pytest.raises(CatalogStale, match=r"'german'.*run torchmix index"):
        other.open()
    other.index()
    second = other.open()
    assert second.views["german"].fingerprint == first.views["german"].fingerprint
    assert second.fingerprint == first.fingerprint
    narrower = web(tmp_path, ["german"], german={**GERMAN, "where": "lang = 'de' and quality >= 0.8"})
    narrower.index()
    assert narrower.open().fingerprint != first.fingerprint
    assert narrower.open().sources["web"].fingerprint == first.sources["web"].fingerprint


def test_what_is_there_is_not_made_again_and_properties_do_not_scan_tokens(tmp_path: Path) -> None:
    plain = web(tmp_path, ["web"], web={"path": "web/*.parquet"})
    before = plain.index().catalog.sources["web"].fingerprint
    assert not (tmp_path / "catalog" / "properties").exists()
    world = web(tmp_path, ["web", "german"], german=GERMAN)
    with pytest.raises(CatalogMissing, match="lacks the rows of 'german' for train; run torchmix index"):
        world.open()
    report = world.index()
    assert (report.scanned_files, report.kept_files) == (0, 2)
    assert report.catalog.sources["web"].fingerprint == before
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "catalog").rglob("*") if path.is_file()}
    manifest = world.manifest()
    world.index()
    assert world.manifest() == manifest
    for path, time in files.items():
        assert path.name == ".lock" or path.stat().st_mtime_ns == time


def test_new_files_join_the_selection_and_the_rows_before_stay(tmp_path: Path) -> None:
    world = web(tmp_path, ["german"], german=GERMAN)
    world.index()
    before = world.rows("german")
    write_rows(tmp_path / "web" / "2.parquet", 500, 100)
    report = world.index()
    assert report.scanned_files == 1
    assert world.rows("german") == kept(is_german, 600)
    assert world.rows("german")[: len(before)] == before


def test_another_recipe_on_the_same_catalog_leaves_views_and_properties_in_peace(tmp_path: Path) -> None:
    world = web(tmp_path, ["german"], german=GERMAN)
    world.index()
    rows = world.rows("german")
    web(tmp_path, ["web"], web={"path": "web/*.parquet"}).index()
    assert world.rows("german") == rows


def test_properties_of_a_path_and_tokens_select_too(tmp_path: Path) -> None:
    source = {"path": "web/*.parquet", "properties": {"shard": {"path": r"web/(\d+)\."}, "l": "lang"}}
    world = web(
        tmp_path,
        ["one", "long"],
        web=source,
        one={"from": "web", "where": "shard = '1' and l = 'en'"},
        long={"from": "web", "where": "tokens > 30 and shard = '0'"},
    )
    world.index()
    assert world.rows("one") == [row for row in kept(lambda row: row["lang"] == "en") if row >= 300]
    assert world.rows("long") == [row for row in kept(lambda row: len(row["ids"]) > 30) if row < 300]


def test_a_property_has_one_type_in_all_files(tmp_path: Path) -> None:
    for number, values in enumerate(([1, 2, None], [0.5, 1.5, 2.5], [None, None, None])):
        path = tmp_path / "web" / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"ids": [[1]] * 3, "q": values}), path)
    source = {"path": "web/*.parquet", "properties": ["q"]}
    world = make_selected(tmp_path, {"web": source, "high": {"from": "web", "where": "q > 1"}}, ["high"])
    world.index()
    assert world.rows("high") == [1, 4, 5]
    pq.write_table(pa.table({"ids": [[1]] * 3, "q": [{"a": 1}] * 3}), tmp_path / "web" / "3.parquet")
    with pytest.raises(RecipeError, match="property 'q' is of types that do not fit together"):
        world.index()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("lang = 'xx'", "keeps none of the 500 rows of 'web'; a row for which it is null is not kept"),
        ("lagn = 'de'", "'web' has no property 'lagn' (did you mean 'lang'?); it has lang, quality, tokens, url"),
        ("lang = 'de'; drop table x", "is no SQL expression"),
        ("lang = 'de') or (select 1 from x", "is no SQL expression"),
        ("quality > random()", "calls random, which is no function of one row alone"),
        ("lang = 'de' and (select true)", "has a subquery"),
        ("lang + 1 = 2", "does not fit its columns"),
    ],
)
def test_faults_of_expressions_are_named_and_publish_nothing(tmp_path: Path, where: str, words: str) -> None:
    world = web(tmp_path, ["web", "german"], german={"from": "web", "where": where})
    web(tmp_path, ["web"], web={"path": "web/*.parquet"}).index()
    manifest = world.manifest()
    with pytest.raises(RecipeError) as caught:
        world.index()
    assert caught.value.where == "sources.german.where"
    assert words in caught.value.message
    assert world.manifest() == manifest


def test_a_stream_that_leaves_all_its_rows_to_another_is_an_error(tmp_path: Path) -> None:
    world = web(tmp_path, ["a", "b"], a=GERMAN, b={"from": "web", "where": "quality >= 0.7 and lang = 'de'"})
    with pytest.raises(RecipeError, match="rows are in a, too; write `overlap: allow`"):
        world.index()


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    from torchmix.errors import SourceUnreadable

    world = web(tmp_path, ["web"], web={**WEB, "properties": ["langs"]})
    with pytest.raises(SourceUnreadable, match=r"has no column 'langs' for a property .did you mean 'lang'"):
        world.index()
