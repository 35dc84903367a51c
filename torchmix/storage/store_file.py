"""An object of a store: any range of it, tried again while the store fails; listed, written and deleted. And any path
or URI, opened."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pyarrow import fs

from torchmix.errors import SourceChanged, SourceUnreadable, TorchmixError, located
from torchmix.storage.random_access import LocalFile, RandomAccessFile, ReadAhead
from torchmix.storage.stores import Store, credentials_of, is_uri, open_store

# --- What may go wrong with a store, and whether it passes.
#
# What cannot pass, as a missing object or refused credentials, is not tried again; all else is, since stores have many
# names for a busy server.

logger = logging.getLogger(__name__)

STORE_WAITS_S = (0.1, 0.5, 2.0, 5.0)
"""Waits before further attempts: throttling and restarts take seconds, and the store's client has tried already."""

MOST_CHARACTERS = 400
"""Most characters of a store's own words in a message."""

_LASTING_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    TypeError,
    ValueError,
)
_LASTING = re.compile(r"AWS Error (ACCESS_DENIED|NO_SUCH_\w+|RESOURCE_NOT_FOUND|INVALID_ACCESS_KEY_ID|SIGNATURE_\w+)")
_REFUSED = re.compile(r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_|PERMISSION_DENIED|UNAUTHENTICATED")
_STATUS = re.compile(r"HTTP status (\d{3})|\bhttp[ =]?(\d{3})\b", re.IGNORECASE)
_PASSING_STATUS = (408, 425, 429)
_REQUEST_ID = re.compile(r"\s*\(Request ID: [^)]*\)")

Result = TypeVar("Result")


def try_again(attempt: Callable[[], Result], what: str, uri: str, where: str = "") -> Result:
    """What an attempt gives, tried again while it fails in a way that may pass.

    Args:
        attempt: What is tried; errors of this package are raised as they are.
        what: Begins messages: what is attempted.
        uri: What the bytes belong to.
        where: Source and URI; empty where nobody knows the source.

    Raises:
        SourceUnreadable: It failed for good, or too often.
    """
    for number, wait_s in enumerate((*STORE_WAITS_S, None), 1):
        try:
            return attempt()
        except (TorchmixError, MemoryError):
            raise
        except Exception as error:  # packages of stores raise errors of their own
            if wait_s is None or not may_pass(error):
                raise SourceUnreadable(f"{what}: {text_of(error)}{_remedy(error, uri, number)}", where) from error
            logger.warning("%s: %s: %s; trying again in %s s", where or uri, what, text_of(error), wait_s)
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def may_pass(error: Exception) -> bool:
    """Whether another attempt may do better."""
    if isinstance(error, _LASTING_ERRORS):
        return False
    status = _status_of(error)
    if status is not None:
        return not 400 <= status < 500 or status in _PASSING_STATUS
    return not (_LASTING.search(str(error)) or _REFUSED.search(str(error)))


def text_of(error: Exception) -> str:
    """An error on one line."""
    if isinstance(error, FileNotFoundError):
        return "there is no such object"
    text = _REQUEST_ID.sub("", " ".join(str(error).split())).rstrip(".:; ") or type(error).__name__
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."


def is_refused(error: Exception) -> bool:
    """Whether the store refuses the credentials."""
    return isinstance(error, PermissionError) or _status_of(error) in (401, 403) or bool(_REFUSED.search(str(error)))


def _status_of(error: Exception) -> int | None:
    """The HTTP status that a store answered with, where the error tells."""
    for holder in (getattr(error, "response", None), error):
        status = getattr(holder, "status_code", None) or getattr(holder, "status", None)
        if isinstance(status, int):
            return status
    found = _STATUS.search(str(error))
    return int(found[1] or found[2]) if found is not None else None


def _remedy(error: Exception, uri: str, attempts: int) -> str:
    if isinstance(error, FileNotFoundError):
        return "; it was deleted or moved, or its name is another: put it back, or run torchmix index"
    if is_refused(error):
        return f"; the store refuses these credentials, which are looked for in {credentials_of(uri)}"
    times = f", {attempts} times" if attempts > 1 else ""
    return f"{times}; check the store and the connection to it, then start again from the last state"


# --- An object of a store as a file: any range of it, tried again while the store fails.
#
# Bytes come from the object that was opened. After any failure it is opened again; if size or version differ then,
# `on_change` decides. An object that is overwritten between two reads that both succeed is not noticed here: stores
# have no open files. Cost: opening is one request, a range another one.


class StoreFile:
    """One object; safe to share between threads."""

    def __init__(self, uri: str, where: str, on_change: Callable[[StoreFile], None] | None = None) -> None:
        """Open it.

        Args:
            uri: The object.
            where: Source and URI, for errors.
            on_change: Called with the file when it was opened again and is another object; raises unless that is
                allowed. By default it is never allowed.

        Raises:
            SourceUnreadable: There is none, or it cannot be read.
        """
        self._uri = uri
        self._where = where
        self._on_change = on_change or self._refuse_change
        self._lock = threading.RLock()
        self._object: _Object | None = try_again(lambda: _open(uri), "cannot be opened", uri, where)
        self._identity = (self._object.num_bytes, self._object.version)

    @property
    def num_bytes(self) -> int:
        """See `RandomAccessFile.num_bytes`."""
        return self._identity[0]

    @property
    def version(self) -> str:
        """What the store tells this content of the object by, as an ETag; empty if it does not."""
        return self._identity[1]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """See `RandomAccessFile.read`."""
        stop = min(offset + num_bytes, self.num_bytes)
        if offset >= stop:
            return b""
        return try_again(
            lambda: self._read_once(offset, stop), f"cannot read bytes [{offset}, {stop})", self._uri, self._where
        )

    def will_read(self, offset: int, num_bytes: int) -> None:
        """See `RandomAccessFile.will_read`; nothing is read ahead here."""

    def close(self) -> None:
        """See `RandomAccessFile.close`."""
        self._object = None

    def _read_once(self, offset: int, stop: int) -> bytes:
        opened = self._open_again()
        try:
            content = opened.read(offset, stop)
            if len(content) != stop - offset:
                raise OSError(f"the store gave {len(content)} bytes of {stop - offset}")
            return content
        except Exception:  # whatever it was: what the object is now is looked up before it is read again
            with self._lock:
                if self._object is opened:
                    self._object = None
            raise

    def _open_again(self) -> _Object:
        with self._lock:
            if self._object is not None:
                return self._object
            opened = _open(self._uri, is_known=True)
            before, self._identity = self._identity, (opened.num_bytes, opened.version)
            self._object = opened
            if self._identity != before:
                try:
                    self._on_change(self)  # which reads it; other threads wait
                except BaseException:
                    self._object, self._identity = None, before
                    raise
            return opened

    def _refuse_change(self, _: StoreFile) -> None:
        raise SourceChanged(
            "it was replaced while it was read; wait until it is written, then index again", self._where
        )


class _Object:
    """An object at a moment; `size` and `version` as the store had them then."""

    def __init__(self, num_bytes: int, version: str, read: Callable[[int, int], bytes]) -> None:
        self.num_bytes = num_bytes
        self.version = version
        self.read = read
        """Bytes from an offset to before another one."""


def _open(uri: str, *, is_known: bool = False) -> _Object:
    """Ask the store for an object; one that `is_known` may have been replaced since."""
    store = open_store(uri)
    path = store.path(uri)
    return _open_by_fsspec(store, path, is_known) if store.fsspec is not None else _open_by_arrow(store, path)


def _open_by_arrow(store: Store, path: str) -> _Object:
    file = store.system.open_input_file(path)
    facts = {key.lower(): value for key, value in (file.metadata() or {}).items()}
    version = facts.get("etag") or facts.get("generation") or b""

    def read(offset: int, stop: int) -> bytes:
        content: bytes = file.read_at(stop - offset, offset)
        return content

    return _Object(file.size(), version.decode(errors="replace") if isinstance(version, bytes) else str(version), read)


def _open_by_fsspec(store: Store, path: str, is_known: bool) -> _Object:
    system: Any = store.fsspec
    if is_known:
        system.invalidate_cache()
    facts = system.info(path)
    if facts.get("type") == "directory":
        raise IsADirectoryError(f"{path} is a folder")
    # Otherwise its files read ahead by megabytes, again for each range.
    options = {} if getattr(system, "async_impl", False) else {"cache_type": "none"}
    version = next((str(facts[key]) for key in ("ETag", "etag", "blob_id", "generation") if facts.get(key)), "")

    def read(offset: int, stop: int) -> bytes:
        return bytes(system.cat_file(path, start=offset, end=stop, **options))

    return _Object(int(facts["size"]), version, read)


# --- Objects are listed, written whole, and deleted.
#
# A write is seen whole or not at all, and by the next listing: so it is in S3, Google's store, Azure's, MinIO and Ceph.
# Each is tried again as a read is. Cost: a request for a thousand listed objects, one for a written or deleted one, or
# a few for what has many megabytes.


class ObjectFacts(NamedTuple):
    """What a listing says of an object."""

    num_bytes: int
    written_s: float | None
    """When it was written, by the store's clock; None if the store does not tell."""


def list_objects(uri: str) -> dict[str, ObjectFacts]:
    """The objects below a URI, by their names from there on; empty if there is none.

    Raises:
        SourceUnreadable: The store cannot be listed.
    """

    def attempt() -> dict[str, ObjectFacts]:
        store = open_store(uri)
        root = store.path(uri).rstrip("/")
        found = dict[str, ObjectFacts]()
        if store.fsspec is not None:
            store.fsspec.invalidate_cache()
            for path, facts in store.fsspec.find(root, detail=True).items():
                at = next((facts[key] for key in _TIMES if facts.get(key) is not None), None)
                found[_below(root, path)] = ObjectFacts(int(facts["size"]), _seconds(at))
            return found
        for info in store.system.get_file_info(fs.FileSelector(root, allow_not_found=True, recursive=True)):
            if info.type == fs.FileType.File:
                written_s = None if info.mtime_ns is None else info.mtime_ns / 1e9
                found[_below(root, info.path)] = ObjectFacts(info.size, written_s)
        return found

    return try_again(attempt, f"cannot list {uri}", uri)


_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Where packages for fsspec say when an object was written."""


def _seconds(at: Any) -> float | None:
    """A time of a store's package, which is a number, a `datetime` or text."""
    if isinstance(at, str):
        with suppress(ValueError):
            at = datetime.fromisoformat(at.replace("Z", "+00:00"))
    return at.timestamp() if isinstance(at, datetime) else float(at) if isinstance(at, int | float) else None


def _below(root: str, path: str) -> str:
    return path.strip("/").removeprefix(root.strip("/")).strip("/")


def put_object(uri: str, content: Any) -> None:
    """Write an object, in the place of one that may be there; `content` is anything with a buffer.

    Raises:
        SourceUnreadable: The store does not take it.
    """

    def attempt() -> None:
        store = open_store(uri)
        path = store.path(uri)
        try:
            stream = store.system.open_output_stream(path)
        except FileNotFoundError:  # a store with folders
            store.system.create_dir(path.rpartition("/")[0], recursive=True)
            stream = store.system.open_output_stream(path)
        with stream:
            stream.write(content)

    try_again(attempt, f"cannot write {uri}", uri)


def delete_object(uri: str) -> None:
    """Delete an object, if it is there; `SourceUnreadable` if the store refuses."""

    def attempt() -> None:
        store = open_store(uri)
        with suppress(FileNotFoundError):
            store.system.delete_file(store.path(uri))

    try_again(attempt, f"cannot delete {uri}", uri)


# --- A path or URI -> an open file.
#
# Whatever keeps it from being opened or read is `SourceUnreadable`, and every error about what it holds names source
# and place. Cost: one system call, or one request.


@contextmanager
def opened(path: str | Path, where: str) -> Iterator[RandomAccessFile]:
    """A file while it is scanned; `where` (source and place) is added to errors of the block.

    Raises:
        SourceUnreadable: It cannot be opened, or a read within the `with` block failed.
    """
    file: RandomAccessFile
    if isinstance(path, str) and is_uri(path):
        file = ReadAhead(StoreFile(path, where))
    else:
        try:
            file = LocalFile(path)
        except OSError as error:
            raise SourceUnreadable(
                f"cannot be opened: {error.strerror}; make it readable, or name another file", where
            ) from None
    try:
        with located(where):
            yield file
    except OSError as error:
        raise SourceUnreadable(f"cannot be read: {error.strerror or error}", where) from None
    finally:
        file.close()
