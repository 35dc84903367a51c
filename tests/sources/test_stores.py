from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from torchmix.errors import SourceUnreadable
from torchmix.sources import stores
from torchmix.sources.stores import is_uri, open_store, place_of


@pytest.fixture(autouse=True)
def no_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_stores", {})


@pytest.mark.parametrize(
    ("path", "expected"),
    [("s3://b/a.parquet", True), ("abfs+x.y://b", True), ("a/b.parquet", False), ("C:/a", False), ("a://b", True)],
)
def test_a_scheme_makes_a_uri(path: str, expected: bool) -> None:
    assert is_uri(path) == expected


def test_uris_are_absolute_and_keep_their_slashes() -> None:
    assert place_of(Path("/data"), "s3://b//a.parquet") == "s3://b//a.parquet"
    assert place_of(Path("/data"), "b/a.parquet") == "/data/b/a.parquet"


def test_a_store_is_opened_once_while_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_store("memory://a/b")
    assert open_store("memory://c") is first
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert open_store("memory://c") is not first
    assert first.uri(first.path("memory://a/b")) == "memory://a/b"


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("nope://a", "no store is known by nope://; read are s3://, gs://, hf://"),
        ("file:///a/b.parquet", "write the path of a local file as it is, without file://"),
    ],
)
def test_a_scheme_that_is_not_read_is_told_with_those_that_are(uri: str, says: str) -> None:
    with pytest.raises(SourceUnreadable, match=f"{uri}: {says}"):
        open_store(uri)


@pytest.mark.parametrize(("uri", "command"), [("hf://datasets/a", r"torchmix\[hf\]"), ("abfs://a/b", "adlfs")])
def test_a_missing_package_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch, uri: str, command: str) -> None:
    def missing(_: str) -> None:
        raise ImportError("no module of that name")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(SourceUnreadable, match=f"needs a package that is not here .*pip install '?{command}"):
        open_store(uri)


def test_a_store_is_not_used_over_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    open_store("memory://a")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(SourceUnreadable, match=r"forked from one that had read an object store.*spawn"):
        open_store("memory://a")
