from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.catalogs import open_catalog
from tests.support.file_indexes import make_file_index, publish_files
from tests.support.recipes import make_recipe
from torchmix.catalog import store
from torchmix.catalog.array_files import open_arrays, write_arrays
from torchmix.catalog.manifest import MANIFEST_NAME, FileEntry, read_manifest, source_fingerprint, write_manifest
from torchmix.catalog.publish import remove_leftovers
from torchmix.catalog.sizes import window_pages_of
from torchmix.catalog.store import catalog_fingerprint
from torchmix.errors import CatalogError, CatalogMissing, CatalogStale
from torchmix.recipe.structs import Recipe, Shuffle

SHARES = {"peps": "30%", "web": "70%"}
RECIPE = make_recipe(SHARES)
WEB = [("web.parquet", make_file_index([[3, 1], [2]], seed=1)), ("web2.parquet", make_file_index([[4]], seed=2))]
PARTS = {"web": WEB, "peps": [("peps.parquet", make_file_index([[2, 2]], seed=3))]}


def with_shuffle(**shuffle: object) -> Recipe:
    return msgspec.structs.replace(RECIPE, shuffle=Shuffle(**shuffle))


def test_fingerprints_are_those_of_the_format_document(tmp_path):
    """The values were computed by hand: sha256 of the JSON text, first 16 hex digits."""
    file = FileEntry(
        path="any.parquet",
        num_bytes=1000,
        footer_hash="00ff",
        first_row=0,
        num_rows=1,
        num_pages=1,
        split_pages=0,
        whole_chunks=False,
        tail_bytes=0,
        schema=0,
        ids=None,
    )
    files = [file, msgspec.structs.replace(file, num_bytes=2000)]
    assert source_fingerprint(files, "input_ids", "none-1", 256) == "44c190efab467c87"
    publish_files(RECIPE, tmp_path, PARTS)
    sources = open_catalog(RECIPE, tmp_path).sources
    peps = replace(sources["peps"], fingerprint="0123456789abcdef")
    web = replace(sources["web"], fingerprint="fedcba9876543210")
    assert catalog_fingerprint([web, peps]) == "288b178589a7fbef"


def test_an_unchanged_catalog_has_the_same_fingerprint_wherever_it_lies(tmp_path):
    publish_files(RECIPE, tmp_path / "a", PARTS)
    shutil.move(tmp_path / "a", tmp_path / "b")
    publish_files(RECIPE, tmp_path / "c", PARTS)
    assert open_catalog(RECIPE, tmp_path / "b").fingerprint == open_catalog(RECIPE, tmp_path / "c").fingerprint


def test_the_fingerprint_covers_names_files_their_order_column_transform_and_window(tmp_path):
    files = read_manifest_files(tmp_path)
    changed = [
        source_fingerprint(files, "input_ids", "none-1", 256),
        source_fingerprint(files[::-1], "input_ids", "none-1", 256),
        source_fingerprint(files[:1], "input_ids", "none-1", 256),
        source_fingerprint([msgspec.structs.replace(file, num_bytes=1) for file in files], "input_ids", "none-1", 256),
        source_fingerprint([msgspec.structs.replace(f, footer_hash="1") for f in files], "input_ids", "none-1", 256),
        source_fingerprint(files, "text", "none-1", 256),
        source_fingerprint(files, "input_ids", "none-2", 256),
        source_fingerprint(files, "input_ids", "none-1", 255),
    ]
    assert len(set(changed)) == len(changed)
    moved = [msgspec.structs.replace(file, path="/elsewhere/" + file.path) for file in files]
    assert source_fingerprint(moved, "input_ids", "none-1", 256) == changed[0]


def read_manifest_files(tmp_path: Path):
    return publish_files(RECIPE, tmp_path, PARTS).sources["web"].files


def test_only_the_sources_of_the_recipe_are_opened_and_counted(tmp_path):
    publish_files(RECIPE, tmp_path, PARTS)
    both = open_catalog(RECIPE, tmp_path)
    alone = open_catalog(make_recipe({"web": "100%"}), tmp_path)
    assert list(both.sources) == ["peps", "web"] and list(alone.sources) == ["web"]
    assert both.fingerprint != alone.fingerprint
    assert both.sources["web"].fingerprint == alone.sources["web"].fingerprint


