"""build_loader: from a recipe and a topology to the loader of this rank."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import socket
from collections.abc import Callable, Collection, Mapping
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
from torchmix.parallel.agreement import agree, announcing_failures
from torchmix.parallel.fan_out import FanOut, open_fan_out
from torchmix.parallel.liveness.evidence import SHORTEST_PATIENCE_S, patience_of
from torchmix.parallel.liveness.guard import Liveness
from torchmix.parallel.liveness.open import open_liveness, own_connection, store_address
from torchmix.parallel.place_tree import ONE_PLACE, ClientPlaceTree, Layout, RankPlaces
from torchmix.parallel.topology import Topology
from torchmix.planner.stream_order import check_rows_of_part
from torchmix.recipe.amounts import parse_bytes
from torchmix.recipe.build import true_or_false
from torchmix.recipe.fingerprint import recipe_keys
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
from torchmix.stateful.reports import open_reports
from torchmix.stateful.serve import SharedParts, facts_of_places, places_of
from torchmix.stateful.stream import StepStream
from torchmix.steps.edits import row_facts
from torchmix.steps.history import RunHistory
from torchmix.steps.local_steps import HeldReader
from torchmix.steps.memory_budget import leaders_here, loader_budget, memory_budget, processors, samples_of_leaders
from torchmix.steps.replay import check_plan_of, read_manifest
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.state import MAX_STEPS
from torchmix.steps.worker.open_node import (
    NODE_VARIABLE,
    node_name,
    open_node,
    options_of,
    start_for_node,
    taking_what_waits,
)
from torchmix.transform.images.decode import decoder_id

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
    """
    is_job = dist.is_available() and dist.is_initialized()
    job_size = dist.get_world_size() if is_job else None
    is_alone = fan_out is not None or _is_of_one(topology)
    store = None if is_alone or job_size in (None, 1) else dist.distributed_c10d._get_default_store()
    liveness: Liveness | None = None
    started: JobUse | None = None
    with announcing_failures(store, rank=dist.get_rank() if is_job else 0):
        whole, folder = recipe_and_directory("build_loader", recipe, directory)
        means = loaders_of("build_loader", whole.loaders, loaders)
        of_node = limits_of_node(means)
        planned = part_of(whole, part, one_pass=true_or_false("build_loader", "one_pass", one_pass))
        _check_topology(topology)
        if topology is None:
            topology = Topology.from_torchrun() if job_size is None else _topology_in(job_size)
        _check_numbers(
            micro_batch_size=micro_batch_size,
            look_ahead=look_ahead,
            max_steps=max_steps,
            start_step=start_step,
            padded_vocab_size=padded_vocab_size,
        )
        _check_patience(patience_s)
        if replay is not None and planned.dynamic is not None:
            raise OptionError("build_loader: replay gives steps of a recipe without a policy; use decisions=...")
        tree, layout = places_of(topology, micro_batch_size, planned)
        if means.where != "in_process" and fan_out is None:  # its imports take longer than all below
            start_for_node(tree, options_of(means, worker_ignores))
        if job_size not in (None, 1) and tree.topology.world_size == 1:
            text = "of %s ranks, this one opens a loader for itself alone, which gives it all samples"
            logger.warning(text, job_size)
        if fan_out is None and tree.topology.world_size > 1:
            liveness = open_liveness(
                tree, patience=patience_of(patience_s)
            )  # the other ranks name a rank that fails below
    try:
        if liveness is not None:
            assert store is not None  # `open_liveness` asks for a job
            numbers = {
                "micro_batch_size": micro_batch_size,
                "max_steps": max_steps,
                "start_step": start_step,
                "padded_vocab_size": padded_vocab_size,
            }
            words: dict[str, Any] = {"part": part, "one_pass": one_pass, "decisions": decisions, "replay": replay}
            facts = _facts(planned, tree, **numbers, **words, loaders=repr(means), patience_s=patience_s)
            topology = tree.topology
            agree(store, rank=topology.rank, world_size=topology.world_size, facts=facts, check=liveness.check)
            fan_out = open_fan_out(tree, pin=torch.cuda.is_available())
        reports, log_folder = None, None
        if planned.dynamic is not None and decisions is None:
            log_folder = folder / planned.dynamic.decisions
            reports = open_reports(planned, tree, log_folder, base=folder, fan_out=fan_out, store=store)

        started = job_loaders(
            means,
            whole,
            folder,
            tree,
            store=store if liveness is not None else None,
            ignored_signals=worker_ignores,
            check=liveness.check if liveness is not None else lambda: None,
        )

        def stream_of_leader(tree: ClientPlaceTree, layout: Layout, held: HeldReader) -> StepStream:
            catalog = catalog_of(planned, whole, folder)
            rows = {name: source.num_documents for name, source in catalog.sources.items()}
            check_rows_of_part(whole, part, rows)
            check_lists(folder, planned.deny, catalog.directory, planned.sources)
            check_vocabulary(whole.vocab_size, catalog, padded_vocab_size=padded_vocab_size)
            if replay is not None:
                check_plan_of(read_manifest(folder / replay), planned, catalog.fingerprint, folder=folder / replay)
            settings = StreamSettings(
                part=planned,
                base=str(folder),
                catalog_folder=str(folder / whole.catalog),
                cache_bytes=parse_bytes(whole.read.cache, where="read.cache"),
                replica=tree.replica,
                layout=layout,
                max_steps=max_steps,
                start_step=start_step,
                padded_vocab_size=padded_vocab_size,
                catalog=catalog.fingerprint,
                places=RankPlaces.of_tree(tree) if planned.modules or planned.balance.strategy else ONE_PLACE,
                decisions=str(log_folder) if log_folder else "",
                replayed=str(folder / decisions) if decisions is not None else "",
                recorded=str(folder / replay) if replay is not None else "",
                fleet=with_own_sources(
                    remote_loaders(means, folder) if started is None else started.fleet,
                    means,
                    planned,
                    whole,
                    folder,
                    nodes=1 if started is None else started.num_nodes,
                ),
            )
            here = leaders_here(tree, is_job=liveness is not None)
            samples = samples_of_leaders(planned, dp=tree.topology.dp, num_leaders=here)
            memory_budget(
                planned, catalog, whole.read, of_node, samples_here=samples, num_leaders=here, look_ahead=look_ahead
            ).check()
            node = None
            if means.where != "in_process":
                options = options_of(means, worker_ignores)
                if liveness is None:
                    node = open_node(tree, options)
                else:
                    node = open_node(tree, options, store=store, check=liveness.check)
            history = None
            if part == "train" and tree.replica == 0 and not one_pass and decisions is None:
                history = RunHistory(folder / whole.catalog, msgspec.to_builtins(whole), planned)
            return StepStream(
                settings,
                catalog=catalog if node is None else None,
                node=node,
                consumer=tree.topology.rank,
                look_ahead=look_ahead,
                held=held,
                rows=row_facts(planned, catalog),
                history=history,
            )

        shared = SharedParts(
            part=planned,
            stream_of_leader=stream_of_leader,
            store=store,
            liveness=liveness,
            started=started,
            run=run_name(recipe, folder),
        )
        return StatefulDataLoader(
            shared.seat(tree, layout, fan_out, HeldReader()),
            shared=shared,
            look_ahead=look_ahead,
            start_step=start_step,
            stop_step=None if one_pass else max_steps,
            reports=reports,
        )
    except BaseException as error:
        if liveness is not None:
            liveness.post_abort(error)
        if started is not None:
            started.leave()
        raise


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
    """The build that decodes images, if there are any: two builds would give replicas other pixels."""
    return decoder_id() if any(source.images is not None for source in part.sources.values()) else "no images"


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
