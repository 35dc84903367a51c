"""StepStream: one global step at a time, for one replica.

In: a recipe with its catalog, the replica's number, and a state to start from. Out: `StepTensors`, each with a header
that holds the state after it. Must hold: the same steps in whatever process or thread it runs. Cost: that of the
planner, the reader and `build`. They take turns in one thread, which is ahead of the trainer as a whole: a thread for
the planner would pass the interpreter's lock to and fro some hundred times a step, for a tenth more CPU in all.

It is a torch IterableDataset, so it runs in a worker process or in the caller's, and an object with
`state_dict`/`load_state_dict`, so that a plain torchdata loader can resume it as well.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from torchmix.catalog.store import Catalog, open_catalog
from torchmix.constructor.build import build, pieces_of_replica
from torchmix.constructor.fields import StepTensors
from torchmix.constructor.memory import StepMemory
from torchmix.errors import RecipeError, SourceExhausted, StateError
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Cursor, Planner, open_planner
from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.structs import Recipe
from torchmix.sources.reader import Reader
from torchmix.stateful.header import encode_header
from torchmix.stateful.state import (
    LoaderState,
    check_catalog,
    check_layout,
    cursor_of_state,
    decode_state,
    encode_state,
    start_state,
    state_of_cursor,
)
from torchmix.stateful.windows_ahead import WindowsAhead


class StopFlag(Protocol):
    """An event of `threading` or of `multiprocessing`."""

    def is_set(self) -> bool:
        """Whether to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """What a stream is made of; plain values, so that it can travel to a worker process."""

    recipe: Recipe
    directory: str
    """The recipe's directory: paths in the recipe are relative to it."""
    replica: int
    """Data-parallel rank, in [0, dp)."""
    dp: int
    micro_batch_size: int
    max_steps: int | None
    """The step before which the stream ends; counted from the run's beginning, not from a resume."""
    start_step: int = 0
    """The step at which the stream begins, if no state is loaded; a pass that has no such step gives nothing."""
    one_pass: bool = False
    """Whether the stream ends by itself, when all sources have run out."""
    catalog: str = ""
    """Fingerprint of the catalog, as it was when the loader was built; empty if it was not looked at."""


