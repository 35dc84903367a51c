"""The data files of a source: paths, URIs and globs of the recipe -> paths and URIs of files.

In: patterns as the recipe gives them, and the folder they are relative to. Out: paths, relative where the pattern is,
and URIs, sorted by code point, each file once. Must hold: the same tree gives the same list on every machine. Nothing
is opened. Cost: one listing of each folder that a pattern reaches.
"""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Sequence
from pathlib import Path

from torchmix.errors import SourceUnreadable
from torchmix.storage.find_objects import find_objects
from torchmix.storage.stores import is_uri

SHOWN_NAMES = 5


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
