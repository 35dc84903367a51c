"""Paths of files below the folder that all paths of a source share.

In: the paths and globs of a source, and the path of a file as the catalog has it. Out: what follows the shared folder,
with `/`. Must hold: moving a source's folder changes nothing, where the recipe's paths move with it. Pure.
"""

from __future__ import annotations

import os.path
import posixpath
from collections.abc import Sequence

from torchmix.errors import RecipeError

_MAGIC = frozenset("*?[")


def shared_folder(patterns: Sequence[str]) -> str:
    """The deepest folder that all paths and globs of a source begin with; empty if they share none."""
    folders = [_fixed_folder(pattern).split("/") for pattern in patterns]
    shared: list[str] = []
    for names in zip(*folders, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return "/".join(shared)


def below(folder: str, path: str) -> str:
    """The path of a file below a shared folder."""
    return _plain(path).removeprefix(f"{folder}/") if folder else _plain(path)


def child_folder(patterns: Sequence[str], path: str, where: str) -> str:
    """The folder just below the shared one that a file lies in; `where` is the path of keys, for errors.

    Raises:
        RecipeError: The file lies in the shared folder itself.
    """
    folder = shared_folder(patterns)
    child, sign, _ = below(folder, path).partition("/")
    if not sign:
        place = folder or "the recipe's folder"
        message = (
            f"{path} lies directly in {place}; split_by: dir needs each file in a folder below, one for each child"
        )
        raise RecipeError(message, where)
    return child


def _fixed_folder(pattern: str) -> str:
    """The folder of a path; of a glob, as far as it is no pattern."""
    names = _plain(pattern).split("/")[:-1]
    magic = [number for number, name in enumerate(names) if _MAGIC & set(name)]
    return "/".join(names[: magic[0]] if magic else names)


def _plain(path: str) -> str:
    if "://" in path:
        return path
    return posixpath.normpath(path.replace(os.sep, "/"))
