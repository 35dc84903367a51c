"""Blocks of steps: planned one after the other, read and built at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from torchmix.catalog.store import Catalog
from torchmix.constructor.arrays import BlockArrays, StepMemory, copy_of_block
from torchmix.constructor.build import build_block, memory_of_block, pieces_of_block
from torchmix.constructor.spans import reset_ids_of
from torchmix.errors import SourceExhausted, TorchmixError
from torchmix.planner.cursor import Cursor
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import BegunDocuments, Planner
from torchmix.reader.protocol import Filled, Filling, StepReader, StoppedWaiting, Tokens
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part, steps_of_block
from torchmix.recipe.ramp import length_of_step, samples_of_step
from torchmix.recipe.sources import masked_sources
from torchmix.steps.bad_tokens import BadTokenBounds
from torchmix.steps.module_items import pieces_of_documents
from torchmix.steps.replay import RecordedPlan
from torchmix.steps.state import StateToAsk, state_of_cursor
from torchmix.steps.windows_ahead import WindowsAhead

# --- Which steps are planned before the first of them is read: a block, of small steps.
#
# The plans are those of one step after the other; a block ends before a step whose decision is not known, at a change
# of the batch and at the last step; what ends the plans, or fails, comes after the steps before it. Blocks begin with
# one step and double, so the first step of a stream comes as soon as it would alone. A step with items, such as images,
# is a block of its own.


class PlannedStep(NamedTuple):
    """A step of a block."""

    plan: StepPlan
    after: Cursor
    plan_s: float
    """Time to plan the step."""


def plan_blocks(
    planner: Planner, cursor: Cursor, max_steps: int | None, *, recorded: RecordedPlan | None = None
) -> Generator[list[PlannedStep], None, None]:
    """Blocks of plans from the cursor on, each with at least one step.

    Args:
        planner: Plans the steps.
        cursor: Before the first one.
        max_steps: The step before which they end; None: they do not.
        recorded: Plans on disk, which are taken where there are some.

    Raises:
        TorchmixError: A step cannot be planned; the steps before it have been given.
    """
    most, is_fixed = 1, isinstance(planner.part.batch.samples, int)
    while max_steps is None or cursor.step < max_steps:
        size = _size(planner, cursor.step)
        stop = cursor.step + min(most, steps_of_block(planner.part, cursor.step))
        stop = stop if max_steps is None else min(stop, max_steps)
        block: list[PlannedStep] = []
        error: Exception | None = None
        while cursor.step < stop and (is_fixed or _size(planner, cursor.step) == size):
            is_recorded = recorded is not None and recorded.has(cursor.step)
            if block and not is_recorded and not planner.is_decided(cursor):
                break
            began = time.perf_counter()
            try:
                plan, cursor = (recorded if recorded is not None and is_recorded else planner).step(cursor)
            except Exception as raised:  # it belongs in the place of its step
                error = raised
                break
            block.append(PlannedStep(plan, cursor, time.perf_counter() - began))
        if block:
            yield block
        if error is not None:
            if isinstance(error, StoppedWaiting) or (isinstance(error, SourceExhausted) and planner.part.one_pass):
                return
            raise error
        most *= 2


def _size(planner: Planner, step: int) -> tuple[int, int]:
    """Samples of a step, and the tokens of each."""
    return samples_of_step(planner.part.batch, step), length_of_step(planner.part.batch, step)


# --- Blocks that are read and built, for whoever gets them.
#
# One call of the reader writes the tokens and labels of all steps and replicas where they stay. What cannot be read or
# built is an error in the place of its step; windows follow the steps that were read.


class Consumer(NamedTuple):
    """Whoever gets a replica's steps."""

    replica: int
    """Data-parallel rank, in [0, layout.dp)."""
    memory: StepMemory
    """Where the memory of the sequence fields comes from."""
    leader: int | None = None
    """The global rank that gets them for itself and its peers, of whose items of modules no others are read; None: for
    the whole replica."""


Consumers = Callable[[int], Mapping[int, Consumer]]
"""A step's number -> whom to build it for, each under a number of its own."""


class ReadBlock(NamedTuple):
    """Steps that are built for some consumers."""

    planned: Sequence[PlannedStep]
    replica_of: Mapping[int, int]
    """By consumer; of any that gets one of the steps."""
    leader_of: Mapping[int, int | None]
    """Likewise."""
    arrays: Mapping[int, BlockArrays]
    """By consumer, without what modules compute and headers."""
    documents: Sequence[Mapping[int, Mapping[str, Tokens]]]
    """By step, replica and module, the tokens of the documents that consumers of the replica compute."""
    read_s: float
    """Time to read a step, and to fill its tokens and labels."""
    build_s: float
    """Time to make the other fields of a step."""
    reading: dict[str, int | float]
    """The reader's figures."""
    states: Sequence[StateToAsk] = ()
    """After each step."""
    most_bad_tokens: Sequence[dict[str, int]] = ()
    """After each step."""


