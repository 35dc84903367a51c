"""An object of a store as a file: any range of it, tried again while the store fails.

In: a URI. Out: `StoreFile`. Must hold: bytes come from the object that was opened. After any failure it is opened
again; if size or version differ then, `on_change` decides. An object that is overwritten between two reads that both
succeed is not noticed here: stores have no open files. Cost: opening is one request, a range another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torchmix.errors import SourceChanged
from torchmix.storage.store_errors import try_again
from torchmix.storage.stores import Store, open_store


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
