from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from torchmix.errors import SourceUnreadable
from torchmix.storage import stores
from torchmix.storage.stores import is_uri, open_store, place_of


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


@pytest.mark.parametrize(("uri", "command"), [("hf://datasets/a", "huggingface_hub"), ("abfs://a/b", "adlfs")])
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


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({"AWS_ENDPOINT_URL": "http://minio:9000/"}, {"endpoint_override": "minio:9000", "scheme": "http"}),
        (
            {"AWS_ENDPOINT_URL": "http://other:1", "AWS_ENDPOINT_URL_S3": "minio:9000"},
            {"endpoint_override": "minio:9000", "scheme": "https"},
        ),
        ({}, {"region": "of bucket"}),
        ({"AWS_NO_SIGN_REQUEST": "yes"}, {"region": "of bucket", "anonymous": True}),
    ],
)
def test_the_environment_tells_which_server_of_s3_is_asked(monkeypatch, environment, options) -> None:
    asked: list[dict[str, object]] = []

    def system(**given: object) -> object:
        asked.append(given)
        return object()

    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_NO_SIGN_REQUEST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores.fs, "S3FileSystem", system)
    monkeypatch.setattr(stores.fs, "resolve_s3_region", lambda bucket: f"of {bucket}")
    store = open_store("s3://bucket/a.parquet")
    assert store.path("s3://bucket/a//b.parquet") == "bucket/a//b.parquet" and store.fsspec is None
    usual = {"connect_timeout", "request_timeout", "retry_strategy"}
    assert {name: value for name, value in asked[0].items() if name not in usual} == options


def test_an_emulator_of_google_is_asked_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(stores.fs, "GcsFileSystem", lambda **given: asked.append(given))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9023")
    open_store("gs://bucket/a")
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    open_store("gs://bucket/a")
    assert [one.get("endpoint_override") for one in asked] == ["127.0.0.1:9023", None]
    assert [one.get("anonymous") for one in asked] == [True, None]
