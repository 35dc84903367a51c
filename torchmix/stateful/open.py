"""build_loader: from a recipe and a topology to the loader of this rank."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import socket
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from torchmix import __version__
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import Catalog, check_vocabulary, open_part, views_of
from torchmix.errors import OptionError, TopologyError
from torchmix.indexing.deny_lists import check_lists
from torchmix.indexing.properties import wanted_rows
from torchmix.indexing.scan import catalog_if_any, ensure_catalog
from torchmix.modalities.table import build_of
from torchmix.native.load import native
from torchmix.parallel.agreement import agree, announcing_failures
from torchmix.parallel.fan_out import FanOut, open_fan_out
from torchmix.parallel.liveness.evidence import SHORTEST_PATIENCE_S, patience_of
from torchmix.parallel.liveness.guard import Liveness
from torchmix.parallel.liveness.open import open_liveness, own_connection, store_address
from torchmix.parallel.place_tree import ONE_PLACE, ClientPlaceTree, Layout, RankPlaces
from torchmix.parallel.topology import Topology
from torchmix.planner.entering import MAX_STEPS
from torchmix.planner.stream_order import check_rows_of_part
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.build import true_or_false
from torchmix.recipe.fingerprint import recipe_keys
from torchmix.recipe.items import kinds_of
from torchmix.recipe.load import recipe_and_directory
from torchmix.recipe.loaders import check_sources_of, limits_of_node, loaders_of, words_of_sources
from torchmix.recipe.parts import Part, has_part, part_of, with_all_sources
from torchmix.recipe.sources import PARTS, max_bad_of, resets_positions, sources_with_resets
from torchmix.recipe.structs import Loaders, Recipe
from torchmix.service.endpoints import endpoints_of
from torchmix.service.keys import client_keys
from torchmix.service.main import LoaderStart
from torchmix.service.open_fleet import FleetSettings
from torchmix.service.open_job import JobPlace, JobUse, LoadersOfNodes, open_job_loaders
from torchmix.service.ray.keeper import RayMeans
from torchmix.service.roster import JobStore
from torchmix.service.scale.loads import FIRST_STEPS, coming_loads, transform_places
from torchmix.service.scale.partition import LoaderPlace, partition_of_nodes
from torchmix.stateful.loader import StatefulDataLoader, run_name
from torchmix.stateful.reports import Reports, open_reports
from torchmix.stateful.serve import SharedParts, facts_of_places, places_of
from torchmix.stateful.stream import StepStream
from torchmix.steps.edits import row_facts
from torchmix.steps.history import RunHistory
from torchmix.steps.local_steps import HeldReader
from torchmix.steps.memory_budget import leaders_here, loader_budget, memory_budget, processors, samples_of_leaders
from torchmix.steps.replay import check_plan_of, read_manifest
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.worker.open_node import (
    NODE_VARIABLE,
    node_name,
    open_node,
    options_of,
    start_for_node,
    taking_what_waits,
)

# --- The shared loaders of a run: those that the recipe names, or those that the job starts on its nodes.
#
# With `job` all ranks come here together; catalogs of all parts are there before a loader starts. Cost: with `job`,
# the start of loader processes.

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
    return dataclasses.replace(fleet, here=worker_sources(means, part, folder / whole.catalog, nodes=nodes))


def remote_loaders(means: Loaders, folder: Path) -> FleetSettings | None:
    """The shared loaders that the recipe names, if it does."""
    if not means.is_remote or means.endpoints is None:
        return None
    texts = (means.endpoints,) if isinstance(means.endpoints, str) else means.endpoints
    found = endpoints_of(texts, folder)
    keys = "" if means.keys is None else str(folder / means.keys)
    if keys:
        client_keys(Path(keys))  # a leader names a wrong folder, before a process is started
    is_first = means.where == ("node", "remote")
    return FleetSettings(
        endpoints=found.fixed,
        folders=tuple(map(str, found.folders)),
        keys=keys,
        lost_s=0.0 if is_first else LOST_S,  # a node that sees the files waits for nobody
        node_cpu=(means.cpu or processors()) if is_first else 0,
    )


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
    if means.where not in ("job", "ray"):
        return None
    parts = {name: part_of(whole, name) for name in PARTS if has_part(whole, name)}
    if tree.is_leader:
        for part in parts.values():
            catalog_of(part, whole, folder)
    start = LoaderStart(
        parts=parts,
        base=str(folder.absolute()),
        catalog_folder=str((folder / whole.catalog).absolute()),
        cache_bytes=parse_bytes(whole.read.cache, where="read.cache"),
        bind="",
        cpu=means.cpu or processors() if means.where == "job" else 0,
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


def _means(means: Loaders, start: LoaderStart) -> LoadersOfNodes | RayMeans:
    """How many loaders there are, and where."""
    if means.where == "ray":
        return RayMeans(
            address=means.address or "auto",
            processes=means.processes,
            autoscale=means.autoscale,
            cpu=means.cpu,
            memory_bytes=None if means.memory is None else parse_bytes(means.memory, where="loaders.memory"),
        )
    if means.processes != "auto":
        return LoadersOfNodes(processes=means.processes)
    part = start.parts["train"]

    def places(nodes: int) -> tuple[LoaderPlace, ...]:
        folder, budget = Path(start.catalog_folder), loader_budget(means, part.batch, nodes=nodes)
        loads = coming_loads(part, folder).mean(0, FIRST_STEPS)
        here = set(worker_sources(means, part, folder, nodes=nodes))
        loads = [replace(load, cost=0) if load.name in here else load for load in loads]
        return partition_of_nodes(loads, budget, nodes=nodes).loaders

    return LoadersOfNodes(places=places)


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
    if part.name == "train" and "auto" in said.values():
        budget = loader_budget(means, part.batch, nodes=nodes)
        coming = coming_loads(part, catalog_folder)
        places = transform_places(coming.traffic(0, FIRST_STEPS), nodes=nodes, loaders=budget.most_processes, said=said)
        return tuple(sorted(name for name, one in places.items() if one.place == "worker"))
    return tuple(sorted(name for name, word in said.items() if word == "worker"))


def catalog_of(part: Part, whole: Recipe, folder: Path) -> Catalog:
    """The catalog of a part. Missing sources are indexed for all parts together."""
    catalog_folder = folder / whole.catalog
    catalog = catalog_if_any(catalog_folder, settings_of(part.sources, part.shuffle), views_of(part))
    if catalog is None:
        every = with_all_sources(whole)
        ensure_catalog(catalog_folder, settings_of(every.sources, every.shuffle), folder, wanted_rows(every))
        catalog = open_part(catalog_folder, part)
    return catalog


# --- build_loader: from a recipe and a topology to the loader of this rank.
#
# Arguments that are wrong, or that differ between ranks, are refused before any data is read or any group is made;
# when a rank fails after that, all others name it; a peer opens no data file. The first leader that holds the
# catalog's lock builds a missing catalog, and the others wait.

logger = logging.getLogger(__name__)


@taking_what_waits()
def build_loader(
    recipe: str | Path | Recipe | Mapping[str, Any],
    *,
    topology: Topology | ClientPlaceTree | None = None,
    micro_batch_size: int = 1,
    loaders: str | Loaders | Mapping[str, Any] | None = None,
    look_ahead: int = 2,
    max_steps: int | None = None,
    part: str = "train",
    start_step: int = 0,
    one_pass: bool = False,
    directory: str | Path | None = None,
    patience_s: float | None = None,
    padded_vocab_size: int | None = None,
    worker_ignores: Collection[int] = (),
    decisions: str | Path | None = None,
    replay: str | Path | None = None,
    fan_out: FanOut | None = None,
) -> StatefulDataLoader:
    """The loader of this rank. Every rank of the job calls this with equal values; close the loader, or use `with`.

    Args:
        recipe: A YAML file, a `Recipe` built in Python, or a mapping with the keys of a file.
        topology: Parallel sizes and this rank; None takes them from torchrun's environment with tp = cp = pp = 1.
            Pass a `ClientPlaceTree` for leaders or roles that differ from the default.
        micro_batch_size: Samples of a microbatch; micro_batch_size x dp must divide the recipe's samples.
        loaders: What stands in the place of the recipe's `loaders`: a word of `where`, as `node` or `in_process`; or
            keys with their values, as a mapping, as text (`node,memory=8GiB`) or as `torchmix.Loaders`.
        look_ahead: Finished steps that may wait on each rank, 1 or more.
        max_steps: Stop before this step; counted from the run's beginning, not from a resume.
        part: The part to read: `train`, `validation` or `test`. A job may have a loader of each at the same time.
        start_step: Begin at this step: the steps before it are planned, but not read, when the first one is asked for.
        one_pass: Give every document once, and end. Padding fills the last batch. A `start_step` beyond the end of
            the pass gives nothing.
        directory: Folder that relative paths in the recipe start from; None means the folder of the recipe's file,
            or the current folder for a recipe without a file.
        patience_s: Seconds that a rank of another host, or the job's store, may be silent before it counts as lost,
            3 or more; None means 11. A larger value tolerates longer pauses of a network and longer calls that keep
            the interpreter's lock, and delays the notice of a loss. Loaders that are open together use the value of
            the first.
        padded_vocab_size: Rows of the model's embedding, 1 or more: every id, and the recipe's `vocab_size`, must fit.
            None: not known.
        worker_ignores: Signals that do not end the worker process, such as SIGTERM in a job that saves on SIGTERM.
        decisions: Replay: folder or file of the log of an earlier run, relative to the recipe's folder. Its decisions
            hold, and the recipe's policy is not asked.
        replay: Folder that `torchmix plan --out` wrote, relative to the recipe's folder. Its steps are given without
            being planned, placed for this layout; behind the last one steps are planned.
        fan_out: An exchange with the other ranks that the caller has made, such as `torchmix.parallel.local_world`
            for a whole job in one process.

    Raises:
        RecipeError: The recipe is wrong, data hold ids that its model does not have, or the recipe or an argument
            differs from that of rank 0.
        OptionError: An argument has a wrong type, or is out of its range.
        TopologyError: Sizes do not divide, `align_tokens` does not suit cp, or the number of ranks is not that of
            torch.distributed.
        CatalogError: Files are missing, unreadable or changed.
        PlanError: A source has no row in this part; the plan to replay is damaged, or of another recipe or catalog.
        RankLost: Another rank failed, or did not come, before the loaders were built.
        NativeError: TORCHMIX_NATIVE=1 requires the native library, and it cannot be used.
    """
    options = LoaderOptions(
        micro_batch_size=micro_batch_size,
        look_ahead=look_ahead,
        max_steps=max_steps,
        part=part,
        start_step=start_step,
        one_pass=one_pass,
        patience_s=patience_s,
        padded_vocab_size=padded_vocab_size,
        worker_ignores=worker_ignores,
        decisions=decisions,
        replay=replay,
    )
    store = _store_of_job(is_alone=fan_out is not None or _is_of_one(topology))
    with announcing_failures(store, rank=dist.get_rank() if _is_in_job() else 0):
        native()
        asked = read_and_check(recipe, options, topology=topology, loaders=loaders, directory=directory)
        others = watch_others(asked, store, has_exchange=fan_out is not None)
    started: JobUse | None = None
    try:
        if others.liveness is not None:
            agree_on_arguments(asked, others)
            fan_out = open_fan_out(asked.tree, pin=torch.cuda.is_available())
        reports = reports_of(asked, others, fan_out)
        started = job_loaders(
            asked.means,
            asked.whole,
            asked.folder,
            asked.tree,
            store=others.watched_store,
            ignored_signals=worker_ignores,
            check=others.check,
        )
        shared = SharedParts(
            part=asked.part,
            stream_of_leader=partial(stream_of_leader, asked, others, started),
            store=store,
            liveness=others.liveness,
            started=started,
            run=run_name(recipe, asked.folder),
        )
        return StatefulDataLoader(
            shared.seat(asked.tree, asked.layout, fan_out, HeldReader()),
            shared=shared,
            look_ahead=look_ahead,
            start_step=start_step,
            stop_step=None if one_pass else max_steps,
            reports=reports,
        )
    except BaseException as error:
        if others.liveness is not None:
            others.liveness.post_abort(error)
        if started is not None:
            started.leave()
        raise


# --- What is asked: recipe, part, options and the places of the ranks. Nothing is open, and no data is read.


class LoaderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `build_loader` that are no recipe, no ranks and no exchange; its docstring describes them."""

    micro_batch_size: int
    look_ahead: int
    max_steps: int | None
    part: str
    start_step: int
    one_pass: bool
    patience_s: float | None
    padded_vocab_size: int | None
    worker_ignores: Collection[int]
    decisions: str | Path | None
    replay: str | Path | None


