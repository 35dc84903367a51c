"""What reading will take of a node's memory.

In: a recipe, a part of it with its catalog. Out: the sum, and a finding where it is more than there is. Must hold: the
sum is that of `build_loader`, for a node that gets all samples. Cost: some operations a source.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchmix.catalog.store import Catalog
from torchmix.cli.check.findings import Finding, Level
from torchmix.errors import RecipeError
from torchmix.recipe.loaders import limits_of_node
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import most_samples
from torchmix.recipe.structs import Recipe
from torchmix.steps.memory_budget import MemoryBudget, memory_budget

LOOK_AHEAD = 2
"""As `build_loader` has it by default."""


def budget_of(whole: Recipe, part: Part, catalog: Catalog) -> MemoryBudget:
    """The sum for a node that gets all samples."""
    return memory_budget(
        part,
        catalog,
        whole.read,
        limits_of_node(whole.loaders),
        samples_here=most_samples(part.batch),
        num_leaders=1,
        look_ahead=LOOK_AHEAD,
    )


def memory_findings(budget: MemoryBudget) -> Iterator[Finding]:
    """A finding if the sum is more than there is; of this machine only a note, since another one will train."""
    try:
        budget.check()
    except RecipeError as error:
        level = Level.FINDING if budget.is_given else Level.NOTE
        yield Finding(level=level, where=error.where, message=error.message)
