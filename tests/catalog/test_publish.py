from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.support.catalogs import open_catalog
from tests.support.file_indexes import make_file_index, publish_files
from tests.support.recipes import make_recipe
from torchmix.catalog.manifest import CATALOG_VERSION, MANIFEST_NAME, Manifest, read_manifest
from torchmix.catalog.publish import catalog_lock, publish, remove_leftovers, with_settings
from torchmix.catalog.settings import settings_of

RECIPE = make_recipe({"peps": "30%", "web": "70%"})
WEB = [("web/0.parquet", make_file_index([[3, 1], [2]], seed=1)), ("web/1.parquet", make_file_index([[4]], seed=2))]
PEPS = [("peps.parquet", make_file_index([[2, 2]], seed=3, schema=b"other"))]
LONGER_WEB = [*WEB, ("web/2.parquet", make_file_index([[5, 5]], seed=4))]


def names_of(tmp_path: Path) -> set[str]:
    """Everything in the catalog's folder, without the random ends of names."""
    paths = (path.relative_to(tmp_path / "catalog") for path in (tmp_path / "catalog").rglob("*") if path.is_file())
    return {"/".join(part.rpartition(".")[0] if "." in part else part for part in path.parts) for path in paths}


def test_what_is_published_is_what_opens_with_rows_counted_over_files(tmp_path):
    publish_files(RECIPE, tmp_path, {"web": WEB, "peps": PEPS})
    catalog = open_catalog(RECIPE, tmp_path)
    web = catalog.sources["web"]
    assert list(catalog.sources) == ["peps", "web"]
    assert [(file.path, file.first_row, file.num_rows, file.num_pages) for file in web.files] == [
        ("web/0.parquet", 0, 6, 3),
        ("web/1.parquet", 6, 4, 1),
    ]
    np.testing.assert_array_equal(web.sizes.tokens, np.concatenate([part.tokens for _, part in WEB]))
    assert web.pages.first_row.tolist() == [0, 3, 4, 6, 10] == web.sizes.first_row_of_page.tolist()
    assert (web.num_documents, web.num_tokens) == (10, int(web.sizes.tokens.sum()))
    assert web.num_empty == int((web.sizes.tokens == 0).sum())
    assert web.max_document_tokens == int(web.sizes.tokens.max())
    web.sizes.check()
    web.pages.check()


def test_each_schema_is_kept_once(tmp_path):
    mixed = [*WEB, ("web/2.parquet", make_file_index([[1]], seed=9, schema=b"second"))]
    publish_files(RECIPE, tmp_path, {"web": mixed, "peps": PEPS})
    web = open_catalog(RECIPE, tmp_path).sources["web"]
    assert web.schemas == (b"schema", b"second")
    assert [file.schema for file in web.files] == [0, 0, 1]


def test_publishing_nothing_new_writes_nothing(tmp_path):
    manifest = publish_files(RECIPE, tmp_path, {"web": WEB, "peps": PEPS})
    before = (tmp_path / "catalog" / MANIFEST_NAME).stat().st_ino
    with catalog_lock(tmp_path / "catalog"):
        assert publish(tmp_path / "catalog", {"web": manifest.sources["web"]}, manifest) is manifest
    assert (tmp_path / "catalog" / MANIFEST_NAME).stat().st_ino == before


def test_arrays_of_the_version_before_stay_for_one_more_version_and_then_go(tmp_path):
    folders = []
    manifest = None
    for web in (WEB, LONGER_WEB, WEB):
        manifest = publish_files(
            RECIPE, tmp_path, {"web": web, "peps": PEPS} if manifest is None else {"web": web}, manifest
        )
        remove_leftovers(tmp_path / "catalog", manifest)
        folders.append(manifest.sources["web"].file)
    held = {path.name for path in (tmp_path / "catalog" / "arrays").iterdir()}
    assert held == {manifest.sources["peps"].file, folders[1], folders[2]}
    open_catalog(RECIPE, tmp_path)


def test_an_open_catalog_is_unchanged_by_what_is_published_after_it(tmp_path):
    manifest = publish_files(RECIPE, tmp_path, {"web": WEB, "peps": PEPS})
    opened = open_catalog(RECIPE, tmp_path).sources["web"]
    for web in (LONGER_WEB, WEB, LONGER_WEB):
        manifest = publish_files(RECIPE, tmp_path, {"web": web}, manifest)
        remove_leftovers(tmp_path / "catalog", manifest)
    np.testing.assert_array_equal(opened.sizes.tokens, np.concatenate([part.tokens for _, part in WEB]))


class Crash(BaseException):
    """Stands for the end of the process: no code of ours may catch it and go on."""