def test_a_source_that_was_not_indexed_is_named_with_those_that_were(tmp_path):
    publish_files(RECIPE, tmp_path, PARTS)
    with pytest.raises(CatalogMissing, match=r"lacks source 'wiki' \(it has peps, web\); run torchmix index"):
        open_catalog(make_recipe({"wiki": "50%", "web": "50%"}), tmp_path)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (make_recipe(SHARES, sources={"web": {"path": "other.parquet"}}), r"path \['web.parquet'\].*'other.parquet'"),
        (make_recipe(SHARES, sources={"web": {"tokens": "ids"}}), "column 'input_ids', the recipe says 'ids'"),
        (
            make_recipe(SHARES, sources={"web": {"tokens": None, "text": "input_ids", "tokenizer": "bytes"}}),
            "tokenizer None, the recipe says 'bytes'",
        ),
        (with_shuffle(window_pages=3), "window in pages 256, the recipe says 3"),
        (with_shuffle(window_bytes="300"), "window in pages 256, the recipe says 2"),
    ],
)
def test_other_settings_than_the_indexed_ones_are_named(tmp_path, recipe, says):
    publish_files(RECIPE, tmp_path, PARTS)
    with pytest.raises(CatalogStale, match=f"{says}.*run torchmix index"):
        open_catalog(recipe, tmp_path)


def test_a_setting_that_alters_nothing_of_a_source_opens(tmp_path):
    publish_files(with_shuffle(window_pages=2, window_bytes="2KB"), tmp_path, PARTS)
    open_catalog(with_shuffle(window_pages=2, window_bytes="1GiB"), tmp_path)


def test_a_truncated_or_missing_file_of_arrays_is_an_error_and_no_crash(tmp_path):
    manifest = publish_files(RECIPE, tmp_path, PARTS)
    path = tmp_path / "catalog" / "arrays" / manifest.sources["web"].file
    content = path.read_bytes()
    for entry in manifest.sources["web"].arrays.values():
        for keep_bytes in (entry.offset, entry.offset + entry.num_bytes - 1):
            path.write_bytes(content[:keep_bytes])
            with pytest.raises(CatalogError, match="run torchmix index"):
                open_catalog(RECIPE, tmp_path)
    path.unlink()
    with pytest.raises(CatalogError, match="is missing; run torchmix index"):
        open_catalog(RECIPE, tmp_path)
    path.write_bytes(content)
    open_catalog(RECIPE, tmp_path)


def test_a_manifest_that_lacks_an_array_or_whose_arrays_disagree_is_an_error(tmp_path):
    manifest = publish_files(RECIPE, tmp_path, PARTS)
    web, peps = manifest.sources["web"], manifest.sources["peps"]
    arrays = {key: entry for key, entry in web.arrays.items() if key != "kind"}
    sources = {**manifest.sources, "web": msgspec.structs.replace(web, arrays=arrays)}
    write_manifest(tmp_path / "catalog", msgspec.structs.replace(manifest, sources=sources))
    with pytest.raises(CatalogError, match=r"lacks arrays \['kind'\]"):
        open_catalog(RECIPE, tmp_path)
    root = tmp_path / "catalog" / "arrays"
    held = open_arrays(root / web.file, web.arrays) | {"tokens": open_arrays(root / peps.file, peps.arrays)["tokens"]}
    arrays = write_arrays(root / "other", {name: [array] for name, array in held.items()})
    sources["web"] = msgspec.structs.replace(web, file="other", arrays=arrays)
    write_manifest(tmp_path / "catalog", msgspec.structs.replace(manifest, sources=sources))
    with pytest.raises(CatalogError, match="10 rows in pages but 4 lengths"):
        open_catalog(RECIPE, tmp_path)


def test_a_catalog_published_twice_while_it_is_opened_is_opened_anew(tmp_path, monkeypatch):
    first = publish_files(RECIPE, tmp_path, PARTS)
    real, opened = store.open_source, []

    def slow_open(folder, name, entry, *more):
        if not opened:  # two publications later the arrays of the manifest in our hand are gone
            opened.append(name)
            manifest = first
            for _ in range(2):
                manifest = publish_files(RECIPE, tmp_path, PARTS, manifest)
                remove_leftovers(folder, manifest)
        return real(folder, name, entry, *more)

    monkeypatch.setattr(store, "open_source", slow_open)
    catalog = open_catalog(RECIPE, tmp_path)
    assert opened and read_manifest(tmp_path / "catalog").sources["web"].file != first.sources["web"].file
    np.testing.assert_array_equal(catalog.sources["web"].sizes.tokens, np.concatenate([part.tokens for _, part in WEB]))


def test_the_manifest_is_the_only_file_that_decides(tmp_path):
    publish_files(RECIPE, tmp_path, PARTS)
    (tmp_path / "catalog" / MANIFEST_NAME).unlink()
    with pytest.raises(CatalogMissing):
        open_catalog(RECIPE, tmp_path)


@pytest.mark.parametrize(
    ("num_pages", "num_tokens", "pages"),
    [(10, 1000, 6), (10, 1, 8), (1, 10_000, 1), (10, 0, 8), (10, 1200, 5), (10, 1201, 4)],
)
def test_a_window_is_as_many_mean_pages_as_fit_within_its_bounds(num_pages, num_tokens, pages):
    window = window_pages_of(num_pages=num_pages, num_tokens=num_tokens, most_pages=8, most_bytes=2400)
    assert window == pages