class AskedLoader(msgspec.Struct, frozen=True, kw_only=True):
    """What one call of `build_loader` asks for, checked."""

    options: LoaderOptions
    whole: Recipe
    folder: Path
    """Relative paths of the recipe start here."""
    means: Loaders
    part: Part
    tree: ClientPlaceTree
    layout: Layout

    @property
    def catalog_folder(self) -> Path:
        """The folder of the catalog."""
        return self.folder / self.whole.catalog

    @property
    def log_folder(self) -> Path | None:
        """Where the policy's decisions are logged; None: no policy is asked."""
        dynamic = self.part.dynamic
        return self.folder / dynamic.decisions if dynamic is not None and self.options.decisions is None else None


def read_and_check(
    recipe: str | Path | Recipe | Mapping[str, Any],
    options: LoaderOptions,
    *,
    topology: Topology | ClientPlaceTree | None,
    loaders: str | Loaders | Mapping[str, Any] | None,
    directory: str | Path | None,
) -> AskedLoader:
    """What is asked for; arguments and errors are those of `build_loader`."""
    whole, folder = recipe_and_directory("build_loader", recipe, directory)
    means = loaders_of("build_loader", whole.loaders, loaders)
    one_pass = true_or_false("build_loader", "one_pass", options.one_pass)
    part = part_of(whole, options.part, one_pass=one_pass)
    _check_topology(topology)
    if topology is None:
        topology = _topology_in(dist.get_world_size()) if _is_in_job() else Topology.from_torchrun()
    _check_numbers(
        micro_batch_size=options.micro_batch_size,
        look_ahead=options.look_ahead,
        max_steps=options.max_steps,
        start_step=options.start_step,
        padded_vocab_size=options.padded_vocab_size,
    )
    _check_patience(options.patience_s)
    if options.replay is not None and part.dynamic is not None:
        raise OptionError("build_loader: replay gives steps of a recipe without a policy; use decisions=...")
    tree, layout = places_of(topology, options.micro_batch_size, part)
    return AskedLoader(options=options, whole=whole, folder=folder, means=means, part=part, tree=tree, layout=layout)


