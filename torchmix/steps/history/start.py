"""The cursor that a run goes on from: of a state, or of a step's number, which its history makes a cursor.

In: a state, and the planner that is to go on. Out: the cursor. Must hold: a step alone is planned from the recipe's own
beginning in the run, so that what the run had before an edit is not planned by the recipe of after it. Cost: none for a
whole state; else the planning of the steps since the recipe took hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from torchmix.catalog.store import Catalog
from torchmix.errors import HistoryMissing
from torchmix.planner.cursor import Cursor
from torchmix.planner.planner import Planner
from torchmix.steps.cursor_state import cursor_of_state
from torchmix.steps.history.run_fold import RunFold, Segment
from torchmix.steps.history.segments import segments_of_recipe
from torchmix.steps.state import LoaderState

logger = logging.getLogger(__name__)


def start_cursor(
    state: LoaderState,
    planner: Planner,
    *,
    catalog: Catalog,
    catalog_folder: Path,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Cursor | None:
    """The cursor to plan `state.step` from; None if `is_stopped` ended the planning of the steps before it.

    Raises:
        HistoryMissing: The state names a step alone, which lies before the edit that this recipe came with, or several
            runs have had the recipe.
        StateError, SourceExhausted: As `cursor_of_state`.
    """
    part = planner.part
    if not state.streams and state.step and part.name == "train" and not part.one_pass:
        [last] = segments_of_recipe(catalog_folder, Segment(part=part, catalog=catalog), whole=False)
        if last.step > state.step:
            raise HistoryMissing(
                f"the run has had this recipe since step {last.step}, and was to begin at step {state.step} with it; "
                f"begin with the recipe of that step, or load a state of that step with accept_edit"
            )
        if last.state is not None:
            logger.info("planning steps %d to %d, since the edit at the first of them", last.step, state.step)
            fold = RunFold([last], planner.layout)
            return fold.cursor if fold.skip_to(state.step, is_stopped=is_stopped) else None
    return cursor_of_state(state, planner, catalog=catalog.fingerprint, is_stopped=is_stopped)
