"""Bytes of indexed files: opened when needed, checked against the catalog, read at offsets.

In: source, file and byte range. Out: the bytes. Must hold: a file that is not the indexed one, by size and footer, is
not opened; one that is replaced while it is open stays the indexed one (one overwritten in place is found by what its
pages decode to). Errors of a shared disk that pass are tried again, on the file opened anew. Cost: one `pread` a call;
opening also reads the footer, once per file and process while its inode does not change. At most MOST_FILES are open,
the least recently used is closed first.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from torchmix.catalog.manifest import FileEntry
from torchmix.errors import SourceChanged, SourceUnreadable
from torchmix.sources.source import Source, read_range

logger = logging.getLogger(__name__)

MOST_FILES = 128
RETRY_WAITS_S = (0.05, 0.25, 1.0)
PASSING_ERRORS = frozenset({errno.EIO, errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN})


class _Inode(NamedTuple):
    """What the kernel says of an open file; equal for the same unaltered file of this node."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int


class OpenFiles:
    """The files of one source."""

    def __init__(self, source: Source, files: Sequence[FileEntry], directory: Path, descriptors: Descriptors) -> None:
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
        self.bytes_read = 0

    def path(self, file: int) -> Path:
        """Where a file lies."""
        return self._directory / self._files[file].path

    def read(self, file: int, offset: int, num_bytes: int) -> bytes:
        """Bytes [offset, offset + num_bytes) of a file.

        Raises:
            SourceChanged: The file is not the one that was indexed, or was cut while it was open.
            SourceUnreadable: It was deleted, may not be read, or its disk fails again and again.
        """
        for wait_s in (*RETRY_WAITS_S, None):
            try:
                content = read_range(self._descriptor(file), offset, num_bytes)
            except OSError as error:
                self._descriptors.close(self._key(file))
                what = f"cannot read {num_bytes} bytes at {offset} of {self.path(file)}: {error.strerror}"
                if error.errno not in PASSING_ERRORS or wait_s is None:
                    raise SourceUnreadable(f"source {self._source.name!r}: {what}{_remedy(error)}") from error
                logger.warning("source %r: %s; trying again in %s s", self._source.name, what, wait_s)
                time.sleep(wait_s)
            else:
                if len(content) < num_bytes:
                    raise self._changed(file, f"ends before byte {offset + num_bytes}")
                self.bytes_read += num_bytes
                return content
        raise AssertionError("the last attempt returns or raises")

    def map(self, file: int) -> pa.Buffer:
        """All of a file, mapped into memory; no descriptor stays open for it.

        Raises:
            SourceChanged, SourceUnreadable: As `read`.
            OSError: It cannot be mapped, as on some file systems.
        """
        self.read(file, 0, 0)  # opens and checks it, again and again where that may help
        with pa.memory_map(f"/dev/fd/{self._descriptor(file)}") as mapped:
            return mapped.read_buffer()

    def will_need(self, file: int, ranges: Iterable[tuple[int, int]]) -> None:
        """Tell the kernel which (offset, bytes) of a file will be used soon, so that it reads them meanwhile."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                for offset, num_bytes in ranges:
                    os.posix_fadvise(self._descriptor(file), offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def check_in_place(self, file: int) -> None:
        """Look whether a file that was used is still what it was; one that was replaced or deleted is out of reach.

        Raises:
            SourceChanged: It was cut, or overwritten in place.
        """
        known = self._checked[file]
        try:
            status = self.path(file).stat()
            if (status.st_dev, status.st_ino) != (known.device, known.inode) or _inode(status) == known:
                return
            self._descriptors.close(self._key(file))
            self._descriptor(file)
        except OSError:
            return

    def _key(self, file: int) -> tuple[str, int]:
        return self._source.name, file

    def _descriptor(self, file: int) -> int:
        descriptor = self._descriptors.use(self._key(file))
        if descriptor is not None:
            return descriptor
        descriptor = os.open(self.path(file), os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._check(file, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptors.keep(self._key(file), descriptor)
        return descriptor

    def _check(self, file: int, descriptor: int) -> None:
        """Raise SourceChanged unless an open file is the indexed one."""
        status, entry = os.fstat(descriptor), self._files[file]
        inode = _inode(status)
        if self._checked.get(file) == inode:
            return
        if status.st_size != entry.num_bytes:
            raise self._changed(file, f"has {status.st_size} bytes")
        try:
            _, footer_hash = self._source.fingerprint(descriptor, str(self.path(file)))
        except SourceUnreadable as error:
            raise self._changed(file, f"has no whole footer ({error})") from error
        if footer_hash != entry.footer_hash:
            raise self._changed(file, f"has footer hash {footer_hash}")
        self._checked[file] = inode

    def _changed(self, file: int, found: str) -> SourceChanged:
        entry = self._files[file]
        return SourceChanged(
            f"source {self._source.name!r}: {self.path(file)} {found}; it was indexed with {entry.num_bytes} bytes and "
            f"footer hash {entry.footer_hash}. Put the file back, or run torchmix index, which makes another order"
        )


class Descriptors:
    """Open file descriptors of all sources, the least recently used closed first."""

    def __init__(self, most_files: int = MOST_FILES) -> None:
        self._most_files = most_files
        self._open: OrderedDict[tuple[str, int], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def use(self, key: tuple[str, int]) -> int | None:
        """The descriptor, if it is open."""
        descriptor = self._open.get(key)
        if descriptor is not None:
            self._open.move_to_end(key)
        return descriptor

    def keep(self, key: tuple[str, int], descriptor: int) -> None:
        """Own a descriptor that was opened."""
        while len(self._open) >= self._most_files:
            os.close(self._open.popitem(last=False)[1])
        self._open[key] = descriptor

    def close(self, key: tuple[str, int]) -> None:
        """Close a descriptor, if it is open."""
        descriptor = self._open.pop(key, None)
        if descriptor is not None:
            os.close(descriptor)

    def close_all(self) -> None:
        """Close every descriptor."""
        while self._open:
            os.close(self._open.popitem()[1])


def _inode(status: os.stat_result) -> _Inode:
    return _Inode(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _remedy(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "; it was deleted or moved since it was indexed. Put it back, or run torchmix index"
    if error.errno in PASSING_ERRORS:
        return f", {len(RETRY_WAITS_S) + 1} times; check the disk or its mount, then start again from the last state"
    return "; make it readable for this process"
