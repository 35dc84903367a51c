"""Which files of a source are new, changed or gone, and what an index run says and refuses of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Literal

import msgspec

from torchmix.catalog.file_index import FileIndex
from torchmix.catalog.manifest import FileEntry, check_bad_rows, listed_text
from torchmix.catalog.settings import SourceSettings
from torchmix.errors import SourceUnreadable
from torchmix.recipe.amounts import bytes_text
from torchmix.storage.random_access import FileStatus

# --- The progress of an index run as lines, for logs and where nobody watches.
#
# A run that takes less than a minute says nothing if `only_long` is set. Cost: one read of the clock for each call.

INTERVAL_S = 60.0


class ProgressLines:
    """A `Progress` that says lines; calls come from several threads, but one at a time."""

    def __init__(
        self, say: Callable[[str], None], *, only_long: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Say nothing yet.

        Args:
            say: Takes a line, without its end.
            only_long: Say nothing within the first minute, and of the end only if something was said before.
            clock: Seconds, from anywhere.
        """
        self._say, self._only_long, self._clock = say, only_long, clock
        self._began_s: float | None = None
        self._said_s = 0.0
        self._said_bytes = self._done_bytes = 0
        self._has_said = False

    def __call__(self, done_bytes: int, all_bytes: int, source: str, file: str) -> None:
        """Bytes done and in all, of all files to scan, and what is at hand."""
        now_s = self._clock()
        self._done_bytes = done_bytes
        if self._began_s is None:
            self._began_s = self._said_s = now_s
            self._said_bytes = done_bytes
            if not self._only_long:
                self._tell(f"indexing {bytes_text(all_bytes)}")
        elif now_s - self._said_s >= INTERVAL_S:
            rate = (done_bytes - self._said_bytes) / (now_s - self._said_s)
            left = f"{duration_text((all_bytes - done_bytes) / rate)} left" if rate > 0 else "no byte since"
            percent = 100 * done_bytes // max(1, all_bytes)
            done = f"{bytes_text(done_bytes)} of {bytes_text(all_bytes)} ({percent} %)"
            self._tell(f"indexing: {done}, {bytes_text(rate)}/s, {left}; now {source}: {file}")
            self._said_s, self._said_bytes = now_s, done_bytes

    def end(self) -> None:
        """The run has scanned all."""
        if self._began_s is None or (self._only_long and not self._has_said):
            return
        took_s = self._clock() - self._began_s
        rate = bytes_text(self._done_bytes / max(took_s, 1e-9))
        self._tell(f"scanned {bytes_text(self._done_bytes)} in {duration_text(took_s)}, {rate}/s")

    def _tell(self, line: str) -> None:
        self._has_said = True
        self._say(line)


def duration_text(seconds: float) -> str:
    """0:01:05, in hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


# --- Which files of a source are known, new, changed, moved or gone since it was indexed.
#
# Rows that are still there keep their order, new files come after all others, and the same files give the same order,
# however they were found. Pure.


class FoundFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is there now."""

    path: str
    """As the recipe gives it."""
    num_bytes: int
    """With `footer_hash` its identity."""
    footer_hash: str
    """Hash of its last bytes."""
    status: tuple[FileStatus, ...] = ()
    """Status of the file and of files beside it, taken before hashing; see random_access.py."""


class WantedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in its place in the order of rows."""

    found: FoundFile
    """The file."""
    entry: int | None
    """Which of the catalog's files it is, unaltered; None if it must be scanned."""


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    """What an index run found of one file, against the catalog before it."""

    source: str
    """Name of the source."""
    path: str
    """As the recipe gives it; for a removed file, as the recipe gave it."""
    change: Literal["added", "changed", "moved", "removed"]
    """`changed`: other size or footer at the same path. `moved`: the same name, size and footer at another path."""


