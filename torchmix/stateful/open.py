"""build_loader: from a recipe and a topology to the loader of this rank.

Arguments that are wrong, or that differ between ranks, are refused before any data is read or any group is made; when a
rank fails after that, all others name it; a peer opens no data file. The first leader that holds the catalog's lock
builds a missing catalog, and the others wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace

from torchmix.errors import TopologyError
from torchmix.native.load import native
from torchmix.parallel.agreement import announcing_failures
from torchmix.parallel.fan_out import FanOut, open_fan_out
from torchmix.parallel.liveness.evidence import patience_of
from torchmix.parallel.liveness.open import open_liveness
from torchmix.parallel.place_tree import ClientPlaceTree, Layout
from torchmix.parallel.topology import Topology
from torchmix.recipe.structs import Loaders, Recipe
from torchmix.service.open_job import JobUse
from torchmix.stateful.arguments import (
    AskedLoader,
    LoaderOptions,
    OtherRanks,
    agree_on_arguments,
    check_apart,
    check_topology,
    places_of,
    read_and_check,
    run_name,
)
from torchmix.stateful.leader import stream_of_leader
from torchmix.stateful.loader import StatefulDataLoader
from torchmix.stateful.reports import Reports, open_reports
from torchmix.stateful.serve import Reshard, Seating, SharedParts
from torchmix.stateful.shared_loaders import job_loaders
from torchmix.steps.local_steps import HeldReader
from torchmix.steps.replica_steps import StreamOptions
from torchmix.steps.worker.early import start_for_node
from torchmix.steps.worker.keeper import options_of, taking_what_waits

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
    elastic: bool = False,
    decisions: str | Path | None = None,
    replay: str | Path | None = None,
    accept_edit: str | None = None,
    fan_out: FanOut | None = None,
) -> StatefulDataLoader:
    """The loader of this rank. Every rank of the job calls this with equal values; close the loader, or use `with`.

    Args:
        recipe: A YAML file, a `Recipe` built in Python, or a mapping with the keys of a file.
        topology: Parallel sizes and this rank; None takes them from torchrun's environment with tp = cp = pp = 1.
            Pass a `ClientPlaceTree` for leaders or roles that differ from the default.
        micro_batch_size: Samples of a microbatch; micro_batch_size x dp must divide the recipe's samples, unless the
            loader is `elastic`.
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
        elastic: Ranks may come and go: a lost rank raises RankLost where it is asked for data, and ends no process;
            `reshard` takes a state to go on from among other ranks. Where the samples do not divide, samples without
            tokens and loss fill the last microbatch of a step. Loaders that are open together are elastic, or none is.
        decisions: Replay: folder or file of the log of an earlier run, relative to the recipe's folder. Its decisions
            hold, and the recipe's policy is not asked.
        replay: Folder that `torchmix plan --out` wrote, relative to the recipe's folder. Its steps are given without
            being planned, placed for this layout; behind the last one steps are planned.
        accept_edit: The code of an edit of the recipe that `load_state_dict` accepts where it is given none itself, for
            trainers that load states on their own. States of the recipe as it is load as ever.
        fan_out: An exchange with the other ranks that the caller has made, such as `torchmix.parallel.local_world`
            for a whole job in one process, or `torchmix.parallel.apart` where other replicas share no
            torch.distributed with this one.

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
        stream=StreamOptions(
            look_ahead=look_ahead, max_steps=max_steps, start_step=start_step, padded_vocab_size=padded_vocab_size
        ),
        micro_batch_size=micro_batch_size,
        part=part,
        one_pass=one_pass,
        patience_s=patience_s,
        worker_ignores=worker_ignores,
        elastic=elastic,
        decisions=decisions,
        replay=replay,
        accept_edit=accept_edit,
    )
    job_size = _job_size()
    store = _store_of_job(job_size) if _is_joined(topology, fan_out) else None
    with announcing_failures(store, rank=_rank()):
        native()
        asked = read_and_check(
            recipe, options, topology=topology, job_size=job_size, loaders=loaders, directory=directory
        )
        check_exchange("build_loader", asked.tree, fan_out)
    run = run_name(recipe, asked.folder)
    return StatefulDataLoader(open_places(asked, fan_out, HeldReader(), run=run))