# --- The other ranks: heartbeats, the comparison of what they were given, and the policy's losses.


class OtherRanks(msgspec.Struct, frozen=True, kw_only=True):
    """How this rank knows of the others of its job."""

    store: Any = None
    """The job's store; None where no other rank waits for this one."""
    liveness: Liveness | None = None
    """Heartbeats; None where this loader has all samples, or its exchange was made by the caller."""

    @property
    def watched_store(self) -> Any:
        """The store, where the ranks that use it are watched."""
        return None if self.liveness is None else self.store

    def check(self) -> None:
        """Raise RankLost if a rank is lost."""
        if self.liveness is not None:
            self.liveness.check()


def watch_others(asked: AskedLoader, store: Any, *, has_exchange: bool) -> OtherRanks:
    """Begin to watch the other ranks, so that they name a rank that fails from here on. A collective.

    The worker of the node starts first: its imports take longer than all that is between here and its first message.

    Args:
        asked: What this rank was asked for.
        store: The job's; None: there is no other rank.
        has_exchange: The caller has made the exchange with the other ranks, who are in this process.
    """
    tree = asked.tree
    if asked.means.where != "in_process" and not has_exchange:
        start_for_node(tree, options_of(asked.means, asked.options.worker_ignores))
    if _is_in_job() and dist.get_world_size() > 1 and tree.topology.world_size == 1:
        text = "of %s ranks, this one opens a loader for itself alone, which gives it all samples"
        logger.warning(text, dist.get_world_size())
    liveness = None
    if not has_exchange and tree.topology.world_size > 1:
        liveness = open_liveness(tree, patience=patience_of(asked.options.patience_s))
    return OtherRanks(store=store, liveness=liveness)