class StepStream(IterableDataset[StepTensors]):
    """The steps of one replica, endless unless `max_steps` says otherwise."""

    def __init__(self, settings: StreamSettings, *, catalog: Catalog | None = None) -> None:
        """Nothing is opened yet.

        Args:
            settings: What the steps follow from.
            catalog: The recipe's, where it is open already, for the first `iter()` if that is in this process.
        """
        super().__init__()
        self._settings = settings
        self._catalog = catalog
        self._fingerprint = recipe_fingerprint(settings.recipe)
        start = start_state(
            recipe=self._fingerprint,
            dp=settings.dp,
            micro_batch_size=settings.micro_batch_size,
            step=settings.start_step,
        )
        self._state = encode_state(start)
        self._running: Generator[StepTensors, None, None] | None = None
        self._stop: StopFlag | None = None

    def stop_when(self, flag: StopFlag) -> None:
        """End the next `iter()` early once the flag is set, if it is still planning the steps up to its first one.

        Args:
            flag: An event; of multiprocessing, if the steps are made in another process.
        """
        self._stop = flag

    def state_dict(self) -> dict[str, Any]:
        """The state at the boundary after the last step given, as bytes."""
        return {"torchmix_state": self._state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a boundary with the next `iter()`.

        Raises:
            StateError: Not a state, of another version, recipe or catalog, or inside a step of another layout.
        """
        data = state_bytes(state_dict)
        state = decode_state(data, recipe=self._fingerprint)
        check_layout(state, dp=self._settings.dp, micro_batch_size=self._settings.micro_batch_size)
        self.check_state(state)
        self._state = data

    def check_state(self, state: LoaderState) -> None:
        """Refuse a state of another catalog than the one that was there when the loader was built.

        Raises:
            StateMismatch: It is.
        """
        if self._settings.catalog:
            check_catalog(state, self._settings.catalog)

    def __iter__(self) -> Iterator[StepTensors]:
        """Steps from the state on, in this process.

        Raises:
            RecipeError: In one of several workers, each of which would give every step.
        """
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RecipeError(f"StepStream: num_workers={worker.num_workers} would give each step as often; use 0 or 1")
        self.close()
        self._running = self._steps()
        if worker is not None:
            # torch's worker leaves its dataset as it is; a thread that still asks a store when the interpreter ends
            # could take the process down with a signal.
            Finalize(None, self.close, exitpriority=1)
        return self._running

    def close(self) -> None:
        """End the running iterator, with its files and its threads. Not while another thread is in it."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _steps(self) -> Generator[StepTensors, None, None]:
        settings = self._settings
        recipe = settings.recipe
        catalog = self._catalog or open_catalog(recipe, Path(settings.directory))
        self._catalog = None
        planner = open_planner(
            recipe,
            catalog,
            dp=settings.dp,
            micro_batch_size=settings.micro_batch_size,
            one_pass=settings.one_pass,
        )
        state = decode_state(self._state, recipe=self._fingerprint)
        is_stopped = (lambda: False) if self._stop is None else self._stop.is_set
        try:
            cursor = cursor_of_state(state, planner, catalog=catalog.fingerprint, is_stopped=is_stopped)
        except SourceExhausted:
            if not settings.one_pass:
                raise
            cursor = None  # the pass ends before its first step, as one that is resumed at its end
        if cursor is None:
            return
        reader = Reader(
            catalog, Path(settings.directory), cache_bytes=parse_bytes(recipe.read.cache, where="read.cache")
        )
        windows = WindowsAhead(planner, reader)
        memory = StepMemory()
        first_microbatch = state.microbatch
        plans = _plans(planner, cursor, settings.max_steps, one_pass=settings.one_pass)
        try:
            for plan, next_cursor, plan_s in plans:
                step, read_s, build_s = self._build(plan, reader, memory)
                after = state_of_cursor(next_cursor, planner, recipe=self._fingerprint, catalog=catalog.fingerprint)
                self._state = encode_state(after)
                header = encode_header(
                    plan,
                    self._state,
                    first_microbatch=first_microbatch,
                    plan_s=plan_s,
                    read_s=read_s,
                    build_s=build_s,
                    reading=reader.stats(),
                )
                yield replace(step, header=header)
                first_microbatch = 0
                windows.follow(next_cursor)
        finally:
            reader.close()

    def _build(self, plan: StepPlan, reader: Reader, memory: StepMemory) -> tuple[StepTensors, float, float]:
        """The replica's tensors of a step, and the seconds that reading and filling them took."""
        batch = self._settings.recipe.batch
        began = time.perf_counter()
        pieces = pieces_of_replica(plan, self._settings.replica)
        tokens = reader.read(
            pieces.source,
            pieces.row,
            pieces.start,
            pieces.tokens,
            places=pieces.places(batch.length),
            num_places=pieces.num_samples * batch.length,
        )
        read = time.perf_counter()
        step = build(
            pieces,
            tokens.values,
            tokens.successors,
            length=batch.length,
            packing=self._settings.recipe.packing,
            memory=memory,
        )
        return step, read - began, time.perf_counter() - read


def state_bytes(state_dict: dict[str, Any]) -> bytes:
    """The bytes in what `state_dict()` returned.

    Raises:
        StateError: It is something else.
    """
    data = state_dict.get("torchmix_state") if isinstance(state_dict, dict) else None
    if not isinstance(data, bytes):
        found = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
        raise StateError(f"expected the dict that state_dict() returned, with bytes at 'torchmix_state'; got {found}")
    return data


def _plans(
    planner: Planner, cursor: Cursor, max_steps: int | None, *, one_pass: bool
) -> Generator[tuple[StepPlan, Cursor, float], None, None]:
    """Plans from the cursor on, each with the cursor after it and the seconds it took."""
    while max_steps is None or cursor.step < max_steps:
        began = time.perf_counter()
        try:
            plan, cursor = planner.step(cursor)
        except SourceExhausted:
            if one_pass:
                return
            raise
        yield plan, cursor, time.perf_counter() - began