def open_places(asked: AskedLoader, fan_out: FanOut | None, held: HeldReader, *, run: str) -> Seating:
    """This rank's place among the ranks of `asked`, with all that watches them and reads for them. A collective.

    Args:
        asked: What this rank was asked for.
        fan_out: The exchange with the other ranks, where the caller has made it.
        held: What this process has read before.
        run: From `run_name`.
    """
    group_ranks = fan_out.group_ranks if fan_out is not None and fan_out.is_apart else None
    store = _store_of_job(_job_size()) if _is_joined(asked.tree, fan_out) else None
    with announcing_failures(store, rank=_rank()):
        if group_ranks is not None:
            check_apart(asked.part, elastic=asked.options.elastic)
        has_exchange = fan_out is not None and not fan_out.is_to_open
        others = watch_others(asked, store, group_ranks=group_ranks, has_exchange=has_exchange)
    started: JobUse | None = None
    try:
        if others.liveness is not None:
            agree_on_arguments(asked, others)
            fan_out = open_fan_out(asked.tree, group_ranks=group_ranks, pin=torch.cuda.is_available())
        reports = reports_of(asked, others, fan_out)
        started = job_loaders(
            asked.means,
            asked.whole,
            asked.folder,
            others.among(asked.tree),
            store=others.watched_store,
            ignored_signals=asked.options.worker_ignores,
            check=others.check,
        )
        shared = SharedParts(
            part=asked.part,
            directory=asked.folder,
            options=asked.options.stream,
            stream_of_leader=partial(stream_of_leader, asked, others, started),
            store=store,
            liveness=others.liveness,
            started=started,
            reports=reports,
            accept_edit=asked.options.accept_edit,
            among_others=partial(among_others, asked, run) if asked.options.elastic else None,
            run=run,
        )
        return shared.seat(asked.tree, asked.layout, fan_out, held)
    except BaseException as error:
        if others.liveness is not None:
            others.liveness.post_abort(error)
        if started is not None:
            started.leave()
        raise


@taking_what_waits()
def among_others(
    asked: AskedLoader, run: str, wanted: Reshard, leave: Callable[[ClientPlaceTree, Layout], HeldReader]
) -> Seating:
    """This rank's place among other ranks, in the same process; see `AmongOthers`."""
    store = _store_of_job(_job_size()) if _is_joined(wanted.topology, wanted.fan_out) else None
    with announcing_failures(store, rank=_rank()):
        check_topology("reshard", wanted.topology)
        tree, layout = places_of(wanted.topology, wanted.micro_batch_size, asked.part, elastic=True)
        check_exchange("reshard", tree, wanted.fan_out)
        held = leave(tree, layout)
    return open_places(replace(asked, tree=tree, layout=layout), wanted.fan_out, held, run=run)


def check_exchange(call: str, tree: ClientPlaceTree, fan_out: FanOut | None) -> None:
    """Raise TopologyError for an exchange of other ranks: each would get samples of others, too, and no error."""
    if fan_out is not None and fan_out.tree.topology != tree.topology:
        own, other = tree.topology, fan_out.tree.topology
        raise TopologyError(
            f"{call}: the topology has this as rank {own.rank} of {own.world_size}, fan_out as rank {other.rank} of "
            f"{other.world_size}; make fan_out of the topology that you pass, and pass both"
        )


def watch_others(asked: AskedLoader, store: Any, *, group_ranks: int | None, has_exchange: bool) -> OtherRanks:
    """Begin to watch the other ranks, so that they name a rank that fails from here on. A collective.

    The worker of the node starts first: its imports take longer than all that is between here and its first message.

    Args:
        asked: What this rank was asked for.
        store: The job's; None: there is no other rank.
        group_ranks: As in `OtherRanks`.
        has_exchange: Nobody is to be watched: the caller has made the exchange with the other ranks, who are in this
            process, or there is none.
    """
    tree = OtherRanks(group_ranks=group_ranks).among(asked.tree)
    if asked.means.where != "in_process" and not has_exchange:
        start_for_node(tree, options_of(asked.means, asked.options.worker_ignores))
    job_size = _job_size() or 1
    if job_size > 1 and asked.tree.topology.world_size == 1:
        text = "of %s ranks, this one opens a loader for itself alone, which gives it all samples"
        logger.warning(text, job_size)
    liveness = None
    if not has_exchange and tree.topology.world_size > 1:
        liveness = open_liveness(tree, patience=patience_of(asked.options.patience_s), is_elastic=asked.options.elastic)
    return OtherRanks(store=store, liveness=liveness, group_ranks=group_ranks)


def reports_of(asked: AskedLoader, others: OtherRanks, fan_out: FanOut | None) -> Reports | None:
    """This rank's end of the losses that go to the policy, if one is asked. A collective."""
    if asked.log_folder is None:
        return None
    return open_reports(
        asked.part, asked.tree, asked.log_folder, base=asked.folder, fan_out=fan_out, store=others.store
    )


def _job_size() -> int | None:
    """The ranks of torch.distributed; None where it does not run here."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


def _store_of_job(job_size: int | None) -> Any:
    """The store of a job of several ranks."""
    return None if job_size in (None, 1) else dist.distributed_c10d._get_default_store()


def _rank() -> int:
    return 0 if _job_size() is None else dist.get_rank()


def _is_joined(topology: object, fan_out: FanOut | None) -> bool:
    """Whether this rank has others in torch.distributed that open their loaders with it."""
    if fan_out is not None:
        return fan_out.is_to_open
    sizes = topology.topology if isinstance(topology, ClientPlaceTree) else topology
    return not (isinstance(sizes, Topology) and sizes.world_size == 1)
