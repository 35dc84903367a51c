"""Low-level doors of loading: the tokens of a plan for one consumer, and the tensors of one role.

For a plan of the planner these are the loader's tensors, bit for bit.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.constructor.build import BlockPieces, build, pieces_of_replica
from torchmix.constructor.fields import StepTensors, batch_of_role, cp_slices
from torchmix.constructor.spans import reset_ids_of
from torchmix.errors import TopologyError
from torchmix.parallel.place_tree import Role
from torchmix.planner.plan import StepPlan
from torchmix.reader.protocol import StepReader, Tokens
from torchmix.recipe.parts import Part


class PlannedTokens(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tokens of one data-parallel rank's samples in a step."""

    pieces: BlockPieces
    tokens: Tokens
    """Values at the places of `pieces`, and the successor of each piece."""

    @property
    def values(self) -> NDArray[np.integer]:
        """[samples x length] ids; arbitrary in padding."""
        return self.tokens.values


def loader_do_plan(plan: StepPlan, reader: StepReader, consumer: int) -> PlannedTokens:
    """Read what one data-parallel rank's samples hold.

    Args:
        plan: The step.
        reader: The reader of the plan's sources.
        consumer: Data-parallel rank.

    Raises:
        TopologyError: There is no such rank.
        CatalogError: What a reader raises.
    """
    if not 0 <= consumer < plan.layout.dp:
        raise TopologyError(f"loader_do_plan: there is no consumer {consumer}; the plan has 0 to {plan.layout.dp - 1}")
    pieces = pieces_of_replica(plan, consumer)
    return PlannedTokens(pieces=pieces, tokens=reader.read(pieces.wanted(plan.length)))


def constructor_do_plan(plan: StepPlan, tokens: PlannedTokens, role: Role, *, part: Part, cp: int = 1) -> StepTensors:
    """The tensors of one role of the rank that the tokens are of, for all microbatches of the step.

    Args:
        plan: The step.
        tokens: From `loader_do_plan`.
        role: Stage, and slice of the sequence in [0, cp).
        part: The part of the recipe: its packing decides boundaries and positions.
        cp: Context-parallel ranks.

    Raises:
        TopologyError: The samples do not divide by cp.
        CorruptPage: A token is no id.
    """
    length = plan.length
    arrays = build(
        tokens.pieces,
        tokens.tokens.values,
        tokens.tokens.successors,
        length=length,
        packing=part.packing,
        reset_ids=reset_ids_of(part, plan.sources),
    )
    whole = StepTensors.from_arrays(arrays)
    return batch_of_role(whole, role, cp_slices(whole, cp, length=length, packing=part.packing))
