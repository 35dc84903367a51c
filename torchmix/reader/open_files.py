"""Bytes of indexed files and objects: opened when needed, checked against the catalog, read at offsets."""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import pyarrow as pa

from torchmix.catalog.manifest import FileEntry
from torchmix.errors import SourceChanged, SourceUnreadable, where_of
from torchmix.formats.source import PageSource
from torchmix.formats.table import files_beside
from torchmix.storage.random_access import LocalFile, RandomAccessFile, ReadAhead, statuses
from torchmix.storage.store_file import StoreFile
from torchmix.storage.stores import is_uri, place_of

# --- Bytes of indexed objects in stores: opened when needed, checked against the catalog, read from many threads at
# once.
#
# An object that is not the indexed one, by size and footer, is not read; after a failure it is checked again, and
# refused if it is another object by then. Cost: one request a call; the first call for an object makes two or three
# more, for its size and its footer.

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


# --- Byte ranges of objects -> few requests, several under way at once.
#
# Bytes and errors are those of reading the ranges one after the other, since each is waited for where it is used; only
# bytes of named ranges are kept. Cost: one request for a group of neighbours, and a copy of their bytes; at most
# MOST_REQUESTS threads, and HELD_BYTES of bytes not used yet, or more where ranges are used out of order.
#
# Ranges with a gap of GAP_BYTES or less are neighbours: such a gap takes 1 ms at 60 MB/s, a request takes 10 to 100
# ms. A gap is as large as a small page, so less than twice the needed bytes are fetched where pages have 64 KiB or
# more.

GAP_BYTES = 64 << 10
MOST_REQUEST_BYTES = 8 << 20
"""Most bytes of a request; larger ranges are split, because several connections are faster than one."""
MOST_REQUESTS = 16
"""Most requests of one reader under way at once. With 20 ms a request and pages of 64 KiB they bring 50 MB/s; stores
allow hundreds."""
HELD_BYTES = 64 << 20
"""Most bytes of one reader that are requested and not used yet: 16 requests of 4 MiB."""


class Wanted(NamedTuple):
    """A range that will be read."""

    objects: OpenObjects
    file: int
    offset: int
    num_bytes: int


class Request(NamedTuple):
    """A range that one request asks for."""

    objects: OpenObjects
    file: int
    start: int
    stop: int
    num_uses: int
    """Number of named ranges that need some of its bytes."""


def plan_requests(wanted: Sequence[Wanted]) -> list[Request]:
    """Requests that cover all ranges, in the order of their first use."""
    of_file: dict[tuple[int, int], list[int]] = {}
    for place, one in enumerate(wanted):
        if one.num_bytes:
            of_file.setdefault((id(one.objects), one.file), []).append(place)
    planned: list[tuple[int, Request]] = []
    for places in of_file.values():
        places.sort(key=lambda place: wanted[place].offset)
        together: list[int] = []
        stop = 0
        for place in places:
            offset, num_bytes = wanted[place].offset, wanted[place].num_bytes
            if together and offset > stop + GAP_BYTES:
                planned += _cut(wanted, together, stop)
                together, stop = [], 0
            together.append(place)
            stop = max(stop, offset + num_bytes)
        planned += _cut(wanted, together, stop)
    planned.sort(key=lambda one: (one[0], one[1].start))
    return [request for _, request in planned]


def _cut(wanted: Sequence[Wanted], places: Sequence[int], stop: int) -> Iterable[tuple[int, Request]]:
    """Neighbouring ranges, by offset, as requests of at most MOST_REQUEST_BYTES, each with the place of its first use.

    A gap between ranges is fetched only inside a request.
    """
    objects, file, begin, _ = wanted[places[0]]
    for start in range(begin, stop, MOST_REQUEST_BYTES):
        end = min(start + MOST_REQUEST_BYTES, stop)
        uses = [p for p in places if wanted[p].offset < end and sum(wanted[p][2:]) > start]
        if uses:
            first = max(start, min(wanted[p].offset for p in uses))
            last = min(end, max(sum(wanted[p][2:]) for p in uses))
            yield min(uses), Request(objects, file, first, last, len(uses))


class RequestPool:
    """Threads that fetch, and the number of bytes that all fetches of a reader hold."""

    def __init__(self) -> None:
        """No thread runs yet."""
        self._threads: ThreadPoolExecutor | None = None
        self.held_bytes = 0
        self.num_requests = 0

    def submit(self, request: Request) -> Future[bytes]:
        """Begin a request."""
        self._threads = self._threads or ThreadPoolExecutor(MOST_REQUESTS, "torchmix-fetch")
        self.num_requests += 1
        size = request.stop - request.start
        return self._threads.submit(request.objects.read, request.file, request.start, size)

    def close(self) -> None:
        """End the threads, after the requests that are under way."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None


class _Part:
    """A request and its result."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.uses_left = request.num_uses
        self.coming: Future[bytes] | None = None


