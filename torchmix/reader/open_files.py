"""Bytes of indexed files: opened when needed, checked against the catalog, read at offsets.

In: source, file and byte range. Out: the bytes. Must hold: a file that is not the indexed one, by size and footer, is
not opened; one that is replaced while it is open stays the indexed one (one overwritten in place, or in a store, is
found by what its pages decode to). After a passing error of a shared disk, the file is opened and read again; stores
are in open_objects.py. Cost: one `pread` a call. Opening also reads the footer, once per file and process while the
inode does not change, and not at all while the file is as the catalog saw it (file_status.py). At most `most_files()`
are open; the least recently used one is closed first.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from torchmix.catalog.manifest import FileEntry
from torchmix.errors import SourceChanged, SourceUnreadable, where_of
from torchmix.formats.source import PageSource
from torchmix.formats.table import files_beside
from torchmix.reader.open_objects import OpenObjects, changed, check_identity
from torchmix.storage.file_status import statuses
from torchmix.storage.random_access import LocalFile
from torchmix.storage.stores import is_uri, place_of

logger = logging.getLogger(__name__)

RETRY_WAITS_S = (0.05, 0.25, 1.0)
PASSING_ERRORS = frozenset({errno.EIO, errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN})


class _Inode(NamedTuple):
    """What the kernel says about an open file; equal for the same unaltered file on this node."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int


class OpenFiles:
    """The files of one source."""

    def __init__(
        self, source: PageSource, files: Sequence[FileEntry], directory: Path, descriptors: Descriptors
    ) -> None:
        """Nothing is opened yet.

        Args:
            source: Knows how to fingerprint a file.
            files: As the catalog has them; a file is named by its index in it.
            directory: The recipe's folder.
            descriptors: Shared by all sources of a reader.
        """
        self._source = source
        self._files = files
        self._directory = directory
        self._descriptors = descriptors
        self._checked: dict[int, _Inode] = {}
        self._in_stores = [is_uri(entry.path) for entry in files]
        self._paths: dict[int, str] = {}
        self.objects = OpenObjects(source, files) if any(self._in_stores) else None
        """The files in stores; may be read from several threads at once."""
        self._bytes_read = 0

    @property
    def bytes_read(self) -> int:
        """Bytes that were read, without footers; for stores, with the gaps between pages."""
        return self._bytes_read + (self.objects.bytes_read if self.objects is not None else 0)

    def path(self, file: int) -> str:
        """Where a file lies."""
        path = self._paths.get(file)
        if path is None:
            path = self._paths[file] = place_of(self._directory, self._files[file].path)
        return path

    def where(self, file: int) -> str:
        """Source and file, for errors."""
        return where_of(self._source.name, self.path(file))

    def is_in_store(self, file: int) -> bool:
        """Whether reading the file is a request to a server."""
        return self._in_stores[file]

    def read(self, file: int, offset: int, num_bytes: int) -> bytes:
        """Bytes [offset, offset + num_bytes) of a file.

        Raises:
            SourceChanged: The file is not the one that was indexed, or was cut while it was open.
            SourceUnreadable: It was deleted, may not be read, or its disk or store fails again and again.
        """
        if self.objects is not None and self._in_stores[file]:
            return self.objects.read(file, offset, num_bytes)
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                content = self._open(file).read(offset, num_bytes)
            except OSError as error:
                self._descriptors.close(self._key(file))
                what, where = f"cannot read {num_bytes} bytes at {offset}: {error.strerror}", self.where(file)
                if error.errno not in PASSING_ERRORS or wait_s is None:
                    raise SourceUnreadable(f"{what}{_remedy(error)}", where, offset=offset) from error
                logger.warning("%s: %s; trying again in %s s", where, what, wait_s)
                time.sleep(wait_s)
            else:
                if len(content) < num_bytes:
                    raise self._changed(file, f"ends before byte {offset + num_bytes}")
                self._bytes_read += num_bytes
                return content
        raise AssertionError("the last attempt returns or raises")

    def map(self, file: int) -> pa.Buffer:
        """All of a file, mapped into memory; no descriptor stays open for it.

        Raises:
            SourceChanged, SourceUnreadable: As `read`.
            OSError: It cannot be mapped, as on some file systems.
        """
        self.read(file, 0, 0)  # opens and checks the file, with retries
        with pa.memory_map(f"/dev/fd/{self._open(file).fileno()}") as mapped:
            return mapped.read_buffer()

    def will_need(self, file: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Tell the kernel which (offset, bytes) of a file will be used soon, so that it reads them meanwhile.

        Raises:
            SourceChanged: The file is not the one that was indexed.
        """
        try:
            opened = self._open(file)
        except OSError:
            return  # the read itself will raise it
        for offset, num_bytes in ranges:
            opened.will_read(offset, num_bytes)

    def check_in_place(self, file: int) -> None:
        """Check that a file in use was not altered in place. A replaced or deleted file is out of reach.

        Raises:
            SourceChanged: It was cut, or overwritten in place.
        """
        known = self._checked[file]
        try:
            status = Path(self.path(file)).stat()
            if (status.st_dev, status.st_ino) != (known.device, known.inode) or _inode(status) == known:
                return
            self._descriptors.close(self._key(file))
            self._open(file)
        except OSError:
            return

    def _key(self, file: int) -> tuple[str, int]:
        return self._source.name, file

    def _open(self, file: int) -> LocalFile:
        opened = self._descriptors.use(self._key(file))
        if opened is not None:
            return opened
        opened = LocalFile(self.path(file))
        try:
            inode = _inode(opened.status)
            if self._checked.get(file) != inode:
                entry, path = self._files[file], self.path(file)
                # Hundreds of hashes would take most of the time of a start.
                if not entry.status or statuses(opened, files_beside(self._source.format, path)) != entry.status:
                    check_identity(self._source, entry, opened, path)
                self._checked[file] = inode
        except BaseException:
            opened.close()
            raise
        self._descriptors.keep(self._key(file), opened)
        return opened

    def _changed(self, file: int, found: str) -> SourceChanged:
        return changed(self._source, self._files[file], self.path(file), found)


def most_files() -> int:
    """Files that a reader keeps open: an eighth of the process's limit, at least 128 and at most 1024.

    Opening a file again takes some 30 microseconds, which counts where single pages of hundreds of files are read in
    turn.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else min(max(soft // 8, 128), 1024)


class Descriptors:
    """Open local files of all sources, the least recently used closed first."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: by default `most_files()`."""
        self._most_files = most_files() if most is None else most
        self._open: OrderedDict[tuple[str, int], LocalFile] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def use(self, key: tuple[str, int]) -> LocalFile | None:
        """The file, if it is open."""
        opened = self._open.get(key)
        if opened is not None:
            self._open.move_to_end(key)
        return opened

    def keep(self, key: tuple[str, int], opened: LocalFile) -> None:
        """Keep a file that the caller opened; closes it later."""
        while len(self._open) >= self._most_files:
            self._open.popitem(last=False)[1].close()
        self._open[key] = opened

    def close(self, key: tuple[str, int]) -> None:
        """Close a file, if it is open."""
        opened = self._open.pop(key, None)
        if opened is not None:
            opened.close()

    def close_all(self) -> None:
        """Close every file."""
        while self._open:
            self._open.popitem()[1].close()


def _inode(status: os.stat_result) -> _Inode:
    return _Inode(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _remedy(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "; it was deleted or moved since it was indexed. Put it back, or run torchmix index"
    if error.errno in PASSING_ERRORS:
        return f", {len(RETRY_WAITS_S) + 1} times; check the disk or its mount, then start again from the last state"
    return "; make it readable for this process"