def agree_on_arguments(asked: AskedLoader, others: OtherRanks) -> None:
    """Compare what the ranks were given. A collective.

    Raises:
        RecipeError: An argument or the recipe differs from that of rank 0; names both values.
        RankLost: A rank failed before it came here.
    """
    options, topology = asked.options, asked.tree.topology
    given = {
        name: getattr(options, name)
        for name in LoaderOptions.__struct_fields__
        if name not in ("look_ahead", "worker_ignores")  # a rank's own: no other one sees a difference
    }
    facts = _facts(asked.part, asked.tree, **given, loaders=repr(asked.means))
    agree(others.store, rank=topology.rank, world_size=topology.world_size, facts=facts, check=others.check)


def reports_of(asked: AskedLoader, others: OtherRanks, fan_out: FanOut | None) -> Reports | None:
    """This rank's end of the losses that go to the policy, if one is asked. A collective."""
    if asked.log_folder is None:
        return None
    return open_reports(
        asked.part, asked.tree, asked.log_folder, base=asked.folder, fan_out=fan_out, store=others.store
    )


# --- The stream of a leader: catalog, settings, the bound of memory, the worker, and the history of the run.


def stream_of_leader(
    asked: AskedLoader,
    others: OtherRanks,
    started: JobUse | None,
    tree: ClientPlaceTree,
    layout: Layout,
    held: HeldReader,
) -> StepStream:
    """The steps of the replica that this rank leads.

    Args:
        asked: What `build_loader` was asked for.
        others: The other ranks.
        started: The loaders that the job has started; None: none.
        tree, layout: As they are now; after a change of places they are not those of `asked`.
        held: Keeps the reader of this process from one stream to the next.
    """
    catalog = checked_catalog(asked)
    settings = stream_settings(asked, started, tree, layout, catalog)
    check_memory(asked, others, tree, catalog)
    node = None
    if asked.means.where != "in_process":
        options = options_of(asked.means, asked.options.worker_ignores)
        node = open_node(tree, options, store=others.watched_store, check=others.check)
    return StepStream(
        settings,
        catalog=catalog if node is None else None,
        node=node,
        consumer=tree.topology.rank,
        look_ahead=asked.options.look_ahead,
        held=held,
        rows=row_facts(asked.part, catalog),
        history=history_of(asked, tree),
    )


