"""How many steps a single pass over a part of the recipe takes.

In: a recipe with its catalog, and the part. Out: the number of steps until every document was given once. Must hold: a
loader of a single pass gives the same number of steps, at any layout. Cost: all steps are planned but not placed; no
data is read.
"""

from __future__ import annotations

from pathlib import Path

from torchmix.catalog.open_part import open_part
from torchmix.errors import SourceExhausted
from torchmix.planner.planner import open_planner
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe


def steps_of_one_pass(recipe: Recipe, directory: str | Path, *, part: str = "validation") -> int:
    """Steps until every document of a part was given once.

    Args:
        recipe: A checked recipe.
        directory: The recipe's folder.
        part: `train`, `validation` or `test`.

    Raises:
        RecipeError: The recipe has no such part.
        CatalogError: There is no catalog that fits the recipe.
    """
    once = part_of(recipe, part, one_pass=True)
    catalog = open_part(Path(directory) / recipe.catalog, once)
    planner = open_planner(once, catalog)
    cursor = planner.start()
    try:
        while True:
            cursor = planner.skip(cursor)
    except SourceExhausted:
        return cursor.step