def crash_at(monkeypatch: pytest.MonkeyPatch, calls: list[str], moment: int) -> None:
    """Let the `moment`-th call that alters the disk, of any kind, raise; `calls` records what was called before."""

    def wrapped(name: str, original):
        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) - 1 == moment:
                raise Crash
            return original(*args, **kwargs)

        return call

    for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "mkdir"), (Path, "open"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, wrapped(name, getattr(owner, name)))


def test_a_crash_at_any_call_leaves_the_old_or_the_new_catalog_and_the_next_run_cleans_up(tmp_path):
    seen: set[str] = set()
    crashes = moment = 0
    old_names: set[str] | None = None
    while True:
        folder = tmp_path / str(moment)
        folder.mkdir()
        manifest = publish_files(RECIPE, folder, {"web": WEB, "peps": PEPS})
        old = open_catalog(RECIPE, folder).fingerprint
        old_names = old_names or names_of(folder)
        calls: list[str] = []
        crashed = False
        with pytest.MonkeyPatch.context() as monkeypatch:
            crash_at(monkeypatch, calls, moment)
            try:
                newer = publish_files(RECIPE, folder, {"web": LONGER_WEB}, manifest)
                remove_leftovers(folder / "catalog", newer)
            except Crash:
                crashed = True
        after = open_catalog(RECIPE, folder)  # always opens, whole
        for source in after.sources.values():
            source.sizes.check()
            source.pages.check()
        held = read_manifest(folder / "catalog")
        remove_leftovers(folder / "catalog", held)
        if not crashed:
            assert after.fingerprint != old
            break
        crashes += 1
        seen.add(calls[moment])
        if after.fingerprint == old:
            assert names_of(folder) == old_names, f"leftovers after a crash in call {moment}, {calls[moment]}"
        finished = publish_files(RECIPE, folder, {"web": LONGER_WEB}, held)
        assert len(open_catalog(RECIPE, folder).sources["web"].files) == 3
        assert set(finished.superseded) <= {path.name for path in (folder / "catalog" / "arrays").iterdir()}
        moment += 1
    assert crashes > 8 and {"fsync", "replace", "mkdir", "open"} <= seen


def test_a_full_disk_is_an_error_and_leaves_no_unfinished_file(tmp_path, monkeypatch):
    manifest = publish_files(RECIPE, tmp_path, {"web": WEB, "peps": PEPS})
    before = names_of(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        publish_files(RECIPE, tmp_path, {"web": LONGER_WEB}, manifest)
    assert names_of(tmp_path) == before
    assert read_manifest(tmp_path / "catalog") == manifest


def test_leftovers_are_removed_and_files_of_others_are_not(tmp_path):
    manifest = publish_files(RECIPE, tmp_path, {"web": WEB, "peps": PEPS})
    folder = tmp_path / "catalog"
    before = names_of(tmp_path)
    for name in ("web.01234567", "web.0123abcd"):
        (folder / "arrays" / name).write_bytes(b"half")
    for path in (folder / "arrays" / "mine", folder / "notes"):
        path.mkdir()
        (path / "tokens.npy").write_bytes(b"half")
    (folder / "manifest.json.new").write_text("{")
    remove_leftovers(folder, manifest)
    assert names_of(tmp_path) == before | {"arrays/mine/tokens", "notes/tokens"}
    remove_leftovers(folder, None)
    assert {path.name for path in (folder / "arrays").iterdir()} == {"mine"}


def test_new_settings_keep_the_arrays_and_change_the_fingerprint_only_with_the_window(tmp_path):
    manifest = publish_files(RECIPE, tmp_path, {"web": WEB, "peps": PEPS})
    entry = manifest.sources["web"]
    moved = make_recipe({"web": "70%", "peps": "30%"}, sources={"web": {"path": "/elsewhere/*.parquet"}})
    same = with_settings(entry, settings_of(moved.sources, moved.shuffle)["web"], entry.files)
    assert (same.patterns, same.fingerprint, same.file) == (
        ("/elsewhere/*.parquet",),
        entry.fingerprint,
        entry.file,
    )
    assert entry.window_pages == 256
    small = settings_of(RECIPE.sources, RECIPE.shuffle)["web"]
    mean_bytes = 4 * entry.num_tokens // sum(file.num_pages for file in entry.files) + 1
    narrow = with_settings(
        entry,
        msgspec.structs.replace(small, most_bytes=mean_bytes * 5 // 2),
        entry.files,
    )
    assert narrow.window_pages == 2
    assert narrow.fingerprint != entry.fingerprint


def test_a_manifest_of_no_sources_is_replaced(tmp_path):
    empty = Manifest(version=CATALOG_VERSION, sources={}, superseded=())
    assert list(publish_files(RECIPE, tmp_path, {"web": WEB, "peps": PEPS}, empty).sources) == ["peps", "web"]
