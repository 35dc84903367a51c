"""Steps with their tokens, ready to be built.

In: blocks of plans, a reader, and whom to build each step for. Out: each step's pieces and tokens, and what its state
will be. Must hold: what cannot be read is an error in the place of its step; windows follow the steps that were read.
Cost: that of the reader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from torchmix.catalog.store import Catalog
from torchmix.constructor.build import ReplicaPieces, pieces_of_replica
from torchmix.constructor.joined_steps import join_pieces
from torchmix.constructor.memory import StepMemory
from torchmix.errors import TorchmixError
from torchmix.planner.open_documents import BegunDocuments
from torchmix.planner.planner import Planner
from torchmix.reader.protocol import StepReader
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step
from torchmix.steps.bad_tokens import BadTokenBounds
from torchmix.steps.blocks.joined_build import ReplicaBlock
from torchmix.steps.blocks.plan_blocks import PlannedStep
from torchmix.steps.blocks.read_blocks import read_together
from torchmix.steps.boundary import Boundary, boundary_of_cursor
from torchmix.steps.cursor_state import state_of_cursor
from torchmix.steps.state import encode_state
from torchmix.steps.windows_ahead import WindowsAhead


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
    reading: dict[str, int | float]
    """The reader's figures."""
    boundary: Boundary | None = None
    """What alters in the state after the step."""
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
        reader: Of the catalog's sources.
        consumers: Asked for each step.
        branch: Of the log of decisions; empty without one.
        decoder: The build that decodes images; empty without images.

    Raises:
        TorchmixError: A step cannot be planned or read; those before it have been given.
    """
    fingerprint, keys = recipe_fingerprint(part), key_digests(recipe_keys(part))
    bounds, windows, like = BadTokenBounds(part, catalog), WindowsAhead(planner, reader), b""
    begun = BegunDocuments(planner)
    for block in blocks:
        to_come = begun.at(block[-1].after)
        reader.hold(to_come.source, to_come.row, to_come.start)
        if not like:
            first = state_of_cursor(
                block[0].after,
                planner,
                recipe=fingerprint,
                catalog=catalog.fingerprint,
                keys=keys,
                log_branch=branch,
                decoder=decoder,
            )
            like = encode_state(first)
        for read in _read_block(part, block, reader, consumers):
            after = read.planned.after
            boundary = boundary_of_cursor(after, planner, recipe=fingerprint, like=like)
            yield read._replace(boundary=boundary, most_bad_tokens=bounds.at(after))
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
    try:
        tokens_of = read_together(reader, pieces_of, [length] * len(pieces_of)) if pieces_of else {}
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
        yield ReadStep(step, consumers_of_step, replicas, read_s, reading)
