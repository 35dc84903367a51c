"""Hosts that share a catalog in a store and no disk, and what they ask the store.

In: a folder, pytest's monkeypatch, a world. Out: `Hosts`: the same recipe with its catalog in `memory://`; `at` says on
which host the next calls run; `asked` has each request that the catalog made, and `before` is called ahead of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import msgspec
import pytest

from tests.support.catalogs import World
from torchmix.catalog import in_store
from torchmix.catalog.in_store import CACHE_VARIABLE, catalog_folder
from torchmix.catalog.store import Catalog
from torchmix.indexing.scan import IndexReport, catalog_of_part, index_sources
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe

ADDRESS = "memory://bucket/run/catalog"


class Request(NamedTuple):
    """What the catalog asked the store."""

    verb: str
    """`list`, `get`, `put` or `delete`."""
    name: str
    """The object, from the catalog's address on; empty for the address itself."""
    num_bytes: int = 0
    """Bytes that a put sent."""


class Killed(BaseException):
    """The process ends here."""


class Hosts:
    """See above."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, world: World) -> None:
        self.folder, self.world = folder, world
        self.recipe = msgspec.structs.replace(world.recipe, catalog=ADDRESS)
        self.asked: list[Request] = []
        self.before: Callable[[Request], None] = lambda request: None
        self.store: Any = fsspec.filesystem("memory")
        self._monkeypatch = monkeypatch
        for verb in ("list", "put", "delete"):
            name = f"{verb}_object" if verb != "list" else "list_objects"
            monkeypatch.setattr(in_store, name, self._watched(verb, getattr(in_store, name)))
        monkeypatch.setattr(in_store, "StoreFile", self._watched("get", in_store.StoreFile))
        self.at("first")

    def _watched(self, verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(uri: str, *more: Any) -> Any:
            size = len(more[0]) if verb == "put" else 0
            request = Request(verb, uri.removeprefix(ADDRESS).strip("/"), size)
            self.before(request)
            self.asked.append(request)
            return call(uri, *more)

        return ask

    def at(self, name: str) -> Hosts:
        """What follows happens on a host of this name."""
        self._monkeypatch.setenv(CACHE_VARIABLE, str(self.folder / "hosts" / name))
        self.asked.clear()
        return self

    def copy(self) -> Path:
        """The copy of the host."""
        return catalog_folder(self.world.directory, ADDRESS)

    def index(self, recipe: Recipe | None = None, **options: Any) -> IndexReport:
        """An index run on the host."""
        return index_sources(recipe or self.recipe, self.world.directory, **options)

    def open(self, recipe: Recipe | None = None, part: str = "train") -> Catalog:
        """The catalog as a loader on the host opens it."""
        whole = recipe or self.recipe
        return catalog_of_part(part_of(whole, part), whole, self.world.directory)

    def names(self, verb: str) -> list[str]:
        """Objects that were asked for in this way since the last `at`."""
        return [one.name for one in self.asked if one.verb == verb]

    def objects(self, folder: str = "") -> list[str]:
        """Objects of the store, by their names in the catalog."""
        root = ADDRESS.removeprefix("memory:/")
        found = [path.removeprefix(root).strip("/") for path in self.store.store if path.startswith(root)]
        return sorted(name for name in found if name.startswith(folder))

    def content(self, name: str) -> bytes:
        """An object."""
        return bytes(self.store.cat_file(f"{ADDRESS}/{name}"))

    def alter(self, name: str, content: bytes) -> None:
        """Put something else in the place of an object."""
        self.store.pipe_file(f"{ADDRESS}/{name}", content)


def with_sources(recipe: Recipe, *names: str) -> Recipe:
    """A recipe of some of the sources."""
    share = f"{100 // len(names)}%"
    shares = dict.fromkeys(names[1:], share)
    shares[names[0]] = f"{100 - (100 // len(names)) * (len(names) - 1)}%"
    return msgspec.structs.replace(recipe, sources={name: recipe.sources[name] for name in names}, mixture=shares)


@contextmanager
def emptied_store() -> Iterator[None]:
    """No object is left in memory."""
    system = fsspec.filesystem("memory")
    try:
        yield
    finally:
        system.store.clear()
        system.pseudo_dirs[:] = [""]