def read_blocks(
    part: Part,
    blocks: Iterable[list[PlannedStep]],
    planner: Planner,
    catalog: Catalog,
    reader: StepReader,
    consumers: Consumers,
    *,
    branch: str,
    decoder: str,
    without_text: Collection[int] = (),
) -> Generator[ReadBlock, None, None]:
    """Blocks with their fields.

    Args:
        part: What is planned.
        blocks: From `plan_blocks`.
        planner: Which planned them.
        catalog: The part's.
        reader: Of the catalog's sources.
        consumers: Asked for each step.
        branch: Of the log of decisions; empty without one.
        decoder: The build that decodes images; empty without images.
        without_text: Leaders whose ranks get no tokens and labels, which are not read for them.

    Raises:
        TorchmixError: A step cannot be planned, read or built; those before it have been given.
    """
    state_after = partial(
        state_of_cursor,
        planner=planner,
        recipe=recipe_fingerprint(part),
        catalog=catalog.fingerprint,
        keys=key_digests(recipe_keys(part)),
        log_branch=branch,
        decoder=decoder,
    )
    bounds, begun = BadTokenBounds(part, catalog), BegunDocuments(planner)
    unread = fixed_by_plan(part, planner.sources, catalog, without_text)
    windows: WindowsAhead | None = None
    build = BlockBuild(part, planner.sources, unread)
    for block in blocks:
        is_read = any(one.leader not in unread for one in consumers(block[0].plan.step).values())
        if is_read:
            to_come = begun.at(block[-1].after)
            reader.hold(to_come.source, to_come.row, to_come.start)
        for read in build.read(block, reader, consumers):
            yield read._replace(
                states=[StateToAsk(partial(state_after, step.after)) for step in read.planned],
                most_bad_tokens=[bounds.at(step.after) for step in read.planned],
            )
        if is_read:
            windows = windows or WindowsAhead(planner, reader)
            windows.follow(block[-1].after)


def fixed_by_plan(part: Part, sources: Sequence[str], catalog: Catalog, leaders: Collection[int]) -> Collection[int]:
    """The leaders without tokens and labels of whose steps the plan says all: none where texts decide more than these.

    An id that ends a document inside its row moves boundaries, and lists that a map gives go to all ranks.
    """
    by_text = reset_ids_of(part, sources) is not None or any(
        catalog.sources[name].lists is not None for name in sources
    )
    return () if by_text else leaders


class BlockBuild:
    """Reads and builds blocks of a part."""

    def __init__(self, part: Part, sources: Sequence[str], unread: Collection[int] = ()) -> None:
        """`sources`: their sorted names; `unread`: leaders for which no text is read."""
        self._part, self._unread = part, unread
        self._masked, self._reset_ids = masked_sources(part.sources), reset_ids_of(part, sources)

    def read(
        self, block: Sequence[PlannedStep], reader: StepReader, consumers: Consumers
    ) -> Generator[ReadBlock, None, None]:
        """The block; or its steps one by one, where one of them fails, so that the error comes in its place.

        Raises:
            TorchmixError: A step cannot be read or built; those before it have been given.
        """
        whom = {number: one for step in block for number, one in consumers(step.plan.step).items()}
        try:
            yield self._read(block, reader, whom)
        except TorchmixError:
            if len(block) == 1:
                raise
        else:
            return
        for step in block:
            yield from self.read([step], reader, consumers)

    def _read(self, block: Sequence[PlannedStep], reader: StepReader, whom: Mapping[int, Consumer]) -> ReadBlock:
        length = length_of_step(self._part.batch, block[0].plan.step)  # of all steps of a block
        first_of: dict[int, int] = {}
        with_text = {one.replica for one in whom.values() if one.leader not in self._unread}
        for number, consumer in whom.items():
            if consumer.leader not in self._unread or consumer.replica not in with_text:
                first_of.setdefault(consumer.replica, number)
        of_replica: dict[int, BlockArrays] = {}
        fill_s = build_s = 0.0
        # Each replica with runs of ranks has a table of its own.
        has_runs = block[0].plan.contexts is not None
        together = [[replica for replica in first_of if (replica in with_text) == is_read] for is_read in (True, False)]
        for replicas in [[replica] for replica in first_of] if has_runs else filter(None, together):
            at_s = time.perf_counter()
            pieces = pieces_of_block([step.plan for step in block], replicas)
            outs: list[Filling] | None = None
            filled = Filled()
            if replicas[0] in with_text:
                outs = memory_of_block(pieces, [whom[first_of[replica]].memory for replica in replicas], length)
                filled = reader.fill(pieces.wanted(length), outs)
            filled_s = time.perf_counter()
            built = build_block(
                pieces,
                outs,
                filled,
                length=length,
                packing=self._part.packing,
                reset_ids=self._reset_ids,
                masked=self._masked,
            )
            of_replica |= zip(replicas, built, strict=True)
            fill_s, build_s = fill_s + filled_s - at_s, build_s + time.perf_counter() - filled_s
        at_s = time.perf_counter()
        documents = [
            {replica: read_documents(step.plan, replica, reader, length) for replica in first_of} for step in block
        ]
        return ReadBlock(
            planned=block,
            replica_of={number: consumer.replica for number, consumer in whom.items()},
            leader_of={number: consumer.leader for number, consumer in whom.items()},
            arrays={
                number: of_replica[one.replica]
                if first_of[one.replica] == number
                else copy_of_block(of_replica[one.replica], None if one.leader in self._unread else one.memory)
                for number, one in whom.items()
            },
            documents=documents,
            read_s=(fill_s + time.perf_counter() - at_s) / len(block),
            build_s=build_s / len(block),
            reading=reader.stats(),
        )


def read_documents(plan: StepPlan, replica: int, reader: StepReader, length: int) -> dict[str, Tokens]:
    """By module, the tokens of the documents that consumers of a replica compute; in memory of their own."""
    found: dict[str, Tokens] = {}
    for name, pieces in pieces_of_documents(plan, replica, length=length).items():
        tokens = reader.read(pieces.wanted(length))
        found[name] = replace(tokens, values=tokens.values.copy())
    return found
