"""The data files of a source: paths, URIs and globs of the recipe -> paths and URIs of files."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import TypeVar

from pyarrow import fs

from torchmix.errors import SourceUnreadable
from torchmix.storage.store_file import try_again
from torchmix.storage.stores import Store, credentials_of, is_uri, open_store

# --- The objects that a URI or a glob of one names.
#
# The same store gives the same list everywhere. Nothing is opened. Cost: a request for the URI itself, and a listing
# of each folder that its glob reaches; all below one for `**`.

SHOWN_NAMES = 5
ANY_FOLDERS = "**"
BUCKET_PARTS = {"hf": 3}
"""How many names a store's buckets have, where not one: `datasets/USER/NAME`."""

Result = TypeVar("Result")


def find_objects(name: str, pattern: str) -> list[str]:
    """Find the objects of one URI or glob.

    Args:
        name: The source, for messages.
        pattern: A URI; `*`, `?`, `[...]` and `**` (any folders) stand after its bucket. An object that exists is never
            read as a glob. `*` does not match a leading dot.

    Raises:
        SourceUnreadable: Nothing is there, with the names that come nearest; or the store cannot be listed.
    """
    store = open_store(pattern)
    listing = _Listing(store, name, pattern)
    path = store.path(pattern)
    kind = listing.kind_of(path)
    if kind == fs.FileType.File:
        return [pattern]
    if kind == fs.FileType.Directory:
        raise SourceUnreadable(
            f"source {name!r}: {pattern!r} is a folder; name its files, as {pattern.rstrip('/') + '/*.parquet'!r}"
        )
    if has_magic(path) and (found := _match_object(listing, path)):
        return sorted(map(store.uri, found))
    what = "matches no object" if has_magic(path) else "is missing"
    raise SourceUnreadable(f"source {name!r}: {pattern!r} {what}{_nearest(listing, path)}")


def objects_below(uri: str) -> list[str] | None:
    """URIs of all objects in a folder and the folders below it, sorted, without names that begin with a dot.

    Returns:
        None if the URI names no folder.

    Raises:
        SourceUnreadable: The store cannot be listed.
    """
    store = open_store(uri)
    listing = _Listing(store, uri, uri)
    path = store.path(uri).rstrip("/")
    if has_magic(path) or listing.kind_of(path) != fs.FileType.Directory:
        return None
    found = [info.path for info in listing.within(path, all_below=True) if _is_file(info)]
    names = {one: one[len(path) :].strip("/").split("/") for one in found}
    return sorted(store.uri(one) for one in found if not any(name.startswith(".") for name in names[one]))


class _Listing:
    """What a store holds, asked for with patience."""

    def __init__(self, store: Store, name: str, pattern: str) -> None:
        self._store = store
        self._what = f"source {name!r}: cannot list"
        self._pattern = pattern

    @property
    def scheme(self) -> str:
        return self._store.scheme

    def uri(self, path: str) -> str:
        return self._store.uri(path)

    @property
    def credentials(self) -> str:
        return credentials_of(self._pattern)

    def kind_of(self, path: str) -> fs.FileType:
        """What lies at a path."""
        return self._try(lambda: self._store.system.get_file_info(path.rstrip("/")).type, path)

    def within(self, folder: str, *, all_below: bool = False) -> list[fs.FileInfo]:
        """What lies in a folder; nothing if there is none."""
        selector = fs.FileSelector(folder, allow_not_found=True, recursive=all_below)
        found: list[fs.FileInfo] = self._try(lambda: self._store.system.get_file_info(selector), folder)
        return found

    def _try(self, attempt: Callable[[], Result], path: str) -> Result:
        return try_again(attempt, f"{self._what} {self.uri(path)}", self._pattern)


def _match_object(listing: _Listing, path: str) -> set[str]:
    """Paths of files that a glob matches, going down from the folder that it fixes."""
    root = "/" if path.startswith("/") else ""
    parts = path.lstrip("/").split("/")
    fixed = next(i for i, part in enumerate(parts) if has_magic(part))
    folders = {root + "/".join(parts[:fixed])}
    rest = parts[fixed:]
    for i, part in enumerate(rest):
        if part == ANY_FOLDERS:
            return {
                info.path
                for folder in folders
                for info in listing.within(folder, all_below=True)
                if _is_file(info) and _match_names(info.path[len(folder) :].strip("/").split("/"), rest[i:])
            }
        found = [info for folder in folders for info in listing.within(folder)]
        found = [info for info in found if _matches(info.base_name, part)]
        if i == len(rest) - 1:
            return {info.path for info in found if _is_file(info)}
        folders = {info.path for info in found if info.type == fs.FileType.Directory}
    return set()