class RangeFetch:
    """The requests of one call; belongs to one thread, and is closed after use."""

    def __init__(self, pool: RequestPool, wanted: Sequence[Wanted]) -> None:
        """Begin the first requests."""
        self._pool = pool
        self._waiting: deque[_Part] = deque(map(_Part, plan_requests(wanted)))
        self._parts: dict[tuple[int, int], list[_Part]] = {}
        for part in self._waiting:
            self._parts.setdefault((id(part.request.objects), part.request.file), []).append(part)
        for parts in self._parts.values():
            parts.sort(key=lambda part: part.request.start)
        self._held: set[_Part] = set()
        self._begin()

    def __enter__(self) -> RangeFetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_here(self) -> bool:
        """Whether all bytes have come; begins the requests that there is room for now."""
        self._begin()
        return not self._waiting and all(part.coming is not None and part.coming.done() for part in self._held)

    def take(self, objects: OpenObjects, file: int, offset: int, num_bytes: int) -> bytes | None:
        """The bytes of a named range, which can be taken once; None if it was not named, or was taken already.

        Raises:
            SourceChanged, SourceUnreadable: As `OpenObjects.read`.
        """
        stop = offset + num_bytes
        needed: list[_Part] = []
        reached = offset
        for part in self._parts.get((id(objects), file), ()):
            if part.request.start > reached or reached >= stop:
                break
            if part.request.stop > reached:
                needed.append(part)
                reached = part.request.stop
        if reached < stop:
            return None
        pieces = []
        for part in needed:
            start = part.request.start
            content = self._wait(part)
            pieces.append(content[max(offset - start, 0) : stop - start])
            part.uses_left -= 1
            if not part.uses_left:
                self._drop(part)
        self._begin()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Drop unused bytes; requests under way run to their end, and their bytes are not counted."""
        self._waiting.clear()
        for part in list(self._held):
            self._drop(part)

    def _wait(self, part: _Part) -> bytes:
        if part.coming is None:
            self._waiting.remove(part)
            self._submit(part)
        assert part.coming is not None
        return part.coming.result()

    def _begin(self) -> None:
        """Begin requests while there is room, and always at least one."""
        while self._waiting:
            size = self._waiting[0].request.stop - self._waiting[0].request.start
            if self._held and self._pool.held_bytes + size > HELD_BYTES:
                return
            self._submit(self._waiting.popleft())

    def _submit(self, part: _Part) -> None:
        part.coming = self._pool.submit(part.request)
        self._held.add(part)
        self._pool.held_bytes += part.request.stop - part.request.start

    def _drop(self, part: _Part) -> None:
        self._held.discard(part)
        self._pool.held_bytes -= part.request.stop - part.request.start
        self._parts[id(part.request.objects), part.request.file].remove(part)
        if part.coming is not None:
            part.coming.cancel()


# --- Bytes of indexed files: opened when needed, checked against the catalog, read at offsets.
#
# A file that is not the indexed one, by size and footer, is not opened; one that is replaced while it is open stays
# the indexed one, with a warning (one overwritten in place, or in a store, is found by what its pages decode to).
# After a passing error of a shared disk, the file is opened and read again. Cost: one
# `pread` a call, and a look at the path once a second. Opening also reads the footer, once per file and process while
# the inode does not change, and not at all while the file is as the catalog saw it (random_access.py). At most
# `most_files()` are open; the least recently used one is closed first.

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks whether another file lies at the path of an open one."""
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
        self._looked_s: dict[int, float] = {}
        self._replaced: set[int] = set()
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
        """Check that a file in use was not altered in place; one that was replaced stays as it was, with a warning.

        Raises:
            SourceChanged: It was cut, or overwritten in place.
        """
        known = self._checked[file]
        try:
            status = Path(self.path(file)).stat()
            if (status.st_dev, status.st_ino) != (known.device, known.inode):
                self._warn_replaced(file)
                return
            if _inode(status) == known:
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
            self._look_for_another(file, opened)
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

    def _look_for_another(self, file: int, opened: LocalFile) -> None:
        """Warn where another file lies at the path of an open one."""
        now = time.monotonic()
        if now - self._looked_s.get(file, -LOOK_S) < LOOK_S:
            return
        self._looked_s[file] = now
        with suppress(OSError):  # it was deleted: whoever opens it next says so
            status, known = Path(self.path(file)).stat(), opened.status
            if (status.st_dev, status.st_ino) != (known.st_dev, known.st_ino):
                self._warn_replaced(file)

    def _warn_replaced(self, file: int) -> None:
        if file not in self._replaced:
            self._replaced.add(file)
            logger.warning(
                "%s: another file lies there since this process opened it. It reads on from the one that was indexed; "
                "processes that start from now on refuse the new one. Put the old file back, or run torchmix index",
                self.where(file),
            )

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
