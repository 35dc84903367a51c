"""The steps of one replica, or of several: planned, read and built, one global batch at a time.

In: what a stream is made of, a state to begin at, and a reader. Out: `StepArrays`, each with a header that holds the
state after it. Must hold: the same steps in whatever process or thread this runs, and whoever reads; no torch. Cost:
that of the planner, the reader and `build`. They take turns in one thread, which is ahead of the trainer as a whole: a
thread for the planner would pass the interpreter's lock to and fro some hundred times a step, for a tenth more CPU in
all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog
from torchmix.constructor.arrays import StepArrays
from torchmix.constructor.build import ReplicaPieces, build, pieces_of_replica
from torchmix.constructor.memory import StepMemory
from torchmix.constructor.resets import NO_RESET
from torchmix.errors import SourceExhausted
from torchmix.parallel.layout import Layout
from torchmix.parallel.modules.rank_places import ONE_PLACE, RankPlaces
from torchmix.planner.cursor import Cursor
from torchmix.planner.open_documents import documents_to_come
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner, open_planner
from torchmix.reader.pieces.piece_copy import Tokens
from torchmix.reader.protocol import StepReader
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part
from torchmix.recipe.source.bad_rows import masked_sources
from torchmix.recipe.source.resets import sources_with_resets
from torchmix.service.open_fleet import FleetSettings
from torchmix.steps.bad_tokens import BadTokenBounds
from torchmix.steps.cursor_state import cursor_of_state, state_of_cursor
from torchmix.steps.decisions import EndedLog, FollowedLog, StoppedWaiting, log_of
from torchmix.steps.header import encode_header
from torchmix.steps.module_items import arrays_of_modules
from torchmix.steps.replay.read import RecordedPlan, open_recorded_plan
from torchmix.steps.state import LoaderState, decode_state, encode_state
from torchmix.steps.windows_ahead import WindowsAhead


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """What a stream is made of; plain values, so that it can travel to a worker process."""

    part: Part
    """What is planned."""
    base: str
    """The folder that paths of files are relative to: the recipe's."""
    catalog_folder: str
    """Where the catalog lies."""
    cache_bytes: int
    """Decoded pages kept."""
    replica: int
    """Data-parallel rank, in [0, layout.dp)."""
    layout: Layout
    max_steps: int | None
    """The step before which the stream ends; counted from the run's beginning, not from a resume."""
    start_step: int = 0
    """The step at which the stream begins, if no state is loaded; a pass that has no such step gives nothing."""
    padded_vocab_size: int | None = None
    """Rows of the model's embedding, where they are known."""
    catalog: str = ""
    """Fingerprint of the catalog, as it was when the loader was built; empty if it was not looked at."""
    places: RankPlaces = ONE_PLACE
    """Where ranks stand; for modules alone."""
    decisions: str = ""
    """Folder of the log that the part's policy writes, where it has one."""
    replayed: str = ""
    """Folder or file of a log whose decisions are taken again in place of a policy's."""
    recorded: str = ""
    """Folder of a plan on disk, whose steps are given without being planned."""
    fleet: FleetSettings | None = None
    """Shared loaders to ask; None: files are read."""


class Consumer(NamedTuple):
    """Whoever gets a replica's step."""

    replica: int
    """Data-parallel rank, in [0, layout.dp)."""
    memory: StepMemory
    """Where the memory of the sequence fields comes from."""


