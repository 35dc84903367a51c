"""What the loaders of a recipe may take: its `loaders.cpu` and `loaders.memory`, less what the node worker needs.

In: a recipe, and what the command line says in its place. Out: a `LoaderBudget`. Must hold: where the recipe says
nothing, the budget is what this job may use of this machine. Cost: some small files of /proc and /sys.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchmix.recipe.byte_sizes import parse_bytes
from torchmix.recipe.ramp import most_tokens
from torchmix.recipe.structs import Recipe
from torchmix.service.scale.partition import LoaderBudget
from torchmix.steps.memory_budget import PROCESS_BYTES, STEP_TOKEN_BYTES
from torchmix.steps.node_limits import memory_bytes, processors

STEPS_HELD = 6
"""Built steps of a node worker at the usual look-ahead of 2."""


def budget_of(recipe: Recipe, *, cpu: int | None = None, memory: str | None = None) -> LoaderBudget:
    """What the loaders of a recipe may take. With `where: remote` they are on machines of their own, all of which is
    theirs; else a processor, and the memory of built steps of a whole global batch, are the node worker's.

    Raises:
        RecipeError: `memory` is no size.
    """
    given = recipe.loaders.memory if memory is None else memory
    is_shared = not recipe.loaders.is_remote
    steps = STEPS_HELD * STEP_TOKEN_BYTES * most_tokens(recipe.batch)
    return LoaderBudget(
        cpu=cpu or recipe.loaders.cpu or processors(),
        memory_bytes=memory_bytes() if given is None else parse_bytes(given, where="loaders.memory"),
        node_cpu=1 if is_shared else 0,
        node_bytes=PROCESS_BYTES + steps if is_shared else 0,
    )


def budget_of_cluster(recipe: Recipe, resources: Mapping[str, float]) -> LoaderBudget:
    """What loaders on a Ray cluster may take: what the recipe says, or else all of the cluster.

    Args:
        recipe: The recipe.
        resources: The cluster's, as Ray names them: `CPU`, and `memory` in bytes.
    """
    cpu, memory = recipe.loaders.cpu, recipe.loaders.memory
    return LoaderBudget(
        cpu=cpu or max(1, int(resources.get("CPU", 1))),
        memory_bytes=parse_bytes(memory, where="loaders.memory") if memory else int(resources.get("memory", 1 << 62)),
    )
