"""A profile belongs to one catalog and one set of transforms, and is replaced in one step."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.catalogs import make_world
from tests.support.files import random_tokens
from torchmix.errors import CatalogError, CatalogMissing, CatalogStale
from torchmix.service.scale.loads import PROFILE_NAME, SourceProfile, profile_of, read_profile, write_profile

ONE = SourceProfile(
    tokens=10,
    busy_ns=20,
    cpu_ns=10,
    read_bytes=5,
    decoded_bytes=40,
    sent_bytes=20,
    window_bytes=80,
    state_bytes=7,
    pages=2,
)


@pytest.fixture
def catalog(tmp_path):
    return make_world(tmp_path, {"a": [random_tokens(1, 30)], "b": [random_tokens(2, 30)]}).index()


def test_what_is_written_is_read(tmp_path, catalog):
    profile = profile_of(catalog, 3, {"b": ONE, "a": ONE})
    write_profile(tmp_path, profile)
    assert read_profile(tmp_path, catalog, 3) == profile
    assert [path.name for path in tmp_path.iterdir() if "profile" in path.name] == [PROFILE_NAME]


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path, catalog, monkeypatch):
    first = profile_of(catalog, 3, {"a": ONE, "b": ONE})
    write_profile(tmp_path, first)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchmix.catalog.array_files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_profile(tmp_path, profile_of(catalog, 4, {"a": ONE, "b": ONE}))
    monkeypatch.undo()
    assert read_profile(tmp_path, catalog, 3) == first
    assert [path.name for path in tmp_path.iterdir() if "profile" in path.name] == [PROFILE_NAME]


def test_a_profile_of_something_else_is_refused_by_name(tmp_path, catalog):
    write_profile(tmp_path, profile_of(catalog, 3, {"a": ONE, "b": ONE}))
    other = make_world(tmp_path / "other", {"a": [random_tokens(5, 30)]}).index()
    with pytest.raises(CatalogStale, match=f"catalog {catalog.fingerprint}, this is catalog {other.fingerprint}"):
        read_profile(tmp_path, other, 3)
    with pytest.raises(CatalogStale, match=r"measured with transforms \w+, these are"):
        read_profile(tmp_path, catalog, 4)
    write_profile(tmp_path, profile_of(catalog, 3, {"a": ONE}))
    with pytest.raises(CatalogStale, match="lacks source 'b'"):
        read_profile(tmp_path, catalog, 3)
    write_profile(tmp_path, msgspec.structs.replace(profile_of(catalog, 3, {"a": ONE, "b": ONE}), version=2))
    with pytest.raises(CatalogStale, match="has version 2, this torchmix reads 1"):
        read_profile(tmp_path, catalog, 3)


def test_without_a_profile_the_command_is_named(tmp_path, catalog):
    with pytest.raises(CatalogMissing, match="run torchmix profile"):
        read_profile(tmp_path, catalog, 3)
    (tmp_path / PROFILE_NAME).write_text("{")
    with pytest.raises(CatalogError, match="damaged"):
        read_profile(tmp_path, catalog, 3)