def checked_catalog(asked: AskedLoader) -> Catalog:
    """The catalog of the part, built if it is missing; it suits the part, the model and the plan to replay."""
    part, folder, options = asked.part, asked.folder, asked.options
    catalog = catalog_of(part, asked.whole, folder)
    rows = {name: source.num_documents for name, source in catalog.sources.items()}
    check_rows_of_part(asked.whole, options.part, rows)
    check_lists(folder, part.deny, catalog.directory, part.sources)
    check_vocabulary(asked.whole.vocab_size, catalog, padded_vocab_size=options.padded_vocab_size)
    if options.replay is not None:
        plan = folder / options.replay
        check_plan_of(read_manifest(plan), part, catalog.fingerprint, folder=plan)
    return catalog


def stream_settings(
    asked: AskedLoader, started: JobUse | None, tree: ClientPlaceTree, layout: Layout, catalog: Catalog
) -> StreamSettings:
    """What decides the steps of a replica and how they are read, as it also travels to the worker."""
    part, folder, options = asked.part, asked.folder, asked.options
    fleet = remote_loaders(asked.means, folder) if started is None else started.fleet
    num_nodes = 1 if started is None else started.num_nodes
    return StreamSettings(
        part=part,
        base=str(folder),
        catalog_folder=str(asked.catalog_folder),
        cache_bytes=parse_bytes(asked.whole.read.cache, where="read.cache"),
        replica=tree.replica,
        layout=layout,
        max_steps=options.max_steps,
        start_step=options.start_step,
        padded_vocab_size=options.padded_vocab_size,
        catalog=catalog.fingerprint,
        places=RankPlaces.of_tree(tree) if part.modules or part.balance.strategy else ONE_PLACE,
        decisions=str(asked.log_folder or ""),
        replayed="" if options.decisions is None else str(folder / options.decisions),
        recorded="" if options.replay is None else str(folder / options.replay),
        fleet=with_own_sources(fleet, asked.means, part, asked.whole, folder, nodes=num_nodes),
    )


