"""Files -> their indexes, many at once.

A scanned file is kept on disk as soon as it is done, so that a run that is killed or fails is continued by the next; a
file that was altered while it was scanned is an error. The first error ends all threads within one step of their
progress. Cost: the column of each file is read and decoded once, in as many threads as the process has processors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import TypeVar

import msgspec

from torchmix.catalog.file_index import FileIndex, load_file_index, save_file_index
from torchmix.catalog.manifest import MOST_ID, BadRows
from torchmix.catalog.page_table import table_of_file
from torchmix.errors import MemoryLimit, SourceChanged, SourceUnreadable, where_of
from torchmix.formats.kept_ids import IdsWriter, identity_of, read_kept
from torchmix.formats.source import FileScan, FormatSource
from torchmix.formats.table import files_beside, row_of
from torchmix.indexing.file_changes import FoundFile
from torchmix.indexing.measure_rows import scan_and_measure
from torchmix.storage.random_access import settled_statuses
from torchmix.storage.store_file import opened
from torchmix.storage.stores import is_uri, place_of

logger = logging.getLogger(__name__)

MOST_THREADS = 32
STORE_THREADS = 8
"""Where files lie in stores: so many requests of some 20 to 100 ms are under way, with up to 40 MiB each."""
FEW_FILES, FEW_BYTES = 1 << 10, 4 << 30
"""Below both, one thread scans: the .idx of 306 small datasets take less CPU and time so."""

Result = TypeVar("Result")

Progress = Callable[[int, int, str, str], None]
"""Called with bytes done, bytes in all, source and file; from several threads, but one call at a time."""


class ScanTask(msgspec.Struct, frozen=True, kw_only=True):
    """A file to scan."""

    source: FormatSource
    """How it is read."""
    found: FoundFile
    """Its path and identity."""
    index: Path
    """Where its index is kept."""
    column: str | None = None
    """Its column, which kept ids are of."""
    ids_only: bool = True
    """Whether integers that are no token ids are an error."""
    masks_bad_rows: bool = False
    """Rows that cannot be read have no tokens; else the first one is an error."""
    kept: Path | None = None
    """Where the ids of its rows are kept; None: they are not."""


class ScannedFile(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The index of one file, and whence it is."""

    index: FileIndex
    resumed: bool
    """Whether an earlier, unfinished run scanned it."""


def fingerprint_files(files: Sequence[tuple[FormatSource, str]], directory: Path) -> list[FoundFile]:
    """Read the identity of each file from its end.

    Args:
        files: Source and path of each.
        directory: The recipe's folder.

    Raises:
        SourceUnreadable: A file cannot be opened, or has no whole footer.
    """
    calls = [partial(_fingerprint, source, path, directory) for source, path in files]
    return _in_parallel(calls, Event(), _num_threads([(source, path, 0) for source, path in files]))


def scan_files(tasks: Sequence[ScanTask], directory: Path, progress: Progress | None = None) -> list[ScannedFile]:
    """Scan files, or load what an earlier run kept of them.

    Args:
        tasks: The files.
        directory: The recipe's folder.
        progress: Called with bytes of files; bytes of other columns are added when a file is done.

    Raises:
        SourceUnreadable: A column is missing or of a wrong type, a file is not of a known format, or a token is no id.
        SourceChanged: A file is not the one that was fingerprinted.
        CorruptPage: A page does not decode.
        OSError: An index cannot be written.
    """
    stop = Event()
    done = _TaskProgress(tasks, progress, stop)
    calls = [partial(_scan, task, directory, done) for task in tasks]
    sizes = [(task.source, task.found.path, task.found.num_bytes) for task in tasks]
    return _in_parallel(calls, stop, _num_threads(sizes))


class _Stopped(BaseException):
    """Ends a thread because another one failed."""


class _TaskProgress:
    """Progress of all threads together."""

    def __init__(self, tasks: Sequence[ScanTask], progress: Progress | None, stop: Event) -> None:
        self._progress = progress
        self._stop = stop
        self._lock = Lock()
        self._done_bytes = 0
        self._total_bytes = sum(task.found.num_bytes for task in tasks)

    def advance(self, task: ScanTask, num_bytes: int) -> None:
        """Report more bytes of a file."""
        if self._stop.is_set():
            raise _Stopped
        with self._lock:
            self._done_bytes += num_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes, task.source.name, task.found.path)


