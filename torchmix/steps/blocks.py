"""Blocks of small steps: planned together, read at once, ready to be built."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchmix.catalog.store import Catalog
from torchmix.constructor.arrays import StepArrays, StepMemory
from torchmix.constructor.build import ReplicaPieces, cut_steps, join_pieces, pieces_of_replica
from torchmix.errors import SourceExhausted, TorchmixError
from torchmix.planner.cursor import Cursor
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import BegunDocuments, Planner
from torchmix.reader.protocol import OtherRows, StepReader, StoppedWaiting, Tokens, WantedPieces
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step, samples_of_step
from torchmix.steps.bad_tokens import BadTokenBounds
from torchmix.steps.module_items import pieces_of_documents
from torchmix.steps.replay import RecordedPlan
from torchmix.steps.state import StateToAsk, state_of_cursor
from torchmix.steps.windows_ahead import WindowsAhead

# --- Which steps are planned before the first of them is read: a block, of small steps.
#
# The plans are those of one step after the other; a block ends before a step whose decision is not known, at a change
# of the batch and at the last step; what ends the plans, or fails, comes after the steps before it. Blocks begin with
# one step and double, so the first step of a stream comes as soon as it would alone.

BLOCK_TOKENS = 1 << 18
"""Most tokens of a block, unless it is one step."""


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
    most = 1
    while max_steps is None or cursor.step < max_steps:
        size = _size(planner, cursor.step)
        is_alone = planner.part.balance.context is not None  # runs of ranks differ from step to step
        whole = 1 if is_alone else max(1, BLOCK_TOKENS // (size[0] * size[1]))
        stop = cursor.step + min(most, whole)
        stop = stop if max_steps is None else min(stop, max_steps)
        block: list[PlannedStep] = []
        error: Exception | None = None
        while cursor.step < stop and _size(planner, cursor.step) == size:
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


# --- The pieces of several steps and replicas, asked for at once.
#
# Cost: one call of the reader.

Key = TypeVar("Key", bound=Hashable)


def read_together(reader: StepReader, pieces_of: Mapping[Key, ReplicaPieces], length: int) -> dict[Key, Tokens]:
    """Tokens of each, in memory that the next call uses again.

    Args:
        reader: Who reads.
        pieces_of: At least one.
        length: Tokens of a sample.

    Raises:
        TorchmixError: Some piece cannot be read.
    """
    wanted = [pieces.wanted(length) for pieces in pieces_of.values()]
    tokens = reader.read(WantedPieces.joined(wanted))
    found: dict[Key, Tokens] = {}
    first = start = 0
    for key, part in zip(pieces_of, wanted, strict=True):
        last, stop = first + len(part), start + part.num_places
        found[key] = tokens_of_part(tokens, (first, last), (start, stop))
        first, start = last, stop
    return found


def tokens_of_part(tokens: Tokens, pieces: tuple[int, int], places: tuple[int, int]) -> Tokens:
    """The tokens of some consecutive pieces, which lie in a range of places."""
    (first, last), (start, stop) = pieces, places
    unlabelled = tokens.unlabelled
    return Tokens(
        values=tokens.values[start:stop],
        successors=tokens.successors[first:last],
        others=tuple(_cut(other, first, last) for other in tokens.others),
        unlabelled=None if unlabelled is None else unlabelled[(unlabelled >= start) & (unlabelled < stop)] - start,
    )


def _cut(other: OtherRows, first: int, last: int) -> OtherRows:
    """The rows that begin with some of the pieces, which are numbered from 0 on."""
    chosen = np.flatnonzero((other.piece >= first) & (other.piece < last))
    return other.only(chosen, other.piece[chosen] - first)


# --- What one replica's steps of a block are built from, and the steps once the first of them is asked for.
#
# Cost: one `build` for each consumer; where tokens are masked, or a page is bad, one for each step.

Build = Callable[[ReplicaPieces, Tokens], StepArrays]


class ReplicaBlock:
    """The steps of one replica in a block."""

    def __init__(self, steps: Sequence[ReplicaPieces], joined: ReplicaPieces, tokens: Tokens, length: int) -> None:
        """Nothing is built yet.

        Args:
            steps: The pieces of each.
            joined: From `join_pieces`.
            tokens: The tokens of `joined`.
            length: Tokens of a sample.
        """
        self._steps, self._joined, self._tokens, self._length = steps, joined, tokens, length
        self._number_of_step = {step.step: number for number, step in enumerate(steps)}
        self._built: dict[int, list[StepArrays]] = {}

    def build(self, step: int, consumer: int, make: Build, *, is_joint: bool) -> StepArrays:
        """A step's arrays, in memory of the consumer's.

        Args:
            step: Its number.
            consumer: Whom it is for.
            make: Builds from pieces and their tokens.
            is_joint: Whether no token is masked because of its id.

        Raises:
            TorchmixError: The step cannot be built.
        """
        number = self._number_of_step[step]
        if consumer not in self._built:
            self._built[consumer] = self._all(make) if is_joint and len(self._steps) > 1 else []
        if built := self._built[consumer]:
            return built[number]
        pieces = self._steps[number]
        first = sum(len(before.row) for before in self._steps[:number])
        part = (first, first + len(pieces.row))
        num_places = pieces.num_places(self._length)  # of each step of a block
        places = (number * num_places, (number + 1) * num_places)
        return make(pieces, tokens_of_part(self._tokens, part, places))

    def _all(self, make: Build) -> list[StepArrays]:
        """All steps; none where they must be built one by one."""
        if self._tokens.unlabelled is not None:
            return []
        try:
            joined = make(self._joined, self._tokens)
        except TorchmixError:  # it belongs in the place of its step
            return []
        if joined.num_masked_tokens or joined.bad_tokens is not None:
            return []
        return cut_steps(joined, self._steps)


# --- Steps with their tokens, ready to be built.
#
# What cannot be read is an error in the place of its step; windows follow the steps that were read.


class Consumer(NamedTuple):
    """Whoever gets a replica's step."""

    replica: int
    """Data-parallel rank, in [0, layout.dp)."""
    memory: StepMemory
    """Where the memory of the sequence fields comes from."""


