from __future__ import annotations

import logging
import shutil

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from tests.support.catalogs import make_world, open_catalog, random_world
from tests.support.files import make_tokens_file, random_tokens, write_file
from tests.support.indexing import assert_lengths, changes, counts, indexed, names_in, two_files
from torchmix.catalog.manifest import MANIFEST_NAME, read_manifest
from torchmix.errors import CatalogStale, SourceUnreadable
from torchmix.formats.parquet.source import ParquetSource
from torchmix.indexing.scan import index_recipe, index_sources
from torchmix.recipe.structs import Recipe, Shuffle, Source


def test_the_catalog_of_a_recipe_holds_every_document_of_every_file(tmp_path):
    world = random_world(tmp_path, 5)
    report = indexed(world)
    assert_lengths(world)
    assert counts(report) == (4, 0, 0)
    assert changes(report) == [
        "added peps/0.parquet",
        "added tiny/0.parquet",
        "added web/0.parquet",
        "added web/1.parquet",
    ]
    assert report.catalog.sources["web"].pages.num_pages > 4
    assert [file.path for file in report.catalog.sources["web"].files] == ["web/0.parquet", "web/1.parquet"]
    assert report.catalog.sources["peps"].transform_id != report.catalog.sources["web"].transform_id


def test_a_second_run_scans_and_writes_nothing(tmp_path):
    world = random_world(tmp_path, 5)
    first = indexed(world)
    inode = (tmp_path / "catalog" / MANIFEST_NAME).stat().st_ino
    before = names_in(tmp_path / "catalog")
    second = indexed(world)
    assert counts(second) == (0, 0, 4) and second.changes == ()
    assert second.catalog.fingerprint == first.catalog.fingerprint
    assert (tmp_path / "catalog" / MANIFEST_NAME).stat().st_ino == inode
    assert names_in(tmp_path / "catalog") == before


def test_a_new_file_is_scanned_alone_and_its_rows_come_last_whatever_its_name(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="torchmix")
    world = two_files(tmp_path)
    old = indexed(world).catalog
    make_tokens_file(tmp_path / "web" / "00.parquet", [[7, 8, 9]])
    report = indexed(world)
    assert counts(report) == (1, 0, 2)
    assert changes(report) == ["added web/00.parquet"] and "added web/00.parquet" in caplog.text
    web = report.catalog.sources["web"]
    assert [file.path for file in web.files] == ["web/0.parquet", "web/1.parquet", "web/00.parquet"]
    np.testing.assert_array_equal(web.sizes.tokens[:-1], old.sources["web"].sizes.tokens)
    assert web.sizes.tokens[-1] == 3
    assert web.fingerprint != old.sources["web"].fingerprint


def test_files_added_one_by_one_in_sorted_order_give_the_catalog_of_one_run(tmp_path):
    grown = make_world(tmp_path / "grown", {"web": [random_tokens(1, 50)]})
    indexed(grown)
    for number in (1, 2):
        make_tokens_file(grown.directory / "web" / f"{number}.parquet", random_tokens(number + 1, 60))
        last = indexed(grown).catalog
    whole = make_world(tmp_path / "whole", {"web": [random_tokens(1, 50), random_tokens(2, 60), random_tokens(3, 60)]})
    assert indexed(whole).catalog.fingerprint == last.fingerprint


def test_a_changed_file_keeps_its_place_and_is_scanned_alone(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="torchmix")
    world = two_files(tmp_path)
    old = indexed(world).catalog.fingerprint
    make_tokens_file(tmp_path / "web" / "0.parquet", [[1, 2], [3]])
    report = indexed(world)
    assert (counts(report), changes(report)) == ((1, 0, 1), ["changed web/0.parquet"])
    assert report.catalog.sources["web"].sizes.tokens[:2].tolist() == [2, 1]
    assert report.catalog.sources["web"].num_documents == 62
    assert report.catalog.fingerprint != old
    assert "source 'web', since it was indexed: changed web/0.parquet" in caplog.text


def test_a_removed_file_takes_its_rows_along_and_is_reported(tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="torchmix")
    world = two_files(tmp_path)
    indexed(world)
    (tmp_path / "web" / "0.parquet").unlink()
    report = indexed(world)
    assert (counts(report), changes(report)) == ((0, 0, 1), ["removed web/0.parquet"])
    np.testing.assert_array_equal(
        report.catalog.sources["web"].sizes.tokens, [len(document) for document in world.documents["web"][50:]]
    )
    assert "removed web/0.parquet" in caplog.text


def test_many_changed_files_are_told_in_one_line(tmp_path, caplog):
    world = make_world(tmp_path, {"web": [[[number]] for number in range(9)]})
    indexed(world)
    for number in range(1, 9):
        (tmp_path / "web" / f"{number}.parquet").unlink()
    assert len(indexed(world).changes) == 8
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1 and told[0].endswith("web/4.parquet, web/5.parquet and 3 more")


