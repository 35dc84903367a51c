"""Bytes of indexed objects in stores: opened when needed, checked against the catalog, read from many threads at once.

In: file and byte range. Out: the bytes. Must hold: an object that is not the indexed one, by size and footer, is not
read; after a failure it is checked again, and refused if it is another object by then. Cost: one request a call; the
first call for an object makes two or three more, for its size and its footer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from torchmix.catalog.manifest import FileEntry
from torchmix.errors import SourceChanged, SourceUnreadable, where_of
from torchmix.formats.source import PageSource
from torchmix.storage.random_access import RandomAccessFile
from torchmix.storage.read_ahead import ReadAhead
from torchmix.storage.store_file import StoreFile

MOST_OBJECTS = 4096
"""Opened objects kept for one source, a few kilobytes each; they hold no connection."""


def check_identity(source: PageSource, entry: FileEntry, file: RandomAccessFile, path: str) -> None:
    """Raise SourceChanged unless an open file is the indexed one."""
    if file.num_bytes != entry.num_bytes:
        raise changed(source, entry, path, f"has {file.num_bytes} bytes")
    try:
        _, footer_hash = source.fingerprint(file, path)
    except SourceUnreadable as error:
        if error.__cause__ is not None:
            raise  # it could not be read
        raise changed(source, entry, path, f"has no whole footer ({error})") from error
    if footer_hash != entry.footer_hash:
        raise changed(source, entry, path, f"has footer hash {footer_hash}")


def changed(source: PageSource, entry: FileEntry, path: str, found: str) -> SourceChanged:
    """The error that says what was found in a file, and what was indexed."""
    return SourceChanged(
        f"it {found}; it was indexed with {entry.num_bytes} bytes and footer hash {entry.footer_hash}. Put the file "
        "back, or run torchmix index, which makes another order",
        where_of(source.name, path),
    )


class OpenObjects:
    """The objects of one source; safe to share between threads."""

    def __init__(self, source: PageSource, files: Sequence[FileEntry]) -> None:
        """Nothing is opened yet. `files` are the catalog's; only those in stores may be read here."""
        self._source = source
        self._files = files
        self._lock = threading.Lock()
        self._open: OrderedDict[int, StoreFile] = OrderedDict()
        self._opening: dict[int, threading.Lock] = {}
        self._checked: dict[int, str] = {}
        """The version of an object that was the indexed one."""
        self.bytes_read = 0

    def read(self, file: int, offset: int, num_bytes: int) -> bytes:
        """Bytes [offset, offset + num_bytes) of an object.

        Raises:
            SourceChanged: It is not the one that was indexed.
            SourceUnreadable: It was deleted, or the store refuses or fails again and again.
        """
        content = self._object(file).read(offset, num_bytes)
        if len(content) < num_bytes:
            found = f"ends before byte {offset + num_bytes}"
            raise changed(self._source, self._files[file], self._files[file].path, found)
        with self._lock:
            self.bytes_read += num_bytes
        return content

    def _object(self, file: int) -> StoreFile:
        with self._lock:
            opened = self._open.get(file)
            if opened is not None:
                self._open.move_to_end(file)
                return opened
            opening = self._opening.setdefault(file, threading.Lock())
        with opening:  # other threads may open other objects meanwhile
            with self._lock:
                opened = self._open.get(file)
            if opened is not None:
                return opened
            path = self._files[file].path
            opened = StoreFile(path, where_of(self._source.name, path), lambda again: self._check(file, again))
            self._check(file, opened)
            with self._lock:
                self._open[file] = opened
                while len(self._open) > MOST_OBJECTS:
                    self._open.popitem(last=False)
                self._opening.pop(file, None)
        return opened

    def _check(self, file: int, opened: StoreFile) -> None:
        """Raise SourceChanged unless an object is the indexed one."""
        entry = self._files[file]
        if opened.version and self._checked.get(file) == opened.version and opened.num_bytes == entry.num_bytes:
            return
        check_identity(self._source, entry, ReadAhead(opened), entry.path)
        self._checked[file] = opened.version