def _is_file(info: fs.FileInfo) -> bool:
    return bool(info.type == fs.FileType.File)


def _match_names(names: list[str], parts: list[str]) -> bool:
    """Whether names of folders and a file match parts of a glob, one by one; `**` matches any folders."""
    if not parts or not names:
        return not parts and not names
    if parts[0] == ANY_FOLDERS:
        if len(parts) == 1:
            return not any(name.startswith(".") for name in names)
        if _match_names(names, parts[1:]):
            return True
        return not names[0].startswith(".") and _match_names(names[1:], parts)
    return _matches(names[0], parts[0]) and _match_names(names[1:], parts[1:])


def _matches(name: str, part: str) -> bool:
    return (not name.startswith(".") or part.startswith(".")) and fnmatchcase(name, part)


def _nearest(listing: _Listing, path: str) -> str:
    """What is there instead: the nearest names in the deepest folder of the path that exists."""
    parts = path.strip("/").split("/")
    root = "/" if path.startswith("/") else ""
    for depth in range(len(parts) - 1, 0, -1):
        folder, missing = root + "/".join(parts[:depth]), parts[depth]
        try:
            if has_magic(folder) or listing.kind_of(folder) != fs.FileType.Directory:
                continue
            names = sorted(info.base_name for info in listing.within(folder))
        except SourceUnreadable:  # some stores list nothing above a repository
            continue
        where = listing.uri(folder)
        if not names:
            return f"; {where} is empty"
        if close := difflib.get_close_matches(missing, names, n=SHOWN_NAMES, cutoff=0.4):
            return f"; nearest to {missing!r} in {where}: {_listed(close)}"
        more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        return f"; {where} holds {_listed(names[:SHOWN_NAMES])}{more}"
    bucket = root + "/".join(parts[: BUCKET_PARTS.get(listing.scheme, 1)])
    return (
        f"; there is no {listing.uri(bucket)}, or it is not shown to these credentials, which are looked for in "
        f"{listing.credentials}"
    )


# --- The data files of a source: paths, URIs and globs of the recipe -> paths and URIs of files.
#
# The same tree gives the same list on every machine. Nothing is opened. Cost: one listing of each folder that a
# pattern reaches.


def find_files(name: str, patterns: Sequence[str], directory: Path) -> list[str]:
    """Find the files of one source.

    Args:
        name: The source, for messages.
        patterns: Paths, or globs with `*`, `?`, `[...]` and `**` (any folders); a path that exists is never read as a
            glob. `*` does not match a leading dot.
        directory: The recipe's folder.

    Raises:
        SourceUnreadable: A pattern that matches no file, with the names that come nearest.
    """
    path_of_place: dict[str, str] = {}
    for pattern in patterns:
        if is_uri(pattern):
            path_of_place |= {uri: uri for uri in find_objects(name, pattern)}
            continue
        for path in _match(name, pattern, directory):
            path_of_place.setdefault(os.path.normpath(directory / path), path)
    return sorted(path_of_place.values())


def _match(name: str, pattern: str, directory: Path) -> list[str]:
    place = directory / pattern
    if place.is_file():
        return [pattern]
    if place.is_dir():
        raise SourceUnreadable(
            f"source {name!r}: {pattern!r} in {directory} is a folder; name its files, as "
            f"{pattern.rstrip('/') + '/*.parquet'!r}"
        )
    matches = glob.glob(pattern, root_dir=directory, recursive=True)  # noqa: PTH207 - pathlib refuses absolute globs
    files = [path for path in matches if (directory / path).is_file()]
    if files:
        return files
    what = "matches no file" if glob.has_magic(pattern) else "is missing"
    raise SourceUnreadable(
        f"source {name!r}: {pattern!r} {what} in {directory}{_pair_hint(place)}{nearest_names(place)}"
    )


def _pair_hint(place: Path) -> str:
    """A prefix of Megatron's, as its `--data-path` takes them."""
    pair = [place.with_name(place.name + suffix) for suffix in (".bin", ".idx")]
    return "; it is a dataset of Megatron's: write format: megatron" if all(path.is_file() for path in pair) else ""


def nearest_names(place: Path) -> str:
    """What is there instead: the nearest names in the deepest folder of the path that exists."""
    folder, missing = place.parent, place.name
    while not folder.is_dir() and folder != folder.parent:
        folder, missing = folder.parent, folder.name
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return f"; the folder {folder} cannot be listed ({error.strerror})"
    if not names:
        return f"; the folder {folder} is empty"
    if close := difflib.get_close_matches(missing, names, n=SHOWN_NAMES, cutoff=0.4):
        return f"; nearest to {missing!r} in {folder}: {_listed(close)}"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"; {folder} holds {_listed(names[:SHOWN_NAMES])}{more}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
