"""What the loaders of a recipe may take: its `loaders.cpu` and `loaders.memory`, less what the node worker needs.

In: a recipe, and what the command line says in its place. Out: a `LoaderBudget`. Must hold: where the recipe says
nothing, the budget is what this job may use of this machine. Cost: some small files of /proc and /sys.
"""

from __future__ import annotations

import msgspec

from torchmix.recipe.structs import Recipe
from torchmix.service.scale.partition import LoaderBudget
from torchmix.steps.memory_budget import loader_budget


def budget_of(recipe: Recipe, *, cpu: int | None = None, memory: str | None = None) -> LoaderBudget:
    """What the loaders of a recipe may take. With `where: ray` or `remote` they are on machines of their own, all of
    which is theirs; else a processor, and the memory of built steps of a whole global batch, are the node worker's.

    Raises:
        RecipeError: `memory` is no size.
    """
    given = recipe.loaders
    given = msgspec.structs.replace(given, cpu=cpu or given.cpu, memory=given.memory if memory is None else memory)
    return loader_budget(given, recipe.batch)
