"""What one call of `build_loader` asks for: checked here, and compared with the other ranks."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from torchmix import __version__
from torchmix.catalog.in_store import catalog_folder
from torchmix.constructor.fields import check_context_parallel
from torchmix.errors import OptionError, TopologyError
from torchmix.modalities.table import decoder_of
from torchmix.parallel.agreement import agree
from torchmix.parallel.liveness.evidence import SHORTEST_PATIENCE_S
from torchmix.parallel.liveness.guard import Liveness
from torchmix.parallel.place_tree import ClientPlaceTree, Layout, check_scopes, layout_of, tree_with_broadcast
from torchmix.parallel.topology import Topology
from torchmix.planner.contexts import check_runs, run_costs
from torchmix.planner.graph.strategy import backbone_cost
from torchmix.recipe.build import listed, true_or_false
from torchmix.recipe.fingerprint import recipe_keys
from torchmix.recipe.load import recipe_and_directory
from torchmix.recipe.loaders import loaders_of
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.ramp import lengths_of, stages_of
from torchmix.recipe.sources import masked_sources, masks_resets, max_bad_of, resets_positions, sources_with_resets
from torchmix.recipe.structs import Loaders, Recipe
from torchmix.steps.replica_steps import OWN_OPTIONS, StreamOptions, check_number

# --- What is asked: recipe, part, options and the places of the ranks. Nothing is open, and no data is read.


class LoaderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `build_loader` that are no recipe, no ranks and no exchange; its docstring describes them."""

    stream: StreamOptions
    micro_batch_size: int
    part: str
    one_pass: bool
    patience_s: float | None
    worker_ignores: Collection[int]
    elastic: bool
    decisions: str | Path | None
    replay: str | Path | None
    accept_edit: str | None


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
        """The folder of the catalog, on this host."""
        return catalog_folder(self.folder, self.whole.catalog)

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
    job_size: int | None,
    loaders: str | Loaders | Mapping[str, Any] | None,
    directory: str | Path | None,
) -> AskedLoader:
    """What is asked for.

    Arguments and errors are those of `build_loader`; `job_size` is the ranks of torch.distributed, None where it does
    not run.
    """
    whole, folder = recipe_and_directory("build_loader", recipe, directory)
    means = loaders_of("build_loader", whole.loaders, loaders)
    one_pass = true_or_false("build_loader", "one_pass", options.one_pass)
    part = part_of(whole, options.part, one_pass=one_pass)
    if topology is not None:
        check_topology("build_loader", topology)
    else:
        topology = Topology.from_torchrun() if job_size is None else _topology_in(job_size)
    check_number("micro_batch_size", options.micro_batch_size)
    options.stream.check()
    _check_patience(options.patience_s)
    if options.replay is not None and part.dynamic is not None:
        raise OptionError("build_loader: replay gives steps of a recipe without a policy; use decisions=...")
    if options.decisions is not None and whole.dynamic is None:
        raise OptionError("build_loader: decisions gives what a policy has decided, and the recipe has no `dynamic`")
    elastic = true_or_false("build_loader", "elastic", options.elastic)
    tree, layout = places_of(topology, options.micro_batch_size, part, elastic=elastic)
    return AskedLoader(options=options, whole=whole, folder=folder, means=means, part=part, tree=tree, layout=layout)


def places_of(
    topology: Topology | ClientPlaceTree, micro_batch_size: int, part: Part, *, elastic: bool = False
) -> tuple[ClientPlaceTree, Layout]:
    """The tree and the layout of a topology; with `elastic` samples need not divide.

    Raises:
        TopologyError: Sizes do not divide, `align_tokens` does not suit cp, or no run of ranks holds a document.
    """
    tree = topology if isinstance(topology, ClientPlaceTree) else ClientPlaceTree.from_topology(topology)
    tree = tree_with_broadcast(tree, part.balance.broadcast_at)
    layout = layout_of(tree, micro_batch_size=micro_batch_size, broadcast_at=part.balance.broadcast_at, elastic=elastic)
    check_scopes(part.modules, tree)
    if part.balance.context is not None:
        check_runs(run_costs(part.balance.context, backbone_cost(part), layout), part.batch)
        return tree, layout
    for stage in stages_of(part.batch):
        layout.num_microbatches(stage.samples)
    for length in lengths_of(part.batch):
        check_context_parallel(
            1 if part.balance.broadcast_at == "CP" else tree.topology.cp,
            length=length,
            packing=part.packing,
            resetting=list(sources_with_resets(part.sources)),
        )
    return tree, layout