def test_touching_or_copying_files_alters_nothing(tmp_path):
    world = two_files(tmp_path / "here")
    old = indexed(world).catalog.fingerprint
    shutil.copytree(tmp_path / "here", tmp_path / "there")  # new inodes and times
    shutil.rmtree(tmp_path / "here")
    assert open_catalog(world.recipe, tmp_path / "there").fingerprint == old
    assert counts(index_sources(world.recipe, tmp_path / "there")) == (0, 0, 2)


def test_a_moved_folder_of_files_keeps_order_and_fingerprint(tmp_path):
    world = two_files(tmp_path)
    make_tokens_file(tmp_path / "web" / "2.parquet", [[1]])
    indexed(world)
    make_tokens_file(tmp_path / "web" / "00.parquet", [[7, 8, 9]])  # last in the catalog, first by name
    old = indexed(world).catalog
    shutil.move(tmp_path / "web", tmp_path / "moved")
    recipe = with_source(world.recipe, path="moved/*.parquet")
    with pytest.raises(CatalogStale, match="path"):
        open_catalog(recipe, tmp_path)
    report = index_sources(recipe, tmp_path)
    assert counts(report) == (0, 0, 4)
    assert report.catalog.fingerprint == old.fingerprint
    assert [file.path for file in report.catalog.sources["web"].files][-1] == "moved/00.parquet"


def with_source(recipe: Recipe, **changed) -> Recipe:
    web = msgspec.structs.replace(recipe.sources["web"], **changed)
    return msgspec.structs.replace(recipe, sources={**recipe.sources, "web": web})


def test_another_window_is_taken_over_without_a_scan(tmp_path):
    world = two_files(tmp_path)
    old = indexed(world).catalog.sources["web"]
    recipe = msgspec.structs.replace(world.recipe, shuffle=Shuffle(window_pages=2))
    report = index_sources(recipe, tmp_path)
    web = report.catalog.sources["web"]
    assert (web.sizes.window_pages, counts(report)) == (2, (0, 0, 2))
    assert web.fingerprint != old.fingerprint


def test_another_column_is_scanned_anew(tmp_path):
    world = two_files(tmp_path)
    indexed(world)
    for number in range(2):
        make_tokens_file(tmp_path / "web" / f"{number}.parquet", [[1], [2, 3]], column="other")
    report = index_sources(with_source(world.recipe, tokens="other"), tmp_path)
    assert counts(report) == (2, 0, 0)
    assert report.catalog.sources["web"].sizes.tokens.tolist() == [1, 2, 1, 2]


def test_force_scans_all_and_counts_rows_by_name(tmp_path):
    world = two_files(tmp_path)
    indexed(world)
    make_tokens_file(tmp_path / "web" / "00.parquet", [[7, 8, 9]])
    indexed(world)
    report = indexed(world, force=True)
    assert counts(report) == (3, 0, 0)
    files = [file.path for file in report.catalog.sources["web"].files]
    assert files == ["web/0.parquet", "web/00.parquet", "web/1.parquet"]


def test_a_source_that_left_the_recipe_stays_in_the_catalog(tmp_path):
    world = random_world(tmp_path, 6)
    both = indexed(world).catalog
    sources = {name: source for name, source in world.recipe.sources.items() if name != "tiny"}
    less = msgspec.structs.replace(world.recipe, sources=sources, mixture={"peps": "50%", "web": "50%"})
    assert list(index_recipe(less, tmp_path).sources) == ["peps", "web"]
    assert counts(indexed(world)) == (0, 0, 4)
    assert open_catalog(world.recipe, tmp_path).fingerprint == both.fingerprint


