"""The options by which a verb knows a run: its layout, its log of decisions, its state and history."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchmix.catalog.in_store import fetch_catalog
from torchmix.catalog.store import Catalog, open_part
from torchmix.cli.terminal import at_least
from torchmix.errors import OptionError, TopologyError
from torchmix.mixture.policies import RecordsOfFunction, function_of_step
from torchmix.parallel.place_tree import Layout
from torchmix.planner.contexts import least_layout
from torchmix.planner.drawing import SharesOfStep
from torchmix.planner.forecast import SIMULATED_STEPS, Forecast, forecast, patient
from torchmix.planner.planner import open_planner
from torchmix.recipe.changes import dynamic_of
from torchmix.recipe.load import load_recipe, recipe_directory
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.structs import Recipe
from torchmix.service.scale.partition import LoaderBudget
from torchmix.steps.decisions import EndedLog, opened_log
from torchmix.steps.edits import row_facts, state_for
from torchmix.steps.history import RunFold, Segment, segments_of_recipe, segments_of_state
from torchmix.steps.memory_budget import loader_budget
from torchmix.steps.replica_steps import start_cursor
from torchmix.steps.state import LoaderState, read_state

# --- A recipe that a verb was given, with its catalog.


class OpenedRecipe(NamedTuple):
    """A recipe, one of its parts, and what is indexed of that."""

    recipe: Recipe
    directory: Path
    """Its folder."""
    part: Part
    catalog: Catalog


def open_recipe(
    path: Path, part: str = "train", *, one_pass: bool = False, alter: Callable[[Part], Part] = lambda part: part
) -> OpenedRecipe:
    """Read a recipe and open its catalog, also one that lies in a store.

    Args:
        path: Its file.
        part: The name of the part.
        one_pass: See `part_of`.
        alter: Makes of the part what is planned, before anything is opened.

    Raises:
        RecipeError: The recipe is wrong, or has no such part.
        CatalogError: It is not indexed, or for something else.
    """
    recipe, directory = load_recipe(path), recipe_directory(path)
    planned = alter(part_of(recipe, part, one_pass=one_pass))
    return OpenedRecipe(recipe, directory, planned, open_part(fetch_catalog(directory, recipe.catalog), planned))


# --- What the loaders of a recipe may take: its `loaders.cpu` and `loaders.memory`, less what the node worker needs.
#
# Where the recipe says nothing, the budget is what this job may use of this machine. Cost: some small files of /proc
# and /sys.


def budget_of(recipe: Recipe, *, cpu: int | None = None, memory: str | None = None, nodes: int = 1) -> LoaderBudget:
    """What the loaders of a recipe may take, on so many nodes. With `where: ray` or `remote` they are on machines of
    their own, all of which is theirs; else a processor, and the memory of built steps of a whole global batch, are the
    node worker's.

    Raises:
        RecipeError: `memory` is no size.
    """
    given = recipe.loaders
    given = msgspec.structs.replace(given, cpu=cpu or given.cpu, memory=given.memory if memory is None else memory)
    return loader_budget(given, recipe.batch, nodes=nodes)


# --- The options that say how large a job is: `--dp` or `--world`, `--tp`, `--cp`, `--pp` and `--micro-batch-size`.
#
# What is given twice must agree.


def add_layout(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare the options."""
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--dp", type=at_least(1), metavar="D", help="data-parallel size (default 1)")
    sizes.add_argument("--world", type=at_least(1), metavar="N", help="all ranks of the job, in the place of --dp")
    for name, meaning in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        parser.add_argument(
            f"--{name}", type=at_least(1), default=1, metavar="N", help=f"{meaning}-parallel size (default 1)"
        )
    parser.add_argument(
        "--micro-batch-size", type=at_least(1), default=1, metavar="B", help="samples of a microbatch (default 1)"
    )
    parser.add_argument(
        "--elastic", action="store_true", help="masked samples fill the last microbatch where samples do not divide"
    )


def layout_of_arguments(arguments: argparse.Namespace, part: Part) -> Layout:
    """The grid that samples, and items of modules, are placed on.

    With `packing: {method: whole}` and without sizes it is the smallest one that holds the longest document.

    Raises:
        TopologyError: The ranks do not divide into replicas.
    """
    replica = arguments.tp * arguments.cp * arguments.pp
    dp = arguments.dp or 1
    if arguments.world is not None:
        dp, rest = divmod(arguments.world, replica)
        if rest or not dp:
            raise TopologyError(
                f"--world {arguments.world} does not divide by tp {arguments.tp} x cp {arguments.cp} x pp "
                f"{arguments.pp} = {replica} ranks of a replica"
            )
    if part.balance.context is not None and arguments.world is arguments.dp is None and arguments.cp == 1:
        layout = least_layout(part.balance, part.batch)
        return dataclasses.replace(
            layout, tp=arguments.tp, pp=arguments.pp, micro_batch_size=arguments.micro_batch_size
        )
    return Layout(
        dp=dp,
        micro_batch_size=arguments.micro_batch_size,
        tp=arguments.tp,
        cp=arguments.cp,
        pp=arguments.pp,
        broadcast_at=part.balance.broadcast_at,
        elastic=arguments.elastic,
    )


# --- The option `--decisions`: the log of a run whose recipe has a policy.
#
# Without it, steps are planned with the schedule's shares, and a warning says so. Cost: the log is read once.

logger = logging.getLogger(__name__)


def add_decisions(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        "--decisions", type=Path, metavar="DIR", help="log of the recipe's policy: plan the shares that it decided"
    )


