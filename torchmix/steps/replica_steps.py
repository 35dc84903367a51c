"""The steps of one replica, or of several: planned, read and built, one global batch at a time.

In: what a stream is made of, a state to begin at, and a reader. Out: `StepArrays`, each with a header that holds the
state after it. Must hold: the same steps in whatever process or thread this runs, and whoever reads; no torch. Cost:
that of the planner, the reader and `build`; small steps are planned and read several at a time (blocks/). All take
turns in one thread, which is ahead of the trainer as a whole: a thread for the planner would pass the interpreter's
lock to and fro some hundred times a step, for a tenth more CPU in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog
from torchmix.constructor.arrays import StepArrays
from torchmix.constructor.build import ReplicaPieces, build, pieces_of_replica
from torchmix.constructor.memory import StepMemory
from torchmix.constructor.resets import NO_RESET
from torchmix.errors import SourceExhausted, TorchmixError
from torchmix.parallel.layout import Layout
from torchmix.parallel.modules.rank_places import ONE_PLACE, RankPlaces
from torchmix.planner.cursor import gone_by
from torchmix.planner.open_documents import documents_to_come
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner, open_planner
from torchmix.reader.pieces.piece_copy import Tokens
from torchmix.reader.protocol import StepReader
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step
from torchmix.recipe.source.bad_rows import masked_sources
from torchmix.recipe.source.resets import sources_with_resets
from torchmix.service.open_fleet import FleetSettings
from torchmix.service.scale.progress import ProgressLog
from torchmix.steps.bad_tokens import BadTokenBounds
from torchmix.steps.blocks.plan_blocks import PlannedStep, plan_blocks
from torchmix.steps.blocks.read_blocks import read_together
from torchmix.steps.boundary import boundary_of_cursor
from torchmix.steps.cursor_state import state_of_cursor
from torchmix.steps.decisions import EndedLog, FollowedLog, log_of
from torchmix.steps.header import encode_header
from torchmix.steps.history.start import start_cursor
from torchmix.steps.module_items import arrays_of_modules
from torchmix.steps.replay.read import RecordedPlan, open_recorded_plan
from torchmix.steps.state import LoaderState, decode_state, encode_state
from torchmix.steps.step_images import decoder_of_run
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
"""A step's number -> whom to build it for, each under a number of its own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedStep:
    """A step as several consumers get it."""

    step: int
    order_digest: bytes
    """The digest of all steps up to this one."""
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
            folder = Path(settings.catalog_folder)
            cursor = start_cursor(start, planner, catalog=catalog, catalog_folder=folder, is_stopped=is_stopped)
    except SourceExhausted:
        if not part.one_pass:
            raise
        cursor = None  # the pass ends before its first step, as one that is resumed at its end
    if cursor is None:
        return
    masked = masked_sources(part.sources)
    bounds = BadTokenBounds(part, catalog)
    windows = WindowsAhead(planner, reader)
    decoder = decoder_of_run(start, has_images=reader.images is not None)
    progress = ProgressLog(settings.fleet.folders if settings.fleet is not None and part.name == "train" else ())
    first_microbatch, like = start.microbatch, b""
    for block in plan_blocks(planner, cursor, settings.max_steps, recorded=recorded):
        to_come = documents_to_come(planner, block[-1].after)
        reader.hold(to_come.source, to_come.row, to_come.start)
        if not like:
            first = state_of_cursor(
                block[0].after,
                planner,
                recipe=fingerprint,
                catalog=catalog.fingerprint,
                keys=keys,
                log_branch=log.branch if log else "",
                decoder=decoder,
            )
            like = encode_state(first)
        for (plan, after, plan_s), read, read_s, reading in _read_block(settings, block, reader, consumers):
            if any(one.replica == 0 for one in read.consumers.values()):
                progress.note(after.step, gone_by(after.decisions), after.decided.shares)
            boundary = boundary_of_cursor(after, planner, recipe=fingerprint, like=like)
            built, build_s = build_step(settings, plan, read, reader, masked=masked)
            most_bad_tokens = bounds.at(after)
            arrays = {}
            for consumer, step in built.items():
                header = encode_header(
                    plan,
                    boundary,
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
        windows.follow(block[-1].after)


class ReadStep(NamedTuple):
    """What a step is built from, and for whom."""

    consumers: Mapping[int, Consumer]
    pieces: Mapping[int, ReplicaPieces]
    """By replica."""
    tokens: Mapping[int, Tokens]
    """By replica."""


Reading = dict[str, int | float]


def _read_block(
    settings: StreamSettings, block: Sequence[PlannedStep], reader: StepReader, consumers: Consumers
) -> Generator[tuple[PlannedStep, ReadStep, float, Reading], None, None]:
    """Each step of a block with its tokens, the seconds that these took, and the reader's figures.

    Raises:
        TorchmixError: A step cannot be read; those before it have been given.
    """
    began = time.perf_counter()
    consumers_of = [consumers(plan.step) for plan, _, _ in block]
    pieces_of = {
        (i, replica): pieces_of_replica(step.plan, replica)
        for i, step in enumerate(block)
        for replica in dict.fromkeys(replica for replica, _ in consumers_of[i].values())
    }
    try:
        lengths = [length_of_step(settings.part.batch, block[i].plan.step) for i, _ in pieces_of]
        tokens_of = read_together(reader, pieces_of, lengths) if pieces_of else {}
    except TorchmixError:
        if len(block) == 1:
            raise
        for step in block:  # one by one, so that the error comes in the place of its step
            yield from _read_block(settings, [step], reader, consumers)
        return
    read_s = (time.perf_counter() - began) / len(block)
    reading = reader.stats()
    for i, step in enumerate(block):
        pieces = {replica: pieces for (j, replica), pieces in pieces_of.items() if i == j}
        tokens = {replica: tokens for (j, replica), tokens in tokens_of.items() if i == j}
        yield step, ReadStep(consumers_of[i], pieces, tokens), read_s, reading


def build_step(
    settings: StreamSettings, plan: StepPlan, read: ReadStep, reader: StepReader, *, masked: Collection[str] = ()
) -> tuple[dict[int, StepArrays], float]:
    """Each consumer's arrays of a step, and the seconds that filling all of them took."""
    length, packing = length_of_step(settings.part.batch, plan.step), settings.part.packing
    reset_ids = reset_ids_of(settings.part, plan.sources)
    began = time.perf_counter()
    built = {}
    for consumer, (replica, memory) in read.consumers.items():
        tokens = read.tokens[replica]
        step = build(
            read.pieces[replica],
            tokens.values,
            tokens.successors,
            unlabelled=tokens.unlabelled,
            length=length,
            packing=packing,
            reset_ids=reset_ids,
            memory=memory,
            masked=masked,
        )
        modules = arrays_of_modules(plan, part=settings.part, places=settings.places, replica=replica, reader=reader)
        built[consumer] = replace(step, modules=modules)
    return built, time.perf_counter() - began


def _by_name(names: Sequence[str], tokens: NDArray[np.int64] | None) -> dict[str, int]:
    """Tokens of each source that has some."""
    return {} if tokens is None else {name: count for name, count in zip(names, tokens.tolist(), strict=True) if count}


def reset_ids_of(part: Part, sources: Sequence[str]) -> Int64Array | None:
    """The `reset_id` of each source, as `build` takes them."""
    ids = sources_with_resets(part.sources)
    return np.array([ids.get(name, NO_RESET) for name in sources]) if ids else None