@pytest.mark.parametrize("array", ["tokens", "page_start", "kind"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_array_is_built_again_with_the_same_fingerprint(tmp_path, caplog, array, damage):
    world = two_files(tmp_path)
    make_tokens_file(tmp_path / "web" / "2.parquet", [[1]])
    indexed(world)
    make_tokens_file(tmp_path / "web" / "00.parquet", [[7, 8, 9]])  # an order that only the catalog knows
    old = indexed(world).catalog
    entry = read_manifest(tmp_path / "catalog").sources["web"]
    path = tmp_path / "catalog" / "arrays" / entry.file
    content = bytearray(path.read_bytes())
    end = entry.arrays[array].offset + entry.arrays[array].num_bytes
    match damage:
        case "cut":
            path.write_bytes(content[: end - 1])
        case "flip":
            content[end - 1] ^= 1
            path.write_bytes(content)
        case _:
            path.unlink()
    report = indexed(world)
    assert counts(report) == (4, 0, 0) and report.changes == ()
    assert "all is scanned" in caplog.text
    assert report.catalog.fingerprint == old.fingerprint
    assert not path.exists() or read_manifest(tmp_path / "catalog").sources["web"].file != entry.file


@pytest.mark.parametrize("content", [b"", b'{"version": 1, "sources": {', b'{"version": 999}'])
def test_a_damaged_or_foreign_manifest_is_replaced(tmp_path, caplog, content):
    world = two_files(tmp_path)
    old = indexed(world).catalog.fingerprint
    (tmp_path / "catalog" / MANIFEST_NAME).write_bytes(content)
    report = indexed(world)
    assert counts(report) == (2, 0, 0) and report.catalog.fingerprint == old
    assert "it is built again" in caplog.text and "run torchmix index" not in caplog.text
    assert len(list((tmp_path / "catalog" / "arrays").iterdir())) == 1


def test_a_failed_run_does_not_touch_a_catalog_of_another_version(tmp_path):
    world = two_files(tmp_path)
    indexed(world)
    (tmp_path / "catalog" / MANIFEST_NAME).write_bytes(b'{"version": 999}')
    before = names_in(tmp_path / "catalog")
    shutil.move(tmp_path / "web" / "1.parquet", tmp_path / "1.parquet")
    make_tokens_file(tmp_path / "web" / "1.parquet", [[1]], column="other")
    with pytest.raises(SourceUnreadable, match="input_ids"):
        indexed(world)
    assert before <= names_in(tmp_path / "catalog")


@pytest.mark.parametrize(
    ("documents", "says"), [([], "holds no documents"), ([[], None, []], "holds 3 documents, all without tokens")]
)
def test_a_source_without_tokens_is_an_error_and_leaves_nothing_of_the_others(tmp_path, documents, says):
    world = make_world(tmp_path, {"web": [random_tokens(1, 50)], "void": [documents, documents[:1]]})
    says = says.replace("3", "4")
    with pytest.raises(
        SourceUnreadable, match=f"source 'void': column 'input_ids' of void/.*{says}; remove the source"
    ):
        indexed(world)
    assert not {name for name in names_in(tmp_path / "catalog") if name.startswith("arrays")}


def test_an_empty_file_among_others_is_no_error(tmp_path):
    world = make_world(tmp_path, {"web": [[], [[1, 2]], [], [[3]]]})
    web = indexed(world).catalog.sources["web"]
    assert web.sizes.tokens.tolist() == [2, 1]
    assert [(file.first_row, file.num_rows) for file in web.files] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    make_tokens_file(tmp_path / "web" / "4.parquet", [[4, 5, 6]])
    assert indexed(world).catalog.sources["web"].sizes.tokens.tolist() == [2, 1, 3]


def test_a_missing_file_is_named_before_anything_is_scanned(tmp_path):
    world = random_world(tmp_path, 5)
    shutil.rmtree(tmp_path / "web")
    with pytest.raises(SourceUnreadable, match=r"source 'web': 'web/\*\.parquet' matches no file"):
        indexed(world)
    assert names_in(tmp_path / "catalog") == {".lock"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.parquet", b"PAR1 not really", "not a whole Parquet file"),
        ("a.parquet", b"", "not a whole Parquet file"),
        ("a.jsonl", b"{}", "JSON lines by its name, and this source counts as Parquet"),
        ("a.jsonl.zst", b"{}", "JSON lines by its name"),
        ("a.bin", b"{}", "Megatron's by its name"),
        ("a.dat", b"{}", "not a whole Parquet file"),
    ],
)
def test_a_file_of_another_format_is_named(tmp_path, name, content, says):
    world = two_files(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceUnreadable, match=f"source 'web'.*{name}.*{says}"):
        index_sources(with_source(world.recipe, path=("web/*.parquet", "a.*")), tmp_path)


def test_rows_split_over_pages_are_told_once_for_a_source(tmp_path, caplog, monkeypatch):
    world = two_files(tmp_path)
    real = ParquetSource.scan

    def scan(self, path, progress, bad):
        return replace(real(self, path, progress, bad), split_pages=1)

    monkeypatch.setattr(ParquetSource, "scan", scan)
    report = indexed(world)
    told = [record.getMessage() for record in caplog.records if "split over pages" in record.getMessage()]
    assert len(told) == 1 and "2 of 2 files" in told[0] and "web/0.parquet" in told[0]
    assert all(file.split_pages for file in report.catalog.sources["web"].files)
    caplog.clear()
    indexed(world)
    assert caplog.text == ""


def test_the_same_file_may_be_two_sources(tmp_path):
    world = two_files(tmp_path)
    sources = {"again": world.recipe.sources["web"], **world.recipe.sources}
    recipe = msgspec.structs.replace(world.recipe, sources=sources, mixture={"again": "50%", "web": "50%"})
    catalog = index_recipe(recipe, tmp_path)
    assert catalog.sources["again"].fingerprint == catalog.sources["web"].fingerprint
    np.testing.assert_array_equal(catalog.sources["again"].sizes.tokens, catalog.sources["web"].sizes.tokens)


def test_text_and_token_columns_of_one_file_are_two_sources(tmp_path):
    write_file(tmp_path / "both.parquet", pa.table({"input_ids": [[1, 2, 3], [4]], "text": ["abc", None]}))
    world = make_world(tmp_path, {"web": [[[1]]]})
    web = msgspec.structs.replace(world.recipe.sources["web"], path="both.parquet")
    text = Source(path="both.parquet", text="text", tokenizer="bytes")
    recipe = msgspec.structs.replace(
        world.recipe, sources={"text": text, "web": web}, mixture={"text": "50%", "web": "50%"}
    )
    catalog = index_recipe(recipe, tmp_path)
    assert catalog.sources["web"].sizes.tokens.tolist() == [3, 1]
    assert catalog.sources["text"].sizes.tokens.tolist() == [4, 0]
