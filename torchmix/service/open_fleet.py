"""From settings to a reader that asks a fleet, and that reads here when the fleet is lost.

No data file is opened while a loader answers; what is read without loaders is what they would have given. Cost:
connecting.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torchmix.catalog.store import Catalog, IdLimit
from torchmix.errors import LoaderLost, OptionError
from torchmix.reader.items import CACHE_BYTES, ItemReader, UnitReader, items_of_sources, unit_catalog
from torchmix.reader.protocol import StepReader
from torchmix.reader.reader import Reader
from torchmix.service.endpoints import Endpoints, KeysOfFolders
from torchmix.service.fleet import LoaderFleet
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.keys import ClientKeys, KeyPair, client_keys
from torchmix.service.members import FleetMembers, FleetPatience
from torchmix.service.messages import LoaderHello
from torchmix.service.routed_reader import NodeFraction, NodeRoom, RoutedReader
from torchmix.service.served import transforms_digest


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSettings:
    """Where a client finds its loaders; plain values, so that it can travel to a worker process."""

    endpoints: tuple[str, ...]
    """`tcp://` or `ipc://`."""
    folders: tuple[str, ...] = ()
    """Folders where loaders register."""
    keys: str = ""
    """The folder of the client's keys, or its secret; empty: without."""
    own: KeyPair | None = field(default=None, compare=False)
    """The client's keys where they lie in no folder. Leaders that share a worker have one each; any of them will do."""
    server_of: dict[str, str] = field(default_factory=dict)
    """With `own`: public key of each loader, by endpoint; of those in `folders` their files have it."""
    near_of: dict[str, str] = field(default_factory=dict)
    """With `own`: sockets of loaders of this node, where no keys are needed, by endpoint."""
    here: tuple[str, ...] = ()
    """Sources that this process reads and transforms itself."""
    away: tuple[str, ...] = ()
    """Where a node reads first: sources that loaders read as long as one answers."""
    parts_of: dict[str, dict[str, int]] = field(default_factory=dict)
    """Parts of sources that some of `endpoints` have; the others read all."""
    lost_s: float
    """How long no loader may answer."""
    node_cpu: int = 0
    """Processors of the node that reads first and asks loaders when these are busy; 0: loaders read everything."""
    node_item_bytes: int = 0
    """Bytes of pages, and of units, of items that such a node may hold to read them."""


def open_fleet_reader(
    settings: FleetSettings,
    catalog: Catalog,
    directory: Path,
    *,
    seed: int,
    masked: frozenset[str],
    ids: IdLimit | None,
    cache_bytes: int,
    read_here: Callable[[], Reader],
    unit_kinds: frozenset[str] = frozenset(),
    is_stopped: Callable[[], bool] = lambda: False,
) -> StepReader:
    """A reader that asks loaders.

    Args:
        settings: Where they are.
        catalog: What is asked for.
        directory: The recipe's folder.
        seed: The recipe's.
        masked: Sources whose bad pages are masked.
        ids: The bound that all ids must be below.
        cache_bytes: Decoded pages that the reader of `read_here` keeps.
        read_here: Opens the files in this process, without items; called where no loader answers, or the node reads
            first.
        unit_kinds: Kinds of items that loaders decode.
        is_stopped: Asked while a loader is waited for; True ends the wait with `StoppedWaiting`.

    Raises:
        OptionError: Keys are missing or wrong, or a source has items in files that its rows name.
        LoaderLost: No loader answers, and files cannot be read here.
    """
    items = _items(settings, catalog, directory, seed, masked, unit_kinds, is_stopped)
    try:
        fleet = _fleet(settings, catalog, seed, masked, is_stopped)
        there = _joined(fleet, catalog, ids=ids, is_joined=not settings.node_cpu)
    except BaseException:
        if items is not None:
            items.close()
        raise
    return RoutedReader(
        catalog,
        there,
        read_here,
        here=settings.here,
        away=settings.away,
        node_fraction=_node_fraction(settings),
        room=_room(settings, cache_bytes),
        items=items,
    )


def _node_fraction(settings: FleetSettings) -> NodeFraction | None:
    return NodeFraction(settings.node_cpu) if settings.node_cpu else None


