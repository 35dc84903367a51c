"""A store within this process: objects of fsspec's `memory://`, which is local to a process and needs no network.

In: a folder. Out: the same files as objects below `memory://NAME`, and a recipe that names them there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import msgspec

from torchmix.recipe.sources import paths_of
from torchmix.recipe.structs import Recipe


@contextmanager
def memory_store(folder: Path, name: str = "bucket") -> Iterator[Any]:
    """All files of a folder as `memory://name/...`; gives fsspec's file system, and empties it in the end."""
    system = fsspec.filesystem("memory")
    try:
        for path in folder.rglob("*"):
            if path.is_file() and "catalog" not in path.parts:
                system.pipe_file(f"/{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        yield system
    finally:
        system.store.clear()
        system.pseudo_dirs[:] = [""]


def in_store(recipe: Recipe, root: str, catalog: str) -> Recipe:
    """A recipe whose files lie below a URI, with a catalog of its own."""
    sources = {
        name: msgspec.structs.replace(source, path=tuple(f"{root}/{path}" for path in paths_of(source)))
        for name, source in recipe.sources.items()
    }
    return msgspec.structs.replace(recipe, sources=sources, catalog=catalog)
