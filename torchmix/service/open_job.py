"""The loaders of a job: started together, shared by the loaders of a process, left together.

The first rank of each node, leader or not, starts its loaders, or the first of all has them started on a Ray cluster,
and they end with it, however it ends; keys are made for this run, secrets stay in the memory of the processes that use
them. A node asks its own loaders over sockets in a folder of this user alone, without keys, which costs a third. A
collective: all ranks call it, as often and in the same order. Cost: the imports of the loaders, once for all parts of a
recipe that are open together.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import msgspec

from torchmix.boards.socket_folders import socket_folder
from torchmix.parallel.agreement import times_met
from torchmix.service.endpoints import MOST_IPC_BYTES, Registry
from torchmix.service.keys import KeyPair
from torchmix.service.main import LoaderStart
from torchmix.service.open_fleet import FleetSettings
from torchmix.service.pool import LoaderPool, starts_of
from torchmix.service.ray.keeper import RayMeans, open_ray_loaders
from torchmix.service.roster import (
    JobStore,
    NearSocket,
    NodeLoaders,
    Nodes,
    Present,
    bind_of,
    check_reached,
    loaders_of_job,
    network_name,
    nodes_of,
    own_address,
    text_of,
    value_of,
)
from torchmix.service.scale.loads import LoaderSources, shared_cache, sources_of_nodes
from torchmix.service.scale.nodes import ScaledNode
from torchmix.service.scale.partition import LoaderPlace, SourceLoad
from torchmix.service.scale.rule import RunNote, ScaleBounds
from torchmix.service.scale.scaling import LocalSeats
from torchmix.service.server import new_pair

_lock = threading.Lock()
_open: list[tuple[object, LoaderStart, JobLoaders]] = []
"""Those that this process holds, with the store and what they serve."""


class JobPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where this rank stands."""

    rank: int = 0
    world_size: int = 1
    node: str = ""
    """Equal for the ranks of a node."""
    store: JobStore = None
    """The job's; None where all ranks are in this process."""
    store_address: tuple[str, int] | None = None
    """Host and port of the store, if it has one."""
    own_store: Callable[[], JobStore] = lambda: None
    """Makes a connection to the store of its own, for a thread."""


class LoaderHold(Protocol):
    """What starts and ends loaders."""

    def close(self) -> None:
        """End them; may be called again."""
        ...


class NoLoaders:
    """What a rank holds that has started none."""

    def close(self) -> None:
        """Nothing."""


class LoadersOfNodes(msgspec.Struct, frozen=True, kw_only=True):
    """How many loaders each node has."""

    processes: int = 1
    places: Callable[[int], Sequence[LoaderPlace]] | None = None
    """In the place of `processes`: from a number of nodes to the loaders of all, as many for each."""


class LoadersThatFollow(msgspec.Struct, frozen=True, kw_only=True):
    """Loaders of each node that follow the run."""

    bounds: Callable[[int], ScaleBounds]
    """From a number of nodes to the loaders that there may be."""
    loads_of: Callable[[int], Callable[[int, int, RunNote], Sequence[SourceLoad]]]
    """From a number of nodes to what steps cost; called on the first rank alone."""


class JobLoaders:
    """The loaders of a node, where this process has started them, and the way to those of all nodes."""

    def __init__(self, held: LoaderHold, fleet: FleetSettings, num_nodes: int) -> None:
        """Nobody uses them yet."""
        self.fleet, self.num_nodes = fleet, num_nodes
        self._held = held
        self._process = os.getpid()
        self._num_users = 0
        atexit.register(held.close)

    @property
    def is_closed(self) -> bool:
        """Whether the last user has left, or this is a fork of the process that has it."""
        return self._num_users == 0 or os.getpid() != self._process

    def join(self) -> JobUse:
        """One more user."""
        self._num_users += 1
        return JobUse(self)

    def leave(self) -> None:
        """One user less; the last one ends the loaders of the node."""
        if os.getpid() != self._process:
            return
        self._num_users -= 1
        if self._num_users == 0:
            atexit.unregister(self._held.close)
            self._held.close()