def decisions_of(
    arguments: argparse.Namespace, part: Part, *, directory: Path | None, state: LoaderState | None
) -> EndedLog | RecordsOfFunction | None:
    """The log that was named, or the one that a state's run has written; a function of the step goes on behind it.

    Args:
        arguments: The arguments of the verb.
        part: The part of the recipe.
        directory: The recipe's folder.
        state: The state of the run.

    Raises:
        PlanError: There is no log at the place, or several that no other one continues.
        OptionError: One was named, and the part has no policy.
    """
    if arguments.decisions is not None:
        if part.dynamic is None:
            of_part = "" if part.name == "train" else f" of {part.name}"
            raise OptionError(f"--decisions gives what a policy has decided, and the recipe{of_part} has no `dynamic`")
        return opened_log(arguments.decisions)
    deciding = dynamic_of(part)
    if part.dynamic is None or deciding is None:
        return None
    log: EndedLog | None = None
    if directory is not None and state is not None and state.log_branch:
        log = opened_log(directory / part.dynamic.decisions / f"{state.log_branch}.jsonl")
    if function_of_step(part.dynamic) is not None:
        earlier = [] if log is None or state is None else log.records[: state.step]
        planned = SharesOfStep(part, dict.fromkeys(part.streams, 1)).in_group
        return RecordsOfFunction(part.dynamic, deciding, planned, earlier=earlier)
    if log is None:
        logger.warning("these are the schedule's shares; --decisions DIR plans those that the recipe's policy decided")
    return log


# --- The steps of a run for a verb that plans: by its state, its history and its log of decisions.
#
# An edited run is planned by the recipe that it had at each step; where that is not known, an error says so. An edit
# that is not made yet is planned as a loader would resume with it, and nothing is written. Cost: reading small files.


def add_simulated_steps(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare --steps of a verb that forecasts; `what` they are."""
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=SIMULATED_STEPS,
        metavar="N",
        help=f"{what} (default {SIMULATED_STEPS}); beyond {SIMULATED_STEPS} numbers are estimates",
    )


def add_state(parser: argparse._ActionsContainer, what: str, *, accepts_edit: bool = True) -> None:
    """Declare --state, `what` it is for, and --accept-edit, unless the verb itself looks at an edit."""
    parser.add_argument("--state", type=Path, metavar="FILE", help=f"bytes of a state: {what}")
    if not accepts_edit:
        return
    parser.add_argument(
        "--accept-edit",
        metavar="CODE",
        help="with --state: plan as if a loader resumed from it with the edit that this code accepts",
    )


def state_of(arguments: argparse.Namespace, part: Part, catalog: Catalog) -> LoaderState | None:
    """The state that was named, as a loader resumes from it; one from inside a step is that of the step's start.

    Raises:
        StateError: It is no state of this recipe and catalog; where that is an edit, the message has its code.
        OptionError: `--accept-edit` without a state.
        OSError: The file cannot be read.
    """
    if arguments.state is None:
        if arguments.accept_edit is not None:
            raise OptionError("--accept-edit goes with --state FILE: an edit begins at a state of the run")
        return None
    return state_for(
        read_state(arguments.state.read_bytes()),
        part,
        rows=row_facts(part, catalog),
        from_step_start=True,
        accept_edit=arguments.accept_edit,
    )


def forecast_of_run(
    part: Part,
    catalog: Catalog,
    num_steps: int,
    *,
    state: LoaderState | None = None,
    layout: Layout | None = None,
    simulated_steps: int = SIMULATED_STEPS,
    progress: Callable[[], object] = lambda: None,
) -> Forecast:
    """What each source gives in N steps: from the run's beginning, or from where a state stands.

    Args:
        part: The part of the recipe.
        catalog: The catalog of the part.
        num_steps: N.
        state: The state of the run, maybe with an edit accepted.
        layout: What samples, and items of modules, are placed on.
        simulated_steps, progress: As `forecast`.

    Raises:
        PlanError: What the planner refuses from the start: a source without tokens, a document too long.
        StateError: The state does not fit; the edit takes rows away that it may not.
    """
    planner = open_planner(patient(part), catalog, layout)
    cursor = None
    if state is not None:
        cursor = start_cursor(state, planner, catalog=catalog, catalog_folder=catalog.directory)
    return forecast(part, planner, num_steps, cursor=cursor, simulated_steps=simulated_steps, progress=progress)


def run_fold(
    arguments: argparse.Namespace,
    part: Part,
    catalog: Catalog,
    *,
    directory: Path,
    layout: Layout | None = None,
    state: LoaderState | None = None,
    first: int = 0,
) -> RunFold:
    """The fold of the run, standing at or before a step.

    Args:
        arguments: With --decisions.
        part: The part of the recipe.
        catalog: The catalog of the part.
        directory: The recipe's folder.
        layout: What samples are placed on.
        state: The state of the run.
        first: The first step that is wanted.

    Raises:
        HistoryMissing: Steps before the state or an edit are wanted, and the history of the run is not whole.
    """
    decisions = decisions_of(arguments, part, directory=directory, state=state)
    present = Segment(part=part, catalog=catalog)
    if part.name != "train" or part.one_pass:
        segments = [present]
        if state is not None and state.is_planned:
            last = Segment(part=part, catalog=catalog, state=state)
            segments = [last] if state.step <= first else [present, last]
    elif state is None:
        segments = segments_of_recipe(catalog.directory, present, decisions=decisions)
    elif state.is_planned and state.step <= first:
        segments = [Segment(part=part, catalog=catalog, state=state)]
    else:
        segments = segments_of_state(catalog.directory, present, state, decisions=decisions)
    return RunFold(segments, layout, decisions=decisions)
