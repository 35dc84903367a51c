"""The steps of a run for a verb that plans: by its state, its history and its log of decisions.

In: the arguments of the verb, and the recipe with its catalog. Out: the fold of the run. Must hold: an edited run is
planned by the recipe that it had at each step; where that is not known, an error says so. Cost: reading small files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmix.catalog.store import Catalog
from torchmix.cli.run.decisions import decisions_of
from torchmix.parallel.layout import Layout
from torchmix.planner.planner import ONE_RANK
from torchmix.recipe.parts import Part
from torchmix.steps.history.run_fold import RunFold, Segment
from torchmix.steps.history.segments import segments_of_recipe, segments_of_state
from torchmix.steps.state import LoaderState, check_catalog, decode_state


def add_state(parser: argparse._ActionsContainer, what: str) -> None:
    """Declare --state; `what` it is for."""
    parser.add_argument("--state", type=Path, metavar="FILE", help=f"bytes of a state: {what}")


def state_of(arguments: argparse.Namespace, part: Part, catalog: Catalog) -> LoaderState | None:
    """The state that was named.

    Raises:
        StateError: It is no state of this recipe and catalog.
        OSError: The file cannot be read.
    """
    if arguments.state is None:
        return None
    state = decode_state(arguments.state.read_bytes(), recipe=part)
    if not state.edited_from:
        check_catalog(state, catalog.fingerprint)
    return state


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
