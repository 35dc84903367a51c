"""The steps of a run for a verb that plans: by its state, its history and its log of decisions.

In: the arguments of the verb, and the recipe with its catalog. Out: the fold of the run. Must hold: an edited run is
planned by the recipe that it had at each step; where that is not known, an error says so. An edit that is not made yet
is planned as a loader would go on with it, and nothing is written. Cost: reading small files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from torchmix.catalog.store import Catalog
from torchmix.cli.run.decisions import decisions_of
from torchmix.errors import OptionError
from torchmix.parallel.layout import Layout
from torchmix.planner.forecast.figures import SIMULATED_STEPS, Forecast
from torchmix.planner.forecast.run_ahead import forecast
from torchmix.planner.forecast.simulation import patient
from torchmix.planner.planner import ONE_RANK, open_planner
from torchmix.recipe.parts import Part
from torchmix.steps.edits.word import row_facts, state_for
from torchmix.steps.history.run_fold import RunFold, Segment
from torchmix.steps.history.segments import segments_of_recipe, segments_of_state
from torchmix.steps.history.start import start_cursor
from torchmix.steps.state import LoaderState, check_catalog


def add_state(parser: argparse._ActionsContainer, what: str) -> None:
    """Declare --state, `what` it is for, and --accept-edit."""
    parser.add_argument("--state", type=Path, metavar="FILE", help=f"bytes of a state: {what}")
    parser.add_argument(
        "--accept-edit",
        metavar="WORD",
        help="with --state: plan as if a loader went on from it with the edit that this word accepts",
    )


def state_of(arguments: argparse.Namespace, part: Part, catalog: Catalog) -> LoaderState | None:
    """The state that was named, as a loader goes on from it; one from inside a step is that of the step's start.

    Raises:
        StateError: It is no state of this recipe and catalog; where that is an edit, the message has its word.
        OptionError: `--accept-edit` without a state.
        OSError: The file cannot be read.
    """
    if arguments.state is None:
        if arguments.accept_edit is not None:
            raise OptionError("--accept-edit goes with --state FILE: an edit begins at a state of the run")
        return None
    state = state_for(
        arguments.state.read_bytes(),
        part,
        rows=row_facts(part, catalog),
        from_step_start=True,
        accept_edit=arguments.accept_edit,
    )
    if not state.edited_from:
        check_catalog(state, catalog.fingerprint)
    return state


def forecast_of_run(
    part: Part,
    catalog: Catalog,
    num_steps: int,
    *,
    state: LoaderState | None = None,
    layout: Layout = ONE_RANK,
    simulated_steps: int = SIMULATED_STEPS,
    progress: Callable[[], object] = lambda: None,
) -> Forecast:
    """What each source gives in N steps: from the run's beginning, or from where a state stands.

    Args:
        part: Of the recipe.
        catalog: Of the part.
        num_steps: N.
        state: Of the run, maybe with an edit accepted.
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
    layout: Layout = ONE_RANK,
    state: LoaderState | None = None,
    first: int = 0,
) -> RunFold:
    """The fold of the run, standing at or before a step.

    Args:
        arguments: With --decisions.
        part: Of the recipe.
        catalog: Of the part.
        directory: The recipe's folder.
        layout: What samples are placed on.
        state: Of the run.
        first: The first step that is wanted.

    Raises:
        HistoryMissing: Steps before the state or an edit are wanted, and the history of the run is not whole.
    """
    decisions = decisions_of(arguments, part, directory=directory, state=state)
    present = Segment(part=part, catalog=catalog)
    if part.name != "train" or part.one_pass:
        segments = [present]
        if state is not None and state.streams:
            last = Segment(part=part, catalog=catalog, state=state)
            segments = [last] if state.step <= first else [present, last]
    elif state is None:
        segments = segments_of_recipe(catalog.directory, present, decisions=decisions)
    elif state.streams and state.step <= first:
        segments = [Segment(part=part, catalog=catalog, state=state)]
    else:
        segments = segments_of_state(catalog.directory, present, state, decisions=decisions)
    return RunFold(segments, layout, decisions=decisions)
