"""Object stores: a URI -> the file system that holds it.

Credentials and servers are found where the store's own tools find them; nothing of a store is open before a fork that
uses it.

`s3` and `gs` are pyarrow's own; `hf` and all other schemes are fsspec's, as far as its packages are installed.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from pyarrow import fs

from torchmix.errors import SourceUnreadable

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
ENVIRONMENT = ("AWS_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "HF_")
"""Variables by their beginnings that decide which server is spoken to, and as whom."""
CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S = 5.0, 20.0
"""Until a server answers a connection, and between any two of its bytes."""
SDK_ATTEMPTS = 3
"""Attempts of one request by Amazon's client, which waits as throttled servers ask; torchmix retries after these."""
GCS_RETRY_S = 5.0
"""Seconds for which Google's client retries a request itself."""
PACKAGES = {"hf": "pip install huggingface_hub", "az": "pip install adlfs", "abfs": "pip install adlfs"}
READ_SCHEMES = "s3://, gs://, hf://, and others that the package fsspec knows"
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role, and AWS_ENDPOINT_URL for a "
    "server that is not Amazon's",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "hf": "HF_TOKEN, or `hf auth login`",
}
"""Where each store's credentials are looked for."""


class Store(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A file system, and what to call its files."""

    scheme: str
    system: fs.FileSystem
    """Lists and describes files; of pyarrow's own stores it opens them, too."""
    fsspec: Any = None
    """The fsspec file system behind it; None for pyarrow's own."""

    def path(self, uri: str) -> str:
        """The path within the file system."""
        if self.fsspec is not None:
            return str(self.fsspec._strip_protocol(uri))
        return SCHEME.sub("", uri, count=1)

    def uri(self, path: str) -> str:
        """The URI of a path within the file system."""
        return path if SCHEME.match(path) else f"{self.scheme}://{path.lstrip('/')}"


def is_uri(path: str) -> bool:
    """Whether a path names a store, and not a file of this machine."""
    return SCHEME.match(path) is not None


def place_of(directory: Path, path: str) -> str:
    """Where a file lies: a URI as it is, a path from the recipe's folder."""
    return path if is_uri(path) else str(directory / path)


def scheme_of(uri: str) -> str:
    """The scheme of a URI, in small letters."""
    found = SCHEME.match(uri)
    assert found is not None, "a URI"
    return found[1].lower()


def credentials_of(uri: str) -> str:
    """Where credentials of a URI's store are looked for."""
    return CREDENTIALS.get(scheme_of(uri), "what its package for fsspec asks for")


_lock = threading.Lock()
_stores: dict[tuple[str, ...], Store] = {}
_process = 0


def open_store(uri: str) -> Store:
    """The store of a URI; the same one for all URIs of it while the environment stays.

    Raises:
        SourceUnreadable: Its scheme is not read, a package is missing, or the process was forked from one that had
            opened a store.
    """
    global _process
    scheme = scheme_of(uri)
    bucket = SCHEME.sub("", uri, count=1).partition("/")[0] if scheme == "s3" else ""
    settings = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(ENVIRONMENT)]
    key = (scheme, bucket, *sorted(settings))
    with _lock:
        if _stores and _process != os.getpid():
            raise SourceUnreadable(
                f"{uri}: this process was forked from one that had read an object store, whose connections do not "
                "survive a fork; start processes by spawn, as multiprocessing_context='spawn' of a DataLoader"
            )
        if key not in _stores:
            _stores[key] = _open(scheme, bucket, uri)
            _process = os.getpid()
        return _stores[key]


def _open(scheme: str, bucket: str, uri: str) -> Store:
    if scheme == "file":
        raise SourceUnreadable(f"{uri}: write the path of a local file as it is, without file://")
    try:
        if scheme == "s3":
            return Store(scheme=scheme, system=_open_s3(bucket))
        if scheme in ("gs", "gcs"):
            return Store(scheme=scheme, system=_open_gcs())
    except (ImportError, OSError, ValueError) as error:  # a build of pyarrow without it; what the environment says
        raise SourceUnreadable(f"{uri}: the store cannot be opened: {error}; look at {credentials_of(uri)}") from error
    return _open_by_fsspec(scheme, uri)


def _open_s3(bucket: str) -> fs.FileSystem:
    options: dict[str, Any] = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        options = _address(endpoint)
    else:
        with suppress(OSError):  # then the first request says what is wrong
            options["region"] = fs.resolve_s3_region(bucket)
    if os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("yes", "true", "1"):
        options["anonymous"] = True
    return fs.S3FileSystem(
        connect_timeout=CONNECT_TIMEOUT_S,
        request_timeout=REQUEST_TIMEOUT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=SDK_ATTEMPTS),
        **options,
    )


def _open_gcs() -> fs.FileSystem:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")  # which has no accounts, and pyarrow does not look for it
    options = {**_address(emulator, "http"), "anonymous": True} if emulator else {}
    return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=GCS_RETRY_S), **options)


def _address(endpoint: str, usual: str = "https") -> dict[str, Any]:
    """A server, as pyarrow's file systems take it."""
    protocol, _, host = endpoint.rpartition("://")
    return {"endpoint_override": host.rstrip("/"), "scheme": protocol or usual}


def _open_by_fsspec(scheme: str, uri: str) -> Store:
    install = PACKAGES.get(scheme, "pip install fsspec and its package for this scheme")
    try:
        import fsspec

        system = fsspec.filesystem(scheme)
    except ImportError as error:
        raise SourceUnreadable(f"{uri}: {scheme}:// needs a package that is not here ({error}); {install}") from None
    except ValueError:
        raise SourceUnreadable(f"{uri}: no store is known by {scheme}://; read are {READ_SCHEMES}") from None
    return Store(scheme=scheme, system=fs.PyFileSystem(fs.FSSpecHandler(system)), fsspec=system)
