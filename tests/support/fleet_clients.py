"""Leaders in threads that ask loaders in threads: of the nodes of a job, or remote ones."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.catalogs import open_catalog
from tests.support.fleets import running
from torchmix.recipe.load import load_recipe
from torchmix.service import open_fleet
from torchmix.service.endpoints import Registry
from torchmix.service.keys import ServerKeys, server_keys, write_keys
from torchmix.service.open_fleet import FleetSettings
from torchmix.service.routed_reader import NodeFraction
from torchmix.service.server import LoaderServer, new_pair


@contextmanager
def clients_of(place: str, recipe: Path, folder: Path) -> Iterator[None]:
    """Have every leader that is opened here ask a fleet; or read files, with `in_process`."""
    kind, _, count = place.partition(" of ")
    if kind == "in_process":
        yield
        return
    with ExitStack() as stack:
        loaders, settings = (_job if kind == "job" else _served)(recipe, int(count), folder, stack)
        if kind == "node before remote":
            settings = replace(settings, node_cpu=1)
            # It would begin without loaders, and end before they are there.
            joined = partial(_with, open_fleet.FleetReader, is_joined=True)
            stack.enter_context(patch.object(open_fleet, "FleetReader", joined))
            stack.enter_context(patch.object(open_fleet, "NodeFraction", Half))
        stack.enter_context(patch("torchmix.stateful.leader.remote_loaders", lambda *_: settings))
        yield
        is_asked = any(loader.figures()["requests_replies"] for loader in loaders)
        assert is_asked or kind == "node before remote", "a node that reads first may have all of few pages"


class Half(NodeFraction):
    """Half of the pages, however busy this machine is."""

    def look(self) -> float:
        """The fraction."""
        self.fraction = 0.5
        return self.fraction


def _with(make: Callable[..., Any], *words: Any, is_joined: bool, **options: Any) -> Any:
    return make(*words, **{**options, "is_joined": is_joined})


def _job(recipe: Path, count: int, _: Path, stack: ExitStack) -> tuple[list[LoaderServer], FleetSettings]:
    """A loader of each node, with keys of its own, and clients that were told of them by the job's store."""
    client = new_pair()
    owns = [new_pair() for _ in range(count)]
    allowed = frozenset([client.public])
    keys = [ServerKeys(own=own, allowed=lambda: allowed) for own in owns]
    loaders = [stack.enter_context(_loader(recipe, one)) for one in keys]
    public_of = {loader.endpoint: own.public for loader, own in zip(loaders, owns, strict=True)}
    return loaders, FleetSettings(endpoints=tuple(sorted(public_of)), own=client, server_of=public_of, lost_s=60)


def _served(recipe: Path, count: int, folder: Path, stack: ExitStack) -> tuple[list[LoaderServer], FleetSettings]:
    """Loaders that register in a folder, and clients that find them there."""
    place = Path(tempfile.mkdtemp(dir=folder))
    write_keys(place / "keys", new_pair, num_clients=1)
    loaders = [stack.enter_context(_loader(recipe, server_keys(place / "keys"))) for _ in range(count)]
    registry = Registry(place / "endpoints")
    stack.callback(registry.close)
    for loader in loaders:
        registry.put(loader.endpoint)
    folders = (str(place / "endpoints"),)
    return loaders, FleetSettings(endpoints=(), folders=folders, keys=str(place / "keys"), lost_s=60)


def _loader(recipe: Path, keys: ServerKeys) -> AbstractContextManager[LoaderServer]:
    read = load_recipe(recipe)
    return running(open_catalog(read, recipe.parent), recipe.parent, "tcp://127.0.0.1:0", keys=keys, seed=read.seed)