def _room(settings: FleetSettings, room_bytes: int) -> NodeRoom | None:
    return NodeRoom(room_bytes) if settings.node_cpu else None


def _joined(
    fleet: LoaderFleet, catalog: Catalog, *, ids: IdLimit | None = None, is_joined: bool
) -> FleetReader | LoaderLost:
    """What asks a fleet, or why no loader answers."""
    try:
        return FleetReader(catalog, fleet, ids=ids, is_joined=is_joined)
    except LoaderLost as error:
        fleet.close()
        return error
    except BaseException:
        fleet.close()
        raise


def _fleet(
    settings: FleetSettings, catalog: Catalog, seed: int, masked: frozenset[str], is_stopped: Callable[[], bool]
) -> LoaderFleet:
    from torchmix.service.client import LoaderLinks  # ZeroMQ is loaded where loaders are asked

    hello = LoaderHello(
        client=f"{socket.gethostname()}:{os.getpid()}",
        catalog=catalog.fingerprint,
        transforms=transforms_digest(catalog, seed),
        masked=tuple(sorted(masked)),
    )
    links = LoaderLinks(_keys(settings))
    folders = tuple(map(Path, settings.folders))
    endpoints = Endpoints(fixed=settings.endpoints, folders=folders, parts_of=settings.parts_of)
    patience = FleetPatience(lost_s=settings.lost_s)
    return LoaderFleet(FleetMembers(endpoints, links, hello, patience=patience, is_stopped=is_stopped))


def _items(
    settings: FleetSettings,
    catalog: Catalog,
    directory: Path,
    seed: int,
    masked: frozenset[str],
    unit_kinds: frozenset[str],
    is_stopped: Callable[[], bool],
) -> ItemReader | None:
    """What asks loaders for the items of a catalog's sources, over connections of its own."""
    keys = items_of_sources(catalog)
    if not keys:
        return None
    by_path = [
        (name, kind)
        for name, kind in keys
        if kind not in unit_kinds and catalog.sources[name].items[kind].folder is not None
    ]
    if by_path and settings.own is None and not settings.node_cpu:
        files = ", ".join(f"{kind}s (source {name})" for name, kind in by_path)
        raise OptionError(
            f"rows name files of {files}, which whoever builds the steps opens, and trainers with loaders.where: "
            "remote open no data file; write decode_at: loader, or use job or node"
        )

    def open_columns(columns: Catalog) -> StepReader:
        def read_here() -> Reader:
            return Reader(columns, directory, cache_bytes=cache_bytes, seed=0)

        return routed(columns, 0, frozenset(), read_here)

    def decode_here() -> UnitReader:
        return UnitReader(
            catalog,
            directory,
            masked=masked,
            cache_bytes=cache_bytes,
            keeps=not is_first,
            seed=seed,
        )

    def routed(
        of_items: Catalog, seed: int, masked: frozenset[str], read_here: Callable[[], Reader | UnitReader]
    ) -> RoutedReader:
        there = _joined(_fleet(settings, of_items, seed, masked, is_stopped), of_items, is_joined=not is_first)
        return RoutedReader(
            of_items, there, read_here, node_fraction=_node_fraction(settings), room=_room(settings, cache_bytes)
        )

    is_first = settings.node_cpu > 0
    cache_bytes = settings.node_item_bytes if is_first else CACHE_BYTES

    units: RoutedReader | None = None
    if unit_kinds & {kind for _, kind in keys}:
        decoded = unit_catalog(catalog, directory)
        units = routed(decoded, seed, masked & {name for name, _ in keys}, decode_here)
    try:
        return ItemReader(catalog, directory, seed=seed, open_columns=open_columns, units=units, unit_kinds=unit_kinds)
    except BaseException:
        if units is not None:
            units.close()
        raise


def _keys(settings: FleetSettings) -> ClientKeys | None:
    if settings.own is not None:
        in_folders = KeysOfFolders(tuple(map(Path, settings.folders)))
        return ClientKeys(
            own=settings.own,
            server_of=settings.server_of or in_folders,
            near_now=lambda: settings.near_of or in_folders.near_of,
        )
    return client_keys(Path(settings.keys)) if settings.keys else None