def _scan(task: ScanTask, directory: Path, done: _TaskProgress) -> ScannedFile:
    left_bytes = task.found.num_bytes

    def advance(num_bytes: int) -> None:
        nonlocal left_bytes
        done.advance(task, min(num_bytes, left_bytes))
        left_bytes -= min(num_bytes, left_bytes)

    advance(0)
    identity = identity_of(task.found.num_bytes, task.found.footer_hash, task.column, task.source.transform_id)
    has_ids = task.kept is None or read_kept(task.kept, identity) is not None
    index = load_file_index(task.index) if has_ids else None
    resumed = index is not None
    if index is None:
        place = place_of(directory, task.found.path)
        bad = BadRows() if task.masks_bad_rows else None
        with ExitStack() as stack:
            ids = None if has_ids or task.kept is None else stack.enter_context(IdsWriter(task.kept, identity))
            keep = None if ids is None else ids.add
            try:
                scan = scan_and_measure(task.source, place, bad=bad, progress=advance, keep=keep)
            except MemoryError as error:  # no bad row: with more memory it is read
                raise MemoryLimit(
                    f"{where_of(task.source.name, place)}: reading it asks for more memory than this process may have "
                    f"({str(error) or 'no more'}): give it more, or run torchmix index again when there is more"
                ) from error
            if (scan.num_bytes, scan.footer_hash) != (task.found.num_bytes, task.found.footer_hash):
                raise SourceChanged(
                    "it was altered while it was indexed; wait until it is written, then run torchmix index again",
                    where_of(task.source.name, place),
                )
            if ids is not None:
                ids.finish()
        if task.ids_only:
            _check_ids(task.source.name, place, scan)
        index = index_of_scan(scan)
        index.check()
        if not scan.is_quick:
            save_file_index(task.index, index)
    advance(left_bytes)
    what = "was scanned before" if resumed else "is scanned"
    logger.info("source %r: %s %s", task.source.name, task.found.path, what)
    return ScannedFile(index=index, resumed=resumed)


def _check_ids(name: str, place: str, scan: FileScan) -> None:
    """Raise SourceUnreadable where a file holds what is no token id."""
    if scan.ids is not None and scan.ids.outside is not None:
        row, token = scan.ids.outside
        raise SourceUnreadable(
            f"row {row} holds the token {token}; ids go from 0 to {MOST_ID}. Write the file again, or name the column "
            "that holds token ids",
            where_of(name, place),
            row=row,
        )


def index_of_scan(scan: FileScan) -> FileIndex:
    """The index of a file, from its scan."""
    return FileIndex(
        num_bytes=scan.num_bytes,
        footer_hash=scan.footer_hash,
        split_pages=scan.split_pages,
        whole_chunks=scan.whole_chunks,
        schema=scan.schema,
        pages=table_of_file(scan),
        tokens=scan.tokens,
        ids=None if scan.ids is None else scan.ids.range,
        num_bad_rows=0 if scan.bad is None else len(scan.bad.rows),
        bad_rows=() if scan.bad is None else scan.bad.listed,
        lists=scan.lists,
        sizes=scan.sizes,
        items=scan.items,
        marks=scan.marks,
    )


def _fingerprint(source: FormatSource, path: str, directory: Path) -> FoundFile:
    place = place_of(directory, path)
    with opened(place, where_of(source.name, place)) as file:
        status = settled_statuses(file, files_beside(source.format, place))
        num_bytes, footer_hash = source.fingerprint(file, place)
    return FoundFile(path=path, num_bytes=num_bytes, footer_hash=footer_hash, status=status)


def _in_parallel(calls: Sequence[Callable[[], Result]], stop: Event, num_threads: int) -> list[Result]:
    """Results of calls in their order; the first error, in that order, after all threads have ended."""
    with ThreadPoolExecutor(num_threads, "torchmix-index") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also when the main thread is interrupted
            if not all(map(_succeeded, futures)):
                stop.set()
                pool.shutdown(cancel_futures=True)
    failures = [future.exception() for future in futures if not future.cancelled()]
    for failure in failures:
        if failure is not None and not isinstance(failure, _Stopped):
            raise failure
    return [future.result() for future in futures]


def in_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Run calls, as many at once as the process has processors; the first error, in their order, after all ended."""
    if calls:
        _in_parallel(calls, Event(), min(MOST_THREADS, _num_processors()))


def _num_processors() -> int:
    # Some systems cannot say which processors are ours.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _num_threads(files: Sequence[tuple[FormatSource, str, int]]) -> int:
    """For files with their sources and sizes: one for each processor; for objects at least STORE_THREADS, which mostly
    wait; one where there is little more to do than Python, which threads would only take from each other."""
    in_store = any(is_uri(path) for _, path, _ in files)
    are_few = len(files) <= FEW_FILES and sum(size for _, _, size in files) <= FEW_BYTES
    if are_few and not in_store and not any(row_of(source.format).scan_reads_tokens for source, _, _ in files):
        return 1
    available = _num_processors()
    return min(MOST_THREADS, max(available, STORE_THREADS) if in_store else available)


def _succeeded(future: Future[Result]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