def check_apart(part: Part, *, elastic: bool) -> None:
    """Raise OptionError for a part that needs to hear of replicas which are apart, or a loader that is not elastic."""
    if not elastic:
        raise OptionError("build_loader: replicas that are apart come and go; pass elastic=True")
    if masks := masked_sources(part.sources):
        raise OptionError(
            f"build_loader: sources {listed(sorted(masks), 5)} mask bad rows, and replicas that are apart do not hear "
            f"how many tokens the others could not read; write bad_rows: error"
        )
    resets = sources_with_resets(part.sources)
    if resets and masks_resets(part.packing):
        raise OptionError(
            f"build_loader: the reset_id of sources {listed(sorted(resets), 5)} has no loss, and replicas that are "
            f"apart do not hear how many of them the others have; write packing.reset_loss: keep, or leave reset_id out"
        )
    if part.dynamic is not None:
        raise OptionError(
            "build_loader: the recipe has a policy, and replicas that are apart do not hear the losses of the others; "
            "leave dynamic out, or give the shares as a schedule"
        )
    if part.modules:
        raise OptionError(
            f"build_loader: rows of modules {listed(sorted(part.modules), 5)} travel between ranks of all replicas, "
            f"and replicas that are apart share no process group; give all ranks one, or leave the modules out"
        )
    if part.balance.context is not None:
        raise OptionError(
            "build_loader: with balance.context ranks of several replicas share a document, and replicas that are "
            "apart share no process group; give all ranks one, or pack by best_fit"
        )


def facts_of_places(tree: ClientPlaceTree) -> dict[str, str]:
    """What all ranks must mean alike of their places."""
    sizes = tree.topology
    places = repr((tree.leader_of_rank, tree.replica_of_rank, tree.role_of_rank))
    return {
        "topology": f"tp {sizes.tp} x cp {sizes.cp} x pp {sizes.pp} x dp {sizes.dp}",
        "leaders, replicas and roles": hashlib.sha256(places.encode()).hexdigest()[:16],
    }


# --- The other ranks: heartbeats, the comparison of what they were given, and the policy's losses.


class OtherRanks(msgspec.Struct, frozen=True, kw_only=True):
    """How this rank knows of the others of its job."""

    store: Any = None
    """The job's store; None where no other rank waits for this one."""
    liveness: Liveness | None = None
    """Heartbeats; None where this loader has all samples, or its exchange was made by the caller."""
    group_ranks: int | None = None
    """Ranks of this one's group, where other groups are apart; None: all are of one."""

    def among(self, tree: ClientPlaceTree) -> ClientPlaceTree:
        """The part of a tree that is of this rank's group: all, unless others are apart."""
        return tree if self.group_ranks is None else tree.group_of(self.group_ranks)

    @property
    def watched_store(self) -> Any:
        """The store, where the ranks that use it are watched."""
        return None if self.liveness is None else self.store

    def check(self) -> None:
        """Raise RankLost if a rank is lost."""
        if self.liveness is not None:
            self.liveness.check()


def agree_on_arguments(asked: AskedLoader, others: OtherRanks) -> None:
    """Compare what the ranks were given. A collective.

    Raises:
        RecipeError: An argument or the recipe differs from that of rank 0; names both values.
        RankLost: A rank failed before it came here.
    """
    topology, given = others.among(asked.tree).topology, asdict(asked.options)
    given |= asdict(given.pop("stream"))
    for name in ("worker_ignores", *OWN_OPTIONS):  # no other rank sees a difference
        del given[name]
    facts = _facts(asked.part, asked.tree, asked.folder, **given, loaders=repr(asked.means))
    agree(others.store, rank=topology.rank, world_size=topology.world_size, facts=facts, check=others.check)


def run_name(recipe: object, folder: Path) -> str:
    """Equal on all ranks of a job: the recipe, and what the launcher calls the job."""
    path = Path(recipe) if isinstance(recipe, str | Path) else folder
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if job in ("", "none") and "MASTER_PORT" in os.environ:
        job = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ['MASTER_PORT']}"
    return f"{path.absolute()} {job or f'process {os.getpid()}'}"


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


def _facts(planned: Part, tree: ClientPlaceTree, folder: Path, **options: float | str | Path | None) -> dict[str, str]:
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
        "decoder": decoder_of(planned.sources, folder) or "no items",
        **facts_of_places(tree),
        **{name: str(value) for name, value in options.items()},
    }


def _resets(part: Part) -> str:
    """Settings that change position_ids and the loss, but no sample."""
    positions = "document" if resets_positions(part.packing) else "sample"
    return f"positions {positions}, reset_loss {part.packing.reset_loss}, reset_id {sources_with_resets(part.sources)}"


def check_topology(call: str, topology: object) -> None:
    """Raise OptionError if it is neither sizes nor a place tree."""
    if not isinstance(topology, Topology | ClientPlaceTree):
        raise OptionError(
            f"{call}: topology={topology!r} must be a torchmix.Topology, as "
            "torchmix.Topology.from_torchrun(tp=1, cp=1, pp=1), or a torchmix.ClientPlaceTree"
        )


def _check_patience(patience_s: float | None) -> None:
    if patience_s is None:
        return
    if type(patience_s) not in (int, float) or not SHORTEST_PATIENCE_S <= patience_s < math.inf:
        raise OptionError(
            f"build_loader: patience_s={patience_s!r} must be a number of seconds of at least {SHORTEST_PATIENCE_S:g}"
        )
