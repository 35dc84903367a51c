"""Which files of a source are known, new, changed, moved or gone since it was indexed.

In: the files that are there now, with their identities, and those of the catalog. Out: the files in the order in which
rows are to be counted, each with the catalog's entry whose rows it still has. Must hold: rows that are still there keep
their order, new files come after all others, and the same files give the same order, however they were found. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal

import msgspec

from torchmix.catalog.manifest import FileEntry, FileStatus


class FoundFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is there now."""

    path: str
    """As the recipe gives it."""
    num_bytes: int
    """With `footer_hash` its identity."""
    footer_hash: str
    """Hash of its last bytes."""
    status: tuple[FileStatus, ...] = ()
    """Status of the file and of files beside it, taken before hashing; see file_status.py."""


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