def match_files(
    source: str, found: Sequence[FoundFile], entries: Sequence[FileEntry]
) -> tuple[tuple[WantedFile, ...], tuple[FileChange, ...]]:
    """Put the files that are there in the order in which rows are counted.

    A changed file keeps its place. So does a moved one: a folder of data may be moved without a new order.

    Args:
        source: Name of the source.
        found: Sorted by path, each path once.
        entries: The source's files in the catalog; none if it is not in it.

    Returns:
        The files, and every difference, in the same order; removed ones last.
    """
    of_path = {file.path: file for file in found}
    known = {entry.path for entry in entries}
    strangers = {(PurePath(file.path).name, file.num_bytes, file.footer_hash): file for file in found[::-1]}
    wanted: list[WantedFile] = []
    changes: list[FileChange] = []
    removed: list[FileChange] = []
    placed: set[str] = set()
    for number, entry in enumerate(entries):
        file = of_path.get(entry.path)
        if file is not None:
            same = (file.num_bytes, file.footer_hash) == (entry.num_bytes, entry.footer_hash)
            if not same:
                changes.append(FileChange(source=source, path=file.path, change="changed"))
            wanted.append(WantedFile(found=file, entry=number if same else None))
            placed.add(file.path)
            continue
        file = strangers.get((PurePath(entry.path).name, entry.num_bytes, entry.footer_hash))
        if file is None or file.path in known or file.path in placed:
            removed.append(FileChange(source=source, path=entry.path, change="removed"))
            continue
        changes.append(FileChange(source=source, path=file.path, change="moved"))
        wanted.append(WantedFile(found=file, entry=number))
        placed.add(file.path)
    for file in found:
        if file.path not in placed:
            changes.append(FileChange(source=source, path=file.path, change="added"))
            wanted.append(WantedFile(found=file, entry=None))
    return tuple(wanted), (*changes, *removed)


# --- What is refused or said of a source's files before they are published.
#
# A source without tokens, or with more bad rows than its recipe allows, is not published. Cost: one pass over the
# indexes, and over lengths up to the first token.

logger = logging.getLogger(__name__)

SHOWN_ROWS = 3
"""Bad rows of a source that a message names."""


def check_files(
    name: str, settings: SourceSettings, files: Sequence[tuple[str, FileIndex]], *, may_be_empty: bool
) -> None:
    """Check a source's files; `files` are its paths with their indexes.

    Raises:
        TooManyBadRows: More rows could not be read than `max_bad` allows.
        SourceUnreadable: No document has tokens.
    """
    num_rows = sum(len(index.tokens) for _, index in files)
    check_bad_rows(
        name, files, num_rows=num_rows, is_masked=settings.masks_bad_rows, max_bad=settings.max_bad, is_fresh=True
    )
    if num_bad := sum(index.num_bad_rows for _, index in files):
        listed = listed_text(files, SHOWN_ROWS)
        logger.warning("source %r: %d of %d rows cannot be read: %s", name, num_bad, num_rows, listed)
    if not may_be_empty and not any(index.tokens.any() for _, index in files):
        what = f"{num_rows} documents, all without tokens" if num_rows else "no documents"
        column = f"column {settings.column!r} of " if settings.column is not None else ""
        raise SourceUnreadable(
            f"source {name!r}: {column}{', '.join(settings.patterns)} holds {what}; remove the source, or name another "
            "file or column"
        )


# --- What an index run says of files: how they differ from the catalog before, and what makes them costly to read.
#
# A line names few files, however many there are.

SHOWN_FILES = 5
"""Files of one kind of change that a message names."""


def log_changes(name: str, changes: Sequence[FileChange]) -> None:
    """One line for each kind of change."""
    for kind in sorted({change.change for change in changes}):
        paths = [change.path for change in changes if change.change == kind]
        more = f" and {len(paths) - SHOWN_FILES} more" if len(paths) > SHOWN_FILES else ""
        logger.warning("source %r, since it was indexed: %s %s%s", name, kind, ", ".join(paths[:SHOWN_FILES]), more)


def log_costly_files(name: str, files: Sequence[tuple[str, FileIndex]]) -> None:
    """One line for files whose rows are split over pages, and one for those that can only be read in large chunks."""
    for paths, what in (
        (
            [path for path, index in files if index.split_pages],
            "rows are split over pages, so pages are read on to where their last row ends; writing them again with a "
            "page index would save that",
        ),
        (
            [path for path, index in files if index.whole_chunks],
            "chunks of many rows can only be read whole; writing them again in smaller ones makes single pages "
            "readable",
        ),
    ):
        if paths:
            logger.warning("source %r: in %d of %d files, as %s, %s", name, len(paths), len(files), paths[0], what)