Consumers = Callable[[int], Mapping[int, Consumer]]
"""Of a step's number: whom to build it for, each under a number of its own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedStep:
    """A step as several consumers get it."""

    step: int
    order_digest: bytes
    """Of all steps up to this one."""
    arrays: Mapping[int, StepArrays]
    """By the number of the consumer."""


def replica_steps(
    settings: StreamSettings,
    state: bytes,
    *,
    catalog: Catalog,
    reader: StepReader,
    memory: StepMemory,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Generator[StepArrays, None, None]:
    """The steps of the settings' replica, endless unless `max_steps` or `one_pass` says otherwise.

    Args:
        settings: What the steps follow from.
        state: An encoded `LoaderState` of the settings' part and layout.
        catalog: The part's.
        reader: Of the catalog's sources; the caller closes it, after these steps.
        memory: Where the sequence fields' memory comes from.
        is_stopped: Asked while a far start is planned; True ends the steps before the first one.

    Raises:
        StateMismatch: The state is of another catalog.
        TorchmixError: A step cannot be planned or read.
    """
    one = {0: Consumer(settings.replica, memory)}
    steps = shared_steps(
        settings, state, catalog=catalog, reader=reader, consumers=lambda _: one, is_stopped=is_stopped
    )
    try:
        for step in steps:
            yield step.arrays[0]
    finally:
        steps.close()


def shared_steps(
    settings: StreamSettings,
    state: bytes,
    *,
    catalog: Catalog,
    reader: StepReader,
    consumers: Consumers,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Generator[SharedStep, None, None]:
    """The steps of several consumers, each planned and read once for all of them.

    Args:
        settings: What the steps follow from; `replica` is not used.
        state: An encoded `LoaderState` of the settings' part and layout.
        catalog: The part's.
        reader: Of the catalog's sources; the caller closes it, after these steps.
        consumers: Asked for each step.
        is_stopped: Asked while a far start is planned; True ends the steps before the first one.

    Raises:
        StateMismatch: The state is of another catalog.
        TorchmixError: A step cannot be planned or read.
    """
    start = decode_state(state, recipe=recipe_fingerprint(settings.part))
    log = log_of(settings.decisions, start.log_branch, replayed=settings.replayed, is_stopped=is_stopped)
    recorded: RecordedPlan | None = None
    try:
        planner = open_planner(settings.part, catalog, settings.layout, decisions=log)
        recorded = open_recorded_plan(settings.recorded, planner, catalog.fingerprint)
        yield from _steps(
            settings, start, planner, recorded, log, catalog, reader, consumers=consumers, is_stopped=is_stopped
        )
    finally:
        for opened in (recorded, log):
            if opened is not None:
                opened.close()


def _steps(
    settings: StreamSettings,
    start: LoaderState,
    planner: Planner,
    recorded: RecordedPlan | None,
    log: FollowedLog | EndedLog | None,
    catalog: Catalog,
    reader: StepReader,
    *,
    consumers: Consumers,
    is_stopped: Callable[[], bool],
) -> Generator[SharedStep, None, None]:
    part = settings.part
    fingerprint, keys = recipe_fingerprint(part), key_digests(recipe_keys(part))
    try:
        if recorded is not None:
            cursor = recorded.cursor_of_state(start, is_stopped=is_stopped)
        else:
            cursor = cursor_of_state(start, planner, catalog=catalog.fingerprint, is_stopped=is_stopped)
    except SourceExhausted:
        if not part.one_pass:
            raise
        cursor = None  # the pass ends before its first step, as one that is resumed at its end
    if cursor is None:
        return
    masked = masked_sources(part.sources)
    bounds = BadTokenBounds(part, catalog)
    windows = WindowsAhead(planner, reader)
    first_microbatch = start.microbatch
    for plan, next_cursor, plan_s in _plans(planner, cursor, settings.max_steps, recorded):
        to_come = documents_to_come(planner, next_cursor)
        reader.hold(to_come.source, to_come.row, to_come.start)
        built, read_s, build_s = read_and_build(settings, plan, reader, consumers(plan.step), masked=masked)
        after = state_of_cursor(
            next_cursor,
            planner,
            recipe=fingerprint,
            catalog=catalog.fingerprint,
            keys=keys,
            log_branch=log.branch if log else "",
        )
        next_state, most_bad_tokens, reading = encode_state(after), bounds.after(after), reader.stats()
        arrays = {}
        for consumer, step in built.items():
            header = encode_header(
                plan,
                next_state,
                first_microbatch=first_microbatch,
                bad_tokens=_by_name(plan.sources, step.bad_tokens),
                most_bad_tokens=most_bad_tokens,
                plan_s=plan_s,
                read_s=read_s,
                build_s=build_s,
                reading=reading,
            )
            arrays[consumer] = replace(step, header=header)
        yield SharedStep(step=plan.step, order_digest=plan.order_digest, arrays=arrays)
        first_microbatch = 0
        windows.follow(next_cursor)


def read_and_build(
    settings: StreamSettings,
    plan: StepPlan,
    reader: StepReader,
    consumers: Mapping[int, Consumer],
    *,
    masked: Collection[str] = (),
) -> tuple[dict[int, StepArrays], float, float]:
    """Each consumer's arrays of a step, and the seconds that reading and filling all of them took."""
    if not consumers:
        return {}, 0.0, 0.0
    length, packing = settings.part.batch.length, settings.part.packing
    reset_ids = reset_ids_of(settings.part, plan.sources)
    began = time.perf_counter()
    replicas = dict.fromkeys(replica for replica, _ in consumers.values())
    pieces_of = {replica: pieces_of_replica(plan, replica) for replica in replicas}
    tokens_of = _read_together(reader, pieces_of, length)
    read = time.perf_counter()
    built = {}
    for consumer, (replica, memory) in consumers.items():
        step = build(
            pieces_of[replica],
            tokens_of[replica].values,
            tokens_of[replica].successors,
            unlabelled=tokens_of[replica].unlabelled,
            length=length,
            packing=packing,
            reset_ids=reset_ids,
            memory=memory,
            masked=masked,
        )
        modules = arrays_of_modules(plan, part=settings.part, places=settings.places, replica=replica, reader=reader)
        built[consumer] = replace(step, modules=modules)
    return built, read - began, time.perf_counter() - read


