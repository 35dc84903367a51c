from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.catalogs import open_catalog
from tests.support.file_indexes import make_file_index, publish_files
from tests.support.indexing import counts, indexed, two_files
from tests.support.recipes import make_recipe
from torchmix.catalog.manifest import CATALOG_VERSION, MANIFEST_NAME, Manifest, read_manifest, write_manifest
from torchmix.errors import CatalogError, CatalogMissing, CatalogStale


def published(tmp_path: Path) -> Manifest:
    return publish_files(make_recipe({"web": "100%"}), tmp_path, {"web": [("web.parquet", make_file_index([[3, 2]]))]})


def test_a_manifest_is_read_back_as_it_was_written(tmp_path):
    manifest = published(tmp_path)
    assert read_manifest(tmp_path / "catalog") == manifest


def test_no_catalog_is_an_error_that_names_the_folder_and_the_remedy(tmp_path):
    with pytest.raises(CatalogMissing, match=f"{tmp_path / 'catalog'}; run torchmix index"):
        read_manifest(tmp_path / "catalog")


def test_another_version_is_stale_also_when_its_fields_are_unknown(tmp_path):
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"version": CATALOG_VERSION + 1, "tables": {}}))
    with pytest.raises(CatalogStale, match=f"version {CATALOG_VERSION + 1}, this torchmix reads {CATALOG_VERSION}"):
        read_manifest(tmp_path)


def test_a_catalog_of_another_version_is_stale_and_built_again_with_the_same_fingerprint(tmp_path):
    world = two_files(tmp_path)
    before = indexed(world).catalog
    path = tmp_path / "catalog" / MANIFEST_NAME
    path.write_text(path.read_text().replace(f'"version": {CATALOG_VERSION}', '"version": 2'))
    with pytest.raises(CatalogStale, match="version 2"):
        open_catalog(world.recipe, tmp_path)
    report = indexed(world)
    assert (counts(report), report.catalog.fingerprint) == ((2, 0, 0), before.fingerprint)


@pytest.mark.parametrize("keep", [0, 1, 30, 500, -1])
def test_a_truncated_manifest_is_an_error_that_names_the_remedy(tmp_path, keep):
    published(tmp_path)
    path = tmp_path / "catalog" / MANIFEST_NAME
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CatalogError, match=r"manifest\.json is damaged .*run torchmix index"):
        read_manifest(tmp_path / "catalog")


@pytest.mark.parametrize("content", ["[]", "nonsense", '{"version": "one"}', '{"version": 1, "sources": 3}', "\udcff"])
def test_json_of_another_shape_is_an_error(tmp_path, content):
    (tmp_path / MANIFEST_NAME).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CatalogError, match="is damaged"):
        read_manifest(tmp_path)


def test_a_crash_while_writing_leaves_the_old_manifest(tmp_path, monkeypatch):
    old = published(tmp_path)
    newer = Manifest(version=CATALOG_VERSION, sources={}, superseded=())

    def no_rename(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_rename)
    with pytest.raises(OSError, match="No space"):
        write_manifest(tmp_path / "catalog", newer)
    assert read_manifest(tmp_path / "catalog") == old