class JobUse:
    """One user of a job's loaders: it leaves once, at the latest when it is collected."""

    def __init__(self, loaders: JobLoaders) -> None:
        """Made by `JobLoaders.join`."""
        self.fleet = loaders.fleet
        """How they are asked."""
        self.num_nodes = loaders.num_nodes
        """Nodes of the job."""
        self.leave = weakref.finalize(self, loaders.leave)
        """Ends the use; may be called again."""
        self.leave.atexit = False  # the pool has its own end


def open_job_loaders(
    start: LoaderStart,
    *,
    means: LoadersOfNodes | LoadersThatFollow | RayMeans,
    place: JobPlace,
    lost_s: float,
    check: Callable[[], None],
) -> JobUse:
    """The loaders of the job; `leave` them with the loader.

    Args:
        start: What they serve; its `bind` and its keys are not looked at.
        means: How many there are, and where.
        place: Where this rank stands.
        lost_s: How long no loader may answer.
        check: Raises while this waits, if a rank is lost.

    Raises:
        OptionError: A node has no address that the others reach; or ray is not installed.
        TorchmixError: A loader cannot serve; or there is no profile, which tells how many there are.
        OSError: A process cannot be started.
    """
    with _lock:
        _open[:] = [entry for entry in _open if not entry[2].is_closed]
        for store, of_start, found in _open:
            if store is place.store and of_start == start:
                return found.join()
        client = new_pair()
        own = Present(node=place.node, network=network_name(), public=client.public)
        prefix, rank = "", 0 if place.store is None else place.rank
        nodes = Nodes(first_ranks=(0,), num_networks=1, clients=(client.public,))
        if place.store is not None:
            prefix = f"torchmix/loaders/{times_met(place.store, 'loaders', rank)}"
            nodes = nodes_of(place.store, prefix, own, rank=rank, world_size=place.world_size, check=check)
        held: LoaderHold
        if isinstance(means, RayMeans):
            held, folder = open_ray_loaders(
                start,
                means,
                nodes,
                store=place.store,
                own_store=place.own_store,
                prefix=prefix,
                rank=rank,
                check=check,
            )
            fleet = FleetSettings(endpoints=(), folders=(str(folder),), own=client, lost_s=lost_s)
        elif isinstance(means, LoadersThatFollow):
            held, folders = _open_following(start, means, nodes, place, prefix, rank, check)
            fleet = FleetSettings(endpoints=(), folders=folders, own=client, lost_s=lost_s)
        else:
            held, loaders = _open_nodes(start, means, nodes, own, place, prefix, rank, check)
            fleet = fleet_settings(client, loaders, own, lost_s)
        entry = JobLoaders(held, fleet, len(nodes.first_ranks))
        _open.append((place.store, start, entry))
        return entry.join()


def _open_nodes(
    start: LoaderStart,
    means: LoadersOfNodes,
    nodes: Nodes,
    own: Present,
    place: JobPlace,
    prefix: str,
    rank: int,
    check: Callable[[], None],
) -> tuple[LoaderHold, NodeLoaders]:
    """Start the loaders of this node; those of all nodes."""
    sources: list[list[LoaderSources]] = []
    if means.places is not None:
        if rank == 0:
            sources = sources_of_nodes(means.places(len(nodes.first_ranks)), len(nodes.first_ranks))
            if place.store is not None:
                place.store.set(f"{prefix}/sources", text_of(sources))
        else:
            sources = value_of(place.store, f"{prefix}/sources", _decode_sources, check)
    held: LoaderHold = NoLoaders()
    mine: NodeLoaders | None = None
    try:
        if rank in nodes.first_ranks:
            own_sources = sources[nodes.first_ranks.index(rank)] if sources else []
            held, mine = _start(start, means.processes, own_sources, nodes, own, place)
        if place.store is None:
            assert mine is not None
            return held, mine
        return held, loaders_of_job(place.store, prefix, mine, nodes, rank=rank, check=check)
    except BaseException:
        held.close()
        raise


class _Following:
    """What the first rank of a node holds of loaders that follow the run."""

    def __init__(self, stack: ExitStack) -> None:
        """`stack` ends them."""
        self._stack = stack

    def close(self) -> None:
        """End them; may be called again."""
        self._stack.close()


