"""Loaders in threads of the test, and readers that ask them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.support.catalogs import World
from tests.support.deadlines import LONG_S
from torchmix.boards.socket_folders import socket_folder
from torchmix.catalog.store import Catalog, IdLimit
from torchmix.service.client import LoaderLinks
from torchmix.service.endpoints import Endpoints
from torchmix.service.fleet import LoaderFleet
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.keys import ClientKeys, ServerKeys
from torchmix.service.members import FleetMembers, FleetPatience
from torchmix.service.messages import LoaderHello
from torchmix.service.served import PartToServe, ServedCatalogs, transforms_digest
from torchmix.service.server import LoaderServer

PATIENT = FleetPatience(silence_s=LONG_S, join_s=LONG_S, lost_s=LONG_S, refused_s=0.1)
"""For tests in which all loaders live: nobody is given up, however busy the machine is."""


@contextlib.contextmanager
def running(
    catalog: Catalog,
    directory: Path,
    bind: str = "",
    *,
    keys: ServerKeys | None = None,
    cache_bytes: int = 1 << 24,
    masked: frozenset[str] = frozenset(),
    seed: int = 0,
    parts_with: Callable[[str], Mapping[str, PartToServe]] = lambda _: {},
    **options: Any,
) -> Iterator[LoaderServer]:
    """A loader of one catalog, answering in a thread; by default at a socket of its own."""
    if not bind:
        with socket_folder() as folder:
            options = {**options, "cache_bytes": cache_bytes, "masked": masked, "seed": seed, "parts_with": parts_with}
            with running(catalog, directory, f"ipc://{folder}/0", keys=keys, **options) as server:
                yield server
        return
    part = PartToServe(catalog=catalog, masked=masked, seed=seed)
    served = ServedCatalogs({"train": part}, directory, cache_bytes=cache_bytes, parts_with=parts_with)
    server = LoaderServer(served, bind=bind, keys=keys, **options)
    thread = threading.Thread(target=server.run, name="loader")
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(LONG_S)
        served.close()
        assert not thread.is_alive()


@contextlib.contextmanager
def several(world: World, catalog: Catalog, folder: Path, count: int, **options: Any) -> Iterator[list[LoaderServer]]:
    """Loaders over ipc in a folder of this user alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(running(catalog, world.directory, f"ipc://{folder}/{number}", **options))
            for number in range(count)
        ]


def hello_of(of: Catalog, **changes: Any) -> LoaderHello:
    """What a client of a catalog says first."""
    hello = LoaderHello(client="test", catalog=of.fingerprint, transforms=transforms_digest(of, 0))
    return msgspec.structs.replace(hello, **changes)


def fleet_of(
    catalog: Catalog,
    endpoints: Sequence[str],
    *,
    keys: ClientKeys | None = None,
    patience: FleetPatience = PATIENT,
    hello: LoaderHello | None = None,
    seed: int = 0,
) -> LoaderFleet:
    """A client of loaders."""
    links = LoaderLinks(keys)
    found = Endpoints(fixed=tuple(endpoints))
    return LoaderFleet(
        FleetMembers(
            found, links, hello or hello_of(catalog, transforms=transforms_digest(catalog, seed)), patience=patience
        )
    )


@contextlib.contextmanager
def fleet_reader(
    catalog: Catalog, endpoints: Sequence[str], *, ids: IdLimit | None = None, **options: Any
) -> Iterator[FleetReader]:
    """A reader that asks loaders."""
    fleet = fleet_of(catalog, endpoints, **options)
    try:
        reader = FleetReader(catalog, fleet, ids=ids)
    except BaseException:
        fleet.close()
        raise
    try:
        yield reader
    finally:
        reader.close()
