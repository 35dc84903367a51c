"""The shared loaders of a run: those that the recipe names, or those that the job starts on its nodes."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec.structs import replace

from torchmix.catalog.in_store import catalog_folder
from torchmix.indexing.scan import catalog_of_part
from torchmix.parallel.liveness.open import own_connection, store_address
from torchmix.parallel.place_tree import ClientPlaceTree
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.loaders import check_sources_of, limits_of_node, sources_read_first, words_of_sources
from torchmix.recipe.parts import Part, has_part, part_of, with_all_sources
from torchmix.recipe.sources import PARTS
from torchmix.recipe.structs import Loaders, Recipe
from torchmix.service.endpoints import endpoints_of
from torchmix.service.keys import client_keys
from torchmix.service.main import LoaderStart
from torchmix.service.open_fleet import FleetSettings
from torchmix.service.open_job import JobPlace, JobUse, LoadersOfNodes, LoadersThatFollow, open_job_loaders
from torchmix.service.ray.keeper import RayMeans
from torchmix.service.roster import JobStore
from torchmix.service.scale.loads import FIRST_STEPS, bounds_of_nodes, coming_loads, transform_places
from torchmix.service.scale.partition import LoaderBudget, LoaderPlace, SourceLoad, partition_of_nodes
from torchmix.service.scale.rule import RunNote
from torchmix.steps.memory_budget import loader_budget, processors
from torchmix.steps.worker.open_node import NODE_VARIABLE, node_name
from torchmix.storage.stores import place_of

LOST_S = 30.0
"""How long no shared loader may answer before files are read here, or the run ends."""


def with_own_sources(
    fleet: FleetSettings | None, means: Loaders, part: Part, whole: Recipe, folder: Path, *, nodes: int
) -> FleetSettings | None:
    """Settings of a client whose process reads some sources itself, as `transform_at` says.

    Args:
        fleet: Where the loaders are; None: there are none.
        means: The recipe's `loaders`, or what stands in its place.
        part: What is read.
        whole: The recipe.
        folder: The recipe's.
        nodes: Node workers of the job.

    Raises:
        OptionError: `transform_at` names a source that there is not.
        CatalogMissing, CatalogStale: There is no profile, or it is of another catalog.
    """
    if fleet is None or means.transform_at is None:
        return fleet
    check_sources_of(means, with_all_sources(whole).sources)
    here = worker_sources(means, part, catalog_folder(folder, whole.catalog), nodes=nodes)
    return dataclasses.replace(fleet, here=here, away=_loader_sources(means, part))


def behind_node(fleet: FleetSettings | None, means: Loaders, *, nodes: int, item_bytes: int) -> FleetSettings | None:
    """Settings of a client whose node reads first, where the recipe says so.

    Args:
        fleet: Where the loaders are; None: there are none.
        means: The recipe's `loaders`, or what stands in its place.
        nodes: Node workers of the job.
        item_bytes: What each of the node's readers of items may hold.
    """
    if fleet is None or not means.is_node_first:
        return fleet
    cpu = limits_of_node(means).cpu or processors()
    if means.asked == "job":  # loaders have a processor each
        here = len(fleet.endpoints) // nodes if means.autoscale is None else means.autoscale.max
        cpu = max(1, cpu - max(1, here))
    # A node that sees the files waits for nobody.
    return dataclasses.replace(fleet, lost_s=0.0, node_cpu=cpu, node_item_bytes=item_bytes)


def remote_loaders(means: Loaders, folder: Path) -> FleetSettings | None:
    """The shared loaders that the recipe names, if it does."""
    if means.asked != "remote" or means.endpoints is None:
        return None
    texts = (means.endpoints,) if isinstance(means.endpoints, str) else means.endpoints
    found = endpoints_of(texts, folder)
    keys = "" if means.keys is None else str(folder / means.keys)
    if keys:
        client_keys(Path(keys))  # a leader names a wrong folder, before a process is started
    folders = tuple(map(str, found.folders))
    return FleetSettings(endpoints=found.fixed, folders=folders, keys=keys, lost_s=LOST_S)


def job_loaders(
    means: Loaders,
    whole: Recipe,
    folder: Path,
    tree: ClientPlaceTree,
    *,
    store: JobStore,
    ignored_signals: Collection[int] = (),
    check: Callable[[], None] = lambda: None,
) -> JobUse | None:
    """The loaders that the job starts, if it does; `leave` them with the loader. A collective of all ranks.

    Args:
        means: The recipe's `loaders`, or what stands in its place.
        whole: The recipe; loaders serve all its parts.
        folder: The recipe's.
        tree: The place tree as this rank sees it.
        store: The job's; None where all ranks are in this process.
        ignored_signals: Signals that do not end loaders.
        check: Raises while this waits, if a rank is lost.

    Raises:
        OptionError: A node has no address that the others reach.
        TorchmixError: A catalog cannot be made, or a loader cannot serve.
    """
    if means.asked not in ("job", "ray"):
        return None
    parts = {name: part_of(whole, name) for name in PARTS if has_part(whole, name)}
    if tree.is_leader:
        for part in parts.values():
            catalog_of_part(part, whole, folder)
    start = LoaderStart(
        parts=parts,
        base=str(folder.absolute()),
        catalog_folder=place_of(folder.absolute(), whole.catalog),
        cache_bytes=parse_bytes(whole.read.cache, where="read.cache"),
        bind="",
        cpu=means.cpu or processors() if means.asked == "job" else 0,
        ignored_signals=tuple(sorted(ignored_signals)),
    )
    place = JobPlace(
        rank=tree.topology.rank,
        world_size=tree.topology.world_size,
        node=node_name() or f"{socket.gethostname()} {os.environ.get(NODE_VARIABLE, '')}",
        store=store,
        store_address=None if store is None else store_address(store),
        own_store=lambda: own_connection(store),
    )
    return open_job_loaders(start, means=_means(means, start), place=place, lost_s=LOST_S, check=check)


def _means(means: Loaders, start: LoaderStart) -> LoadersOfNodes | LoadersThatFollow | RayMeans:
    """How many loaders there are, and where."""
    if means.asked == "ray":
        return RayMeans(
            address=means.address or "auto",
            processes=means.processes,
            autoscale=means.autoscale,
            cpu=means.cpu,
            memory_bytes=None if means.memory is None else parse_bytes(means.memory, where="loaders.memory"),
        )
    if means.num_told is not None:
        return LoadersOfNodes(processes=means.num_told)
    part = start.parts["train"]
    read_first = sources_read_first(means, part.sources)

    def budget(nodes: int) -> LoaderBudget:
        return loader_budget(means, part.batch, nodes=nodes)

    def loads_of(nodes: int) -> Callable[[int, int, RunNote], list[SourceLoad]]:
        folder = start.fetched_catalog()
        coming = coming_loads(part, folder)
        here = set(worker_sources(means, part, folder, nodes=nodes))

        def loads(begin: int, stop: int, note: RunNote) -> list[SourceLoad]:
            found = coming.mean(begin, stop, note.gone, note.decided)
            return [replace(load, cost=0) if load.name in here else load for load in found]

        return loads

    def places(nodes: int) -> tuple[LoaderPlace, ...]:
        loads = loads_of(nodes)(0, FIRST_STEPS, RunNote(step=0))
        return partition_of_nodes(loads, budget(nodes), nodes=nodes, read_first=read_first).loaders

    if (scale := means.autoscale) is None:
        return LoadersOfNodes(places=places)
    return LoadersThatFollow(
        bounds=lambda nodes: bounds_of_nodes(scale, part, budget(nodes), nodes=nodes, read_first=read_first),
        loads_of=loads_of,
    )


def worker_sources(means: Loaders, part: Part, catalog_folder: Path, *, nodes: int) -> tuple[str, ...]:
    """The sources that node workers read and transform themselves.

    Args:
        means: The recipe's `loaders`.
        part: What is read.
        catalog_folder: Has the part's catalog, and the profile where `auto` is asked for.
        nodes: Node workers.

    Raises:
        CatalogMissing, CatalogStale: There is no profile, or it is of another catalog.
    """
    if means.transform_at in (None, "loader"):
        return ()
    said = words_of_sources(means.transform_at, part.sources)
    if part.name == "train" and "auto" in said.values() and not means.is_node_first:
        budget = loader_budget(means, part.batch, nodes=nodes)
        coming = coming_loads(part, catalog_folder)
        places = transform_places(coming.traffic(0, FIRST_STEPS), nodes=nodes, loaders=budget.most_processes, said=said)
        return tuple(sorted(name for name, one in places.items() if one.place == "worker"))
    return tuple(sorted(name for name, word in said.items() if word == "worker"))


def _loader_sources(means: Loaders, part: Part) -> tuple[str, ...]:
    """Where the node reads first: the sources that it leaves to loaders."""
    if not means.is_node_first:
        return ()
    words = words_of_sources(means.transform_at, part.sources)
    return tuple(sorted(name for name, word in words.items() if word == "loader"))