def check_memory(asked: AskedLoader, others: OtherRanks, tree: ClientPlaceTree, catalog: Catalog) -> None:
    """Raise MemoryLimit where the loaders of this node would need more than the recipe gives them."""
    leaders = leaders_here(tree, is_job=others.liveness is not None)
    memory_budget(
        asked.part,
        catalog,
        asked.whole.read,
        limits_of_node(asked.means),
        samples_here=samples_of_leaders(asked.part, dp=tree.topology.dp, num_leaders=leaders),
        num_leaders=leaders,
        look_ahead=asked.options.look_ahead,
    ).check()


def history_of(asked: AskedLoader, tree: ClientPlaceTree) -> RunHistory | None:
    """The history of the run, which the first replica of a training run keeps; None on all others."""
    options = asked.options
    if options.part != "train" or tree.replica != 0 or options.one_pass or options.decisions is not None:
        return None
    return RunHistory(asked.catalog_folder, msgspec.to_builtins(asked.whole), asked.part)


def _is_in_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def _store_of_job(*, is_alone: bool) -> Any:
    """The store of the job, if this loader has to do with other ranks of it."""
    if is_alone or not _is_in_job() or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()


def _topology_in(job_size: int) -> Topology:
    """The topology of torchrun's environment; it must be that of the job that torch.distributed runs."""
    topology = Topology.from_torchrun()
    if topology.world_size != job_size:
        # Each of these ranks would read all samples for itself, without an error.
        raise TopologyError(
            f"build_loader: torch.distributed has {job_size} ranks, RANK and WORLD_SIZE in the environment give "
            f"{topology.world_size}; pass topology=torchmix.Topology.from_world(world_size=..., rank=..., ...)"
        )
    return topology


def _facts(planned: Part, tree: ClientPlaceTree, **options: float | str | Path | None) -> dict[str, str]:
    """Values that must be equal on all ranks, and whose difference would otherwise show only after it has done harm."""
    return {
        "torchmix": __version__,
        **recipe_keys(planned),
        "boundaries": planned.packing.boundaries,
        "vocab_size": str(planned.vocab_size),
        "bad_rows": repr(sorted((name, one.bad_rows, str(max_bad_of(one))) for name, one in planned.sources.items())),
        "resets": _resets(planned),
        "balance": msgspec.json.encode(planned.balance).decode(),
        "modules": msgspec.json.encode(planned.modules, order="sorted").decode(),
        "decoder": _decoder(planned),
        **facts_of_places(tree),
        **{name: str(value) for name, value in options.items()},
    }


def _decoder(part: Part) -> str:
    """The build that decodes items, if there are any: two builds would give replicas other bits."""
    return build_of(kinds_of(part.sources)) or "no items"


def _resets(part: Part) -> str:
    """Settings that change position_ids and the loss, but no sample."""
    positions = "document" if resets_positions(part.packing) else "sample"
    return f"positions {positions}, reset_loss {part.packing.reset_loss}, reset_id {sources_with_resets(part.sources)}"


def _is_of_one(topology: object) -> bool:
    sizes = topology.topology if isinstance(topology, ClientPlaceTree) else topology
    return isinstance(sizes, Topology) and sizes.world_size == 1


def _check_topology(topology: object) -> None:
    if topology is not None and not isinstance(topology, Topology | ClientPlaceTree):
        raise OptionError(
            f"build_loader: topology={topology!r} must be a torchmix.Topology, as "
            "torchmix.Topology.from_torchrun(tp=1, cp=1, pp=1), or a torchmix.ClientPlaceTree"
        )


def _check_patience(patience_s: float | None) -> None:
    if patience_s is None:
        return
    if type(patience_s) not in (int, float) or not SHORTEST_PATIENCE_S <= patience_s < math.inf:
        raise OptionError(
            f"build_loader: patience_s={patience_s!r} must be a number of seconds of at least {SHORTEST_PATIENCE_S:g}"
        )


def _check_numbers(**numbers: int | None) -> None:
    lowest = {"max_steps": 0, "start_step": 0}  # 1 for all others
    highest = {"start_step": MAX_STEPS}
    for name, value in numbers.items():
        if value is None and name in ("max_steps", "padded_vocab_size"):
            continue
        if type(value) is not int or value < lowest.get(name, 1) or value > highest.get(name, value):
            allowed = f"an int of at least {lowest.get(name, 1)}"
            allowed += f" and at most {MAX_STEPS}" if name == "start_step" else ""
            raise OptionError(f"build_loader: {name}={value!r} must be {allowed}")
