"""The stream of a leader: catalog, settings, the bound of memory, the worker, and the history of the run."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from torchmix.catalog.store import Catalog, check_vocabulary
from torchmix.indexing.deny_lists import check_lists
from torchmix.indexing.scan import catalog_of_part
from torchmix.parallel.place_tree import ONE_PLACE, ClientPlaceTree, Layout, RankPlaces
from torchmix.planner.stream_order import check_rows_of_part
from torchmix.service.open_job import JobUse
from torchmix.stateful.arguments import AskedLoader, OtherRanks
from torchmix.stateful.shared_loaders import behind_node, remote_loaders, with_own_sources
from torchmix.stateful.stream import StepStream
from torchmix.steps.blocks import fixed_by_plan
from torchmix.steps.edits import row_facts
from torchmix.steps.history import RunHistory
from torchmix.steps.local_steps import HeldReader
from torchmix.steps.memory_budget import MemoryBudget, budget_of_node, ranks_here
from torchmix.steps.replay import check_plan_of, read_manifest
from torchmix.steps.replica_steps import StreamSettings
from torchmix.steps.worker.keeper import options_of
from torchmix.steps.worker.open_node import open_node


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
    budget = checked_memory(asked, others, tree, layout, catalog)
    settings = stream_settings(asked, others, started, tree, layout, catalog, budget)
    node = None
    if asked.means.where != "in_process":
        options = options_of(asked.means, asked.options.worker_ignores)
        node = open_node(others.among(tree), options, store=others.watched_store, check=others.check)
    return StepStream(
        settings,
        catalog=catalog if node is None else None,
        node=node,
        consumer=others.among(tree).topology.rank,
        held=held,
        rows=row_facts(asked.part, catalog),
        history=history_of(asked, tree),
    )


def checked_catalog(asked: AskedLoader) -> Catalog:
    """The catalog of the part, built if it is missing; it suits the part, the model and the plan to replay."""
    part, folder, options = asked.part, asked.folder, asked.options
    catalog = catalog_of_part(part, asked.whole, folder)
    rows = {name: source.num_documents for name, source in catalog.sources.items()}
    check_rows_of_part(asked.whole, options.part, rows)
    check_lists(folder, part.deny, catalog.directory, part.sources)
    check_vocabulary(asked.whole.vocab_size, catalog, padded_vocab_size=options.stream.padded_vocab_size)
    if options.replay is not None:
        plan = folder / options.replay
        check_plan_of(read_manifest(plan), part, catalog.fingerprint, folder=plan)
    return catalog


def stream_settings(
    asked: AskedLoader,
    others: OtherRanks,
    started: JobUse | None,
    tree: ClientPlaceTree,
    layout: Layout,
    catalog: Catalog,
    budget: MemoryBudget,
) -> StreamSettings:
    """What decides the steps of a replica and how they are read, as it also travels to the worker."""
    part, folder, options = asked.part, asked.folder, asked.options
    fleet = remote_loaders(asked.means, folder) if started is None else started.fleet
    num_nodes = 1 if started is None else started.num_nodes
    fleet = behind_node(fleet, asked.means, nodes=num_nodes, item_bytes=budget.item_bytes)
    return StreamSettings(
        part=part,
        base=str(folder),
        catalog_folder=str(asked.catalog_folder),
        cache_bytes=budget.cache_bytes,
        replica=tree.replica,
        leader=tree.topology.rank,
        layout=layout,
        options=options.stream,
        catalog=catalog.fingerprint,
        places=RankPlaces.of_tree(tree) if part.modules or part.balance.strategy else ONE_PLACE,
        without_text=tree.leaders_without_text,
        decisions=str(asked.log_folder or ""),
        replayed="" if options.decisions is None else str(folder / options.decisions),
        recorded="" if options.replay is None else str(folder / options.replay),
        fleet=with_own_sources(fleet, asked.means, part, asked.whole, folder, nodes=num_nodes),
        is_apart=others.group_ranks is not None,
    )


def checked_memory(
    asked: AskedLoader, others: OtherRanks, tree: ClientPlaceTree, layout: Layout, catalog: Catalog
) -> MemoryBudget:
    """What reading may take of this node.

    Raises:
        RecipeError: That is more than the recipe gives.
    """
    among = others.among(tree)
    unread: Collection[int] = among.leaders_without_text
    if any(module.axis == "WORLD" for module in asked.part.modules.values()):
        unread = ()  # these leaders have items
    unread = fixed_by_plan(asked.part, sorted(asked.part.sources), catalog, unread)
    budget = budget_of_node(
        asked.part,
        catalog,
        asked.whole.read,
        asked.means,
        here=ranks_here(among, is_job=others.liveness is not None, unread=unread),
        layout=layout,
        options=asked.options.stream,
    )
    budget.check()
    return budget


def history_of(asked: AskedLoader, tree: ClientPlaceTree) -> RunHistory | None:
    """The history of the run, which the first replica of a training run keeps; None on all others."""
    options = asked.options
    if options.part != "train" or tree.replica != 0 or options.one_pass or options.decisions is not None:
        return None
    return RunHistory(asked.catalog_folder, msgspec.to_builtins(asked.whole), asked.part)