def _open_following(
    start: LoaderStart,
    means: LoadersThatFollow,
    nodes: Nodes,
    place: JobPlace,
    prefix: str,
    rank: int,
    check: Callable[[], None],
) -> tuple[LoaderHold, tuple[str, ...]]:
    """Have the loaders of this node follow the run; the folders where it finds all."""
    first = nodes.first_of_rank[rank] if nodes.first_of_rank else rank
    key, num_nodes = f"{prefix}/folders", len(nodes.first_ranks)
    if rank != first:
        return NoLoaders(), value_of(place.store, f"{key}/{first}", _decode_folders, check)
    bounds, is_over = means.bounds(num_nodes), threading.Event()
    with ExitStack() as stack:
        folder, cpu = stack.enter_context(socket_folder()), start.cpu
        start = _listening(start, nodes, place, folder, bounds.ceiling // num_nodes)
        node = ScaledNode(
            LocalSeats(start, Registry(folder), is_over, shared_cpu=cpu),
            folder,
            bounds,
            node=nodes.first_ranks.index(rank),
            loads_of=means.loads_of(num_nodes) if rank == 0 else None,
            store=place.own_store() if num_nodes > 1 else None,
            prefix=f"{prefix}/following",
            is_over=is_over,
            check=check,
            check_reached=lambda endpoints: check_reached(endpoints, nodes, rank),
        )
        stack.callback(node.close)
        if place.store is not None:
            place.store.set(f"{key}/{rank}", text_of(node.folders))
        return _Following(stack.pop_all()), node.folders


def _listening(start: LoaderStart, nodes: Nodes, place: JobPlace, near: Path, processes: int) -> LoaderStart:
    """What loaders of this node are told, of which there are so many at most; `near`: where their sockets are."""
    is_short = len(os.fsencode(near / str(processes))) <= MOST_IPC_BYTES
    return msgspec.structs.replace(
        start,
        bind=bind_of(own_address(place.store_address)),
        near=f"ipc://{near}" if is_short else "",
        own=new_pair(),
        allowed=nodes.clients,
        cpu=max(1, start.cpu // processes),
    )


def _start(
    start: LoaderStart, processes: int, sources: Sequence[LoaderSources], nodes: Nodes, own: Present, place: JobPlace
) -> tuple[LoaderPool, NodeLoaders]:
    """The loaders of this node."""
    processes = len(sources) or processes
    with ExitStack() as stack:
        start = _listening(start, nodes, place, stack.enter_context(socket_folder()), processes)
        starts = starts_of(start, processes)
        if sources:
            caches = shared_cache(start.cache_bytes, [one.page_bytes for one in sources])
            starts = [
                msgspec.structs.replace(one, cache_bytes=cache) for one, cache in zip(starts, caches, strict=True)
            ]
        pool = LoaderPool(starts, near=stack.pop_all())
    sockets = {
        endpoint: NearSocket(node=own.node, network=own.network, endpoint=one.near)
        for endpoint, one in zip(pool.endpoints, starts, strict=True)
        if one.near
    }
    parts_of = {endpoint: one.sources for endpoint, one in zip(pool.endpoints, sources, strict=False)}
    public = "" if start.own is None else start.own.public
    return pool, NodeLoaders(public_of=dict.fromkeys(pool.endpoints, public), near_of=sockets, parts_of=parts_of)


def fleet_settings(pair: KeyPair, loaders: NodeLoaders, own: Present, lost_s: float) -> FleetSettings:
    """How a rank asks the loaders of the job: those of its own node over their sockets."""
    near_of = {
        endpoint: near.endpoint
        for endpoint, near in loaders.near_of.items()
        if (near.node, near.network) == (own.node, own.network)
    }
    return FleetSettings(
        endpoints=tuple(sorted(loaders.public_of)),
        own=pair,
        server_of=loaders.public_of,
        near_of=near_of,
        parts_of=loaders.parts_of,
        lost_s=lost_s,
    )


_decode_folders = msgspec.json.Decoder(tuple[str, ...]).decode
_decode_sources = msgspec.json.Decoder(list[list[LoaderSources]]).decode