Consumers = Callable[[int], Mapping[int, Consumer]]
"""A step's number -> whom to build it for, each under a number of its own."""


class ReadStep(NamedTuple):
    """What a step is built from, and for whom."""

    planned: PlannedStep
    consumers: Mapping[int, Consumer]
    replicas: Mapping[int, ReplicaBlock]
    """By replica, with other steps that were read together with this one."""
    read_s: float
    documents: Mapping[int, Mapping[str, Tokens]]
    """By replica and module, the tokens of the documents that consumers of the replica compute."""
    reading: dict[str, int | float]
    """The reader's figures."""
    state: StateToAsk | None = None
    """After the step."""
    most_bad_tokens: dict[str, int] | None = None


def read_steps(
    part: Part,
    blocks: Iterable[list[PlannedStep]],
    planner: Planner,
    catalog: Catalog,
    reader: StepReader,
    consumers: Consumers,
    *,
    branch: str,
    decoder: str,
) -> Generator[ReadStep, None, None]:
    """Each step with its tokens, ready to be built; the tokens of one call of the reader live up to the next but one.

    Args:
        part: What is planned.
        blocks: From `plan_blocks`.
        planner: Which planned them.
        catalog: The part's.
        reader: The reader of the catalog's sources.
        consumers: Asked for each step.
        branch: The branch of the log of decisions; empty without one.
        decoder: The build that decodes images; empty without images.

    Raises:
        TorchmixError: A step cannot be planned or read; those before it have been given.
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
    bounds, windows = BadTokenBounds(part, catalog), WindowsAhead(planner, reader)
    begun = BegunDocuments(planner)
    for block in blocks:
        to_come = begun.at(block[-1].after)
        reader.hold(to_come.source, to_come.row, to_come.start)
        for read in _read_block(part, block, reader, consumers):
            after = read.planned.after
            state = StateToAsk(partial(state_after, after))
            yield read._replace(state=state, most_bad_tokens=bounds.at(after))
        windows.follow(block[-1].after)


def _read_block(
    part: Part, block: Sequence[PlannedStep], reader: StepReader, consumers: Consumers
) -> Generator[ReadStep, None, None]:
    """Each step of a block with its tokens.

    Raises:
        TorchmixError: A step cannot be read; those before it have been given.
    """
    began = time.perf_counter()
    consumers_of = [consumers(plan.step) for plan, _, _ in block]
    steps_of: dict[int, list[ReplicaPieces]] = {}
    for step, consumers_of_step in zip(block, consumers_of, strict=True):
        for replica in dict.fromkeys(replica for replica, _ in consumers_of_step.values()):
            steps_of.setdefault(replica, []).append(pieces_of_replica(step.plan, replica))
    pieces_of = {replica: join_pieces(steps) for replica, steps in steps_of.items()}
    length = length_of_step(part.batch, block[0].plan.step)  # of all steps of a block
    wanted: dict[Any, ReplicaPieces] = {**pieces_of}
    for step, consumers_of_step in zip(block, consumers_of, strict=True):
        for replica in dict.fromkeys(replica for replica, _ in consumers_of_step.values()):
            for name, pieces in pieces_of_documents(step.plan, replica, length=length).items():
                wanted[step.plan.step, replica, name] = pieces
    try:
        tokens_of = read_together(reader, wanted, length) if wanted else {}
    except TorchmixError:
        if len(block) == 1:
            raise
        for step in block:  # one by one, so that the error comes in the place of its step
            yield from _read_block(part, [step], reader, consumers)
        return
    read_s = (time.perf_counter() - began) / len(block)
    reading = reader.stats()
    replicas = {
        replica: ReplicaBlock(steps_of[replica], pieces, tokens_of[replica], length)
        for replica, pieces in pieces_of.items()
    }
    for step, consumers_of_step in zip(block, consumers_of, strict=True):
        names = [name for name, module in step.plan.item_modules.items() if module.unit == "document"]
        documents = {
            replica: {name: tokens_of[step.plan.step, replica, name] for name in names}
            for replica, _ in consumers_of_step.values()
        }
        yield ReadStep(step, consumers_of_step, replicas, read_s, documents, reading)
