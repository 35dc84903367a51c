"""The steps of a run, planned one after another, each by the recipe that the run had then.

They are the steps that the run was given, since the planner of the run makes them, and an edit goes the road that it
goes in a loader. Cost: planning of every step from the first segment on, and opening the catalog of each segment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from torchmix.catalog.store import Catalog
from torchmix.errors import HistoryMissing
from torchmix.parallel.place_tree import Layout
from torchmix.planner.cursor import Cursor, DecisionRecords
from torchmix.planner.entering import check_bad_tokens, check_step, entered
from torchmix.planner.graph.dgraph import DrawnStep
from torchmix.planner.pack import Packed
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner, open_planner
from torchmix.recipe.parts import Part
from torchmix.steps.state import LoaderState, check_catalog

logger = logging.getLogger(__name__)


class Segment(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Steps of a run that one recipe made."""

    part: Part
    catalog: Catalog
    """The catalog of that time."""
    state: LoaderState | None = None
    """The accepted state at which the recipe took hold; None at the run's beginning."""

    @property
    def step(self) -> int:
        """Its first step."""
        return 0 if self.state is None else self.state.step


class RunFold:
    """Where planning stands, and the planner that is next."""

    def __init__(
        self, segments: Sequence[Segment], layout: Layout | None = None, *, decisions: DecisionRecords | None = None
    ) -> None:
        """Begin at the first segment.

        Args:
            segments: One or more, by ascending step.
            layout: What samples are placed on.
            decisions: The log of the run's policy, where it has one.

        Raises:
            StateError: The first segment's state does not fit its catalog.
        """
        self._layout, self._decisions = layout, decisions
        self.segments = tuple(segments)
        """All of them."""
        self._coming = list(segments)[::-1]
        self.planner: Planner
        """The planner of the step at the cursor."""
        self.cursor: Cursor
        """Before the next step."""
        self.segment: Segment
        """The recipe and the catalog of the planner."""
        self._open(self._coming.pop())

    @property
    def edits(self) -> tuple[int, ...]:
        """The steps, after the first one of the fold, at which an edit took hold."""
        return tuple(one.step for one in self.segments[1:] if one.state is not None and one.state.edited_from)

    def planners(self) -> list[Planner]:
        """A planner of each segment, in order."""
        now = len(self.segments) - 1 - len(self._coming)
        return [
            self.planner if number == now else open_planner(one.part, one.catalog, self._layout)
            for number, one in enumerate(self.segments)
        ]

    def before(self) -> Cursor:
        """The cursor that the next step is planned at, of the recipe that makes it."""
        self._turn()
        return self.cursor

    def plan(self) -> StepPlan:
        """The next step, placed; errors as `Planner.step`."""
        self._turn()
        plan, self.cursor = self.planner.step(self.cursor)
        return plan

    def draw(self) -> DrawnStep:
        """The next step, packed and not placed, for `planner.placed`; errors as `Planner.step`."""
        self._turn()
        drawn, self.cursor = self.planner.drawn(self.cursor)
        return drawn

    def pack(self) -> Packed:
        """The samples of the next step, not placed; errors as `Planner.step`."""
        self._turn()
        packed, _, _, self.cursor = self.planner.fold(self.cursor)
        return packed

    def skip_to(self, step: int, *, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Pass over the steps before one; False where `is_stopped` ended it."""
        while self.cursor.step < step:
            if is_stopped():
                return False
            self.pack()
        self._turn()
        return True

    def _turn(self) -> None:
        """Go over to the segment that begins at the cursor, if one does."""
        while self._coming and self._coming[-1].step == self.cursor.step:
            segment = self._coming.pop()
            assert segment.state is not None, "only a run's first segment begins without a state"
            found, wanted = self.cursor.order_digest.hex(), segment.state.order_digest.hex()
            if found != wanted:
                raise HistoryMissing(
                    f"the recipes that are known of the steps before step {segment.step} give other steps than the "
                    f"run had (digest {found}, the run's is {wanted}): "
                    f"the history in the catalog's folder was removed, or is of another run. Bring it back, or look at "
                    f"steps from {segment.step} on with a state from there"
                )
            self._open(segment)

    def _open(self, segment: Segment) -> None:
        decisions = None if segment.part.dynamic is None else self._decisions
        self.segment = segment
        self.planner = open_planner(segment.part, segment.catalog, self._layout, decisions=decisions)
        if segment.state is None:
            self.cursor = self.planner.start()
            return
        cursor = cursor_of_state(segment.state, self.planner, catalog=segment.catalog.fingerprint)
        assert cursor is not None, "nothing stops it"
        self.cursor = cursor


def cursor_of_state(
    state: LoaderState, planner: Planner, *, catalog: str, is_stopped: Callable[[], bool] = lambda: False
) -> Cursor | None:
    """The cursor to plan `state.step` from; None if `is_stopped` ended the planning of the steps before it.

    Args:
        state: The state of the planner's recipe; one that names a step alone is of a run without edits.
        planner: The planner of the recipe and the catalog in use.
        catalog: Fingerprint of that catalog.
        is_stopped: Asked before each step.

    Raises:
        StateMismatch, StateError: As `planner.entering.entered`; or the state belongs to another catalog.
        SourceExhausted: The state names a step alone, and there is no data left for it.
    """
    if state.is_planned:
        if not state.edited_from:
            check_catalog(state, catalog)
        cursor = entered(state.at, state.rows, planner, is_edited=bool(state.edited_from))
        bad_tokens = {name: tokens for name, tokens in state.bad_tokens.items() if name in planner.sources}
        check_bad_tokens(bad_tokens, state.step, planner)
        return cursor
    check_step(state.step)
    cursor = planner.start()
    if state.step:
        logger.info("planning %d steps, to begin at step %d", state.step, state.step)
    while cursor.step < state.step:
        if is_stopped():
            return None
        cursor = planner.skip(cursor)
    return cursor
