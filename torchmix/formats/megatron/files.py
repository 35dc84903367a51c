"""Files of Megatron datasets: prefixes, .bin, .idx and globs of them -> the .bin files.

In: paths as the recipe gives them, and the folder they are relative to. Out: paths of .bin files, each with its .idx
beside it, sorted by code point, each once. Must hold: a path that leads to no whole pair is an error that says what is
missing. Nothing is opened. Cost: as find_files.py.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torchmix.errors import SourceUnreadable
from torchmix.storage.find_files import find_files, nearest_names
from torchmix.storage.find_objects import find_objects
from torchmix.storage.stores import is_uri

BIN, IDX = ".bin", ".idx"


def find_datasets(name: str, patterns: Sequence[str], directory: Path) -> list[str]:
    """Find the .bin files of one source.

    Args:
        name: The source, for messages.
        patterns: Megatron's prefixes (`/p/web_text_document`, `s3://bucket/web_text_document`), .bin or .idx files,
            or globs of any of these.
        directory: The recipe's folder.

    Raises:
        SourceUnreadable: A pattern that leads to no dataset, with the names that come nearest, or to half of one.
    """
    path_of_place: dict[str, str] = {}
    for pattern in patterns:
        for prefix in _prefixes(name, pattern, directory):
            place = prefix + BIN if is_uri(prefix) else os.path.normpath(_place(directory, prefix + BIN))
            path_of_place.setdefault(place, prefix + BIN)
    for path in path_of_place.values():
        if not is_uri(path):  # a store is asked when the .bin is opened
            _check_pair(name, path, directory)
    return sorted(path_of_place.values())


def index_path(bin_path: str) -> str:
    """The .idx that belongs to a .bin."""
    return bin_path.removesuffix(BIN) + IDX


def _prefixes(name: str, pattern: str, directory: Path) -> list[str]:
    if is_uri(pattern):
        return _prefixes_in_store(name, pattern)
    if pattern.endswith((BIN, IDX)):
        return [path[: -len(BIN)] for path in find_files(name, [pattern], directory)]
    if any(_is_file(directory, pattern + suffix) for suffix in (BIN, IDX)):
        return [pattern]
    if (directory / pattern).is_dir():
        raise SourceUnreadable(
            f"source {name!r}: {pattern!r} in {directory} is a folder; name its datasets, as "
            f"{pattern.rstrip('/') + '/*' + IDX!r}"
        )
    if glob.has_magic(pattern):
        with suppress(SourceUnreadable):
            return [path[: -len(IDX)] for path in find_files(name, [pattern + IDX], directory)]
    raise SourceUnreadable(
        f"source {name!r}: there is no dataset {pattern + BIN!r} with {pattern + IDX!r} in {directory}"
        f"{nearest_names(directory / (pattern + BIN))}"
    )


def _prefixes_in_store(name: str, pattern: str) -> list[str]:
    """A URI may be a prefix or a glob of prefixes, which its .idx tells; whether each has its .bin, the .bin does."""
    stem = pattern[: -len(BIN)] if pattern.endswith((BIN, IDX)) else pattern
    return [uri[: -len(IDX)] for uri in find_objects(name, stem + IDX)]


def _is_file(directory: Path, path: str) -> bool:
    return os.path.isfile(_place(directory, path))  # noqa: PTH113 - see `_place`


def _place(directory: Path, path: str) -> str:
    """Where a file lies; pathlib takes several times as long, which counts with hundreds of files."""
    return os.path.join(directory, path)  # noqa: PTH118


def _check_pair(name: str, path: str, directory: Path) -> None:
    for half, other in ((path, index_path(path)), (index_path(path), path)):
        if not _is_file(directory, half):
            raise SourceUnreadable(
                f"source {name!r}: {directory / other} has no {Path(half).name} beside it; a dataset is both files: "
                "copy the other one there, too"
            )
