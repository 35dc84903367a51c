"""Files of a plan -> plans of its steps, placed for any layout.

In: a folder that `torchmix plan --out` wrote, and the planner of a loader. Out: what `Planner.step` returns, without
drawing or packing. Must hold: a replayed step is the one that was planned, bit by bit: its pieces are hashed to the
order digest that was written; damage is an error before a step is given. Cost: one row group is decoded at a time, and
held; placing as in a planned run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import PlanFilesError, StateError, StateMismatch
from torchmix.planner.cursor import Cursor
from torchmix.planner.graph.drawn_step import TokensOfStep
from torchmix.planner.pack import Packed
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.steps.cursor_bounds import pieces_of_columns
from torchmix.steps.cursor_state import cursor_of_state, recorded_cursor
from torchmix.steps.replay.manifest import PlanManifest, check_plan_of, placement_key, read_manifest
from torchmix.steps.state import LoaderState, check_catalog, decode_state


class RecordedPlan:
    """The steps of a plan on disk; `step` stands in the place of `Planner.step`."""

    def __init__(self, folder: Path, planner: Planner, catalog: str) -> None:
        """Open the files.

        Args:
            folder: Where they lie.
            planner: Of the loader; it places, and goes on behind the last step.
            catalog: Fingerprint of its catalog.

        Raises:
            PlanFilesError: There is no plan, it is damaged, or of another part, recipe or catalog.
        """
        self._folder, self._planner, self._catalog = folder, planner, catalog
        self.manifest: PlanManifest = read_manifest(folder)
        check_plan_of(self.manifest, planner.part, catalog, folder=folder)
        if self.manifest.denied != planner.denied_fingerprint:
            raise PlanFilesError(
                f"the plan in {folder} is of other denied documents ({self.manifest.denied or 'none'}) than "
                f"there are now ({planner.denied_fingerprint or 'none'}); plan again with --out"
            )
        self._pieces, self._steps, self._states = (
            _RowsOfSteps(folder / name) for name in ("pieces.parquet", "steps.parquet", "states.parquet")
        )
        layout = planner.layout
        here = (layout.dp, layout.micro_batch_size, placement_key(planner.part, layout))
        there = self.manifest.dp, self.manifest.micro_batch_size, self.manifest.placement
        self._is_same_layout = here == there

    def close(self) -> None:
        """Close the files."""
        for file in (self._pieces, self._steps, self._states):
            file.close()

    def has(self, step: int) -> bool:
        """Whether a step is on disk."""
        return self.manifest.first_step <= step < self.manifest.stop_step

    def cursor(self, step: int) -> Cursor:
        """The cursor before a step, up to the one behind the last.

        Raises:
            PlanFilesError: The file is damaged.
        """
        columns, rows = self._states.of_step(step)
        if rows.stop - rows.start != 1:
            raise self._damaged(step, f"states.parquet has {rows.stop - rows.start} states")
        try:
            state = decode_state(columns["state"][rows.start], recipe=self._planner.part)
            names = [stream.name for stream in state.streams]
            if state.step != step or names != list(self._planner.streams):
                raise StateError(f"a state of step {state.step} and streams {names}")
            return recorded_cursor(state, self._planner)
        except StateError as error:
            raise self._damaged(step, str(error)) from error

    def cursor_of_state(self, state: LoaderState, *, is_stopped: Callable[[], bool] = lambda: False) -> Cursor | None:
        """The cursor to go on from; as `steps.cursor_state.cursor_of_state`, without planning steps that are on disk.

        Raises:
            StateMismatch: The state is of another run than the plan.
            PlanFilesError: The state lies before the first step of the plan.
        """
        about, step = self.manifest, state.step
        if step < about.first_step:
            raise PlanFilesError(
                f"the plan in {self._folder} begins at step {about.first_step}, and the loader is at step {step}; plan "
                f"from --start {step} on, or begin with start_step={about.first_step}"
            )
        if step > about.stop_step and state.streams:
            return cursor_of_state(state, self._planner, catalog=self._catalog, is_stopped=is_stopped)
        check_catalog(state, self._catalog)
        cursor = self.cursor(min(step, about.stop_step))
        if state.streams and state.order_digest != cursor.order_digest:
            raise StateMismatch(
                f"the state before step {step} has order digest {state.order_digest.hex()}, the plan in {self._folder} "
                f"{cursor.order_digest.hex()}: they are of different runs; load a state of the planned run, or build "
                f"the loader without replay"
            )
        while cursor.step < step:
            if is_stopped():
                return None
            cursor = self._planner.skip(cursor)
        return cursor

    def step(self, cursor: Cursor) -> tuple[StepPlan, Cursor]:
        """The plan of the step at a cursor, and the next cursor.

        Raises:
            PlanFilesError: What is on disk is not what was planned.
        """
        planner, step = self._planner, cursor.step
        planner.cut_for(step)
        after = self.cursor(step + 1)
        columns, rows = self._pieces.of_step(step)
        of = {name: column[rows] for name, column in columns.items()}
        try:
            pieces = pieces_of_columns(
                planner,
                stream=_numbers(of["stream"], planner.streams),
                source=_numbers(of["source"], planner.sources),
                **{name: of[name] for name in ("row", "epoch", "start", "tokens", "drawn_step")},
            )
        except (StateError, ValueError) as error:
            raise self._damaged(step, "a piece is of no stream, source or row that there is") from error
        packed = Packed(
            pieces=pieces,
            sample=of["sample"],
            slot=of["slot"],
            sample_offset=of["sample_offset"],
            pool=after.pool,
        )
        digest = planner.order_digest_of(cursor.order_digest, step, packed)
        if digest != after.order_digest:
            raise self._damaged(
                step, f"its pieces have order digest {digest.hex()}, not {after.order_digest.hex()} as planned"
            )
        said = self._sums_of_step(step)
        plan = planner.placed(planner.drawn_step(cursor, packed, said.tokens, digest))
        if self._is_same_layout and said.plan_digest != plan.plan_digest.hex():
            raise self._damaged(
                step, f"its placement has digest {plan.plan_digest.hex()}, not {said.plan_digest} as planned"
            )
        return plan, after

    def _sums_of_step(self, step: int) -> _SumsOfStep:
        columns, rows = self._steps.of_step(step)
        if columns["stream"][rows].tolist() != list(self._planner.streams):
            raise self._damaged(step, "steps.parquet has other streams")
        asked, drawn, pool = (columns[f"{name}_tokens"][rows] for name in ("asked", "drawn", "pool"))
        return _SumsOfStep(TokensOfStep(asked=asked, drawn=drawn, pool=pool), str(columns["plan_digest"][rows.start]))

    def _damaged(self, step: int, why: str) -> PlanFilesError:
        return PlanFilesError(f"step {step} of the plan in {self._folder} is damaged: {why}; plan again with --out")


class _SumsOfStep(NamedTuple):
    tokens: TokensOfStep
    plan_digest: str


def _numbers(names: NDArray[Any], known: tuple[str, ...]) -> Int64Array:
    """The place of each name among the known ones.

    Raises:
        ValueError: A name is not among them.
    """
    found, which = np.unique(names, return_inverse=True)
    return np.array([known.index(name) for name in found.tolist()], np.int64)[which.reshape(-1)]


class _RowsOfSteps:
    """A Parquet file whose rows go by `step`, all of a step in one row group."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
            about = self._file.metadata
            of_groups = [about.row_group(g).column(0).statistics for g in range(about.num_row_groups)]
            self._last = np.array([each.max for each in of_groups], np.int64)
        except (OSError, pa.ArrowException, AttributeError) as error:
            raise PlanFilesError(f"{path} is damaged: {error}; plan again with --out") from error
        self._held: tuple[int, dict[str, NDArray[Any]]] | None = None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def of_step(self, step: int) -> tuple[dict[str, NDArray[Any]], slice]:
        """The columns of the row group that holds a step, and the rows of the step in it."""
        group = min(int(np.searchsorted(self._last, step)), len(self._last) - 1)
        if self._held is None or self._held[0] != group:
            self._held = group, self._columns(group)
        columns = self._held[1]
        start, stop = np.searchsorted(columns["step"], [step, step + 1]).tolist()
        return columns, slice(start, stop)

    def _columns(self, group: int) -> dict[str, NDArray[Any]]:
        try:
            table = self._file.read_row_group(group)
        except (OSError, pa.ArrowException) as error:
            raise PlanFilesError(f"{self._path} is damaged: {error}; plan again with --out") from error
        return {name: table[name].combine_chunks().to_numpy(zero_copy_only=False) for name in table.column_names}


def open_recorded_plan(folder: str, planner: Planner, catalog: str) -> RecordedPlan | None:
    """The plan in a folder; None where no folder is named."""
    return RecordedPlan(Path(folder), planner, catalog) if folder else None