def _read_together(reader: StepReader, pieces_of: Mapping[int, ReplicaPieces], length: int) -> dict[int, Tokens]:
    """Tokens of each replica, asked for at once: a page that several of them need is decoded once."""
    sizes = [pieces.num_samples * length for pieces in pieces_of.values()]
    stops = list(accumulate(sizes))
    starts = [stop - size for stop, size in zip(stops, sizes, strict=True)]

    def of_all(name: str) -> NDArray[Any]:
        return _joined([getattr(pieces, name) for pieces in pieces_of.values()])

    tokens = reader.read(
        of_all("source"),
        of_all("row"),
        of_all("start"),
        of_all("tokens"),
        places=_joined(
            [pieces.places(length) + start for pieces, start in zip(pieces_of.values(), starts, strict=True)]
        ),
        num_places=stops[-1],
        epochs=of_all("epoch"),
    )
    found, first = {}, 0
    for (replica, pieces), start, stop in zip(pieces_of.items(), starts, stops, strict=True):
        last = first + len(pieces.row)
        places = tokens.unlabelled
        found[replica] = Tokens(
            values=tokens.values[start:stop],
            successors=tokens.successors[first:last],
            unlabelled=None if places is None else places[(places >= start) & (places < stop)] - start,
        )
        first = last
    return found


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _by_name(names: Sequence[str], tokens: NDArray[np.int64] | None) -> dict[str, int]:
    """Tokens of each source that has some."""
    return {} if tokens is None else {name: count for name, count in zip(names, tokens.tolist(), strict=True) if count}


def reset_ids_of(part: Part, sources: Sequence[str]) -> Int64Array | None:
    """The `reset_id` of each source, as `build` takes them."""
    ids = sources_with_resets(part.sources)
    return np.array([ids.get(name, NO_RESET) for name in sources]) if ids else None


def _plans(
    planner: Planner, cursor: Cursor, max_steps: int | None, recorded: RecordedPlan | None
) -> Generator[tuple[StepPlan, Cursor, float], None, None]:
    """Plans from the cursor on, each with the cursor after it and its seconds; those on disk, where there are."""
    while max_steps is None or cursor.step < max_steps:
        began = time.perf_counter()
        try:
            made_by = recorded if recorded is not None and recorded.has(cursor.step) else planner
            plan, cursor = made_by.step(cursor)
        except StoppedWaiting:
            return
        except SourceExhausted:
            if planner.part.one_pass:
                return
            raise
        yield plan, cursor, time.perf_counter() - began
