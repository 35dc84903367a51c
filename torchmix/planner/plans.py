"""The plans of a recipe's steps, one by one, without data.

In: a recipe with its catalog, and a layout. Out: a `StepPlan` for each step. Must hold: they are the plans that a
loader of the same layout makes. Cost: planning alone; steps before the first one that is asked for are planned, not
placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torchmix.catalog.open_part import open_part
from torchmix.errors import OptionError, SourceExhausted
from torchmix.parallel.layout import Layout
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner, open_planner
from torchmix.recipe.load import recipe_and_directory
from torchmix.recipe.parts import part_of
from torchmix.recipe.structs import Recipe


def plan(
    recipe: str | Path | Recipe | Mapping[str, Any],
    *,
    steps: int | None = None,
    start_step: int = 0,
    dp: int = 1,
    micro_batch_size: int = 1,
    part: str = "train",
    one_pass: bool = False,
    directory: str | Path | None = None,
) -> Iterator[StepPlan]:
    """Plan steps of a recipe that is indexed; no data is read.

    Args:
        recipe: A YAML file, a `Recipe` or a mapping with its keys.
        steps: How many; None for ever, or to the end of a single pass.
        start_step: The first one, from 0.
        dp, micro_batch_size: The layout that samples are placed on.
        part: `train`, `validation` or `test`.
        one_pass: Each document once, and then the end.
        directory: What paths in a `Recipe` are relative to; the current directory if not given.

    Yields:
        The plan of each step, in order.

    Raises:
        OptionError: `steps` or `start_step` is below 0, or there is no such part.
        CatalogError: There is no catalog that fits; `torchmix.index` makes one.
        PlanError: A step cannot be planned, as when a source has run out.
    """
    for name, value in (("steps", steps), ("start_step", start_step)):
        if value is not None and (type(value) is not int or value < 0):
            raise OptionError(f"plan: {name}={value!r} must be an int of at least 0")
    checked, folder = recipe_and_directory("plan", recipe, directory)
    planned = part_of(checked, part, one_pass=one_pass)
    catalog = open_part(folder / checked.catalog, planned)
    planner = open_planner(planned, catalog, Layout(dp=dp, micro_batch_size=micro_batch_size))
    return _plans(planner, start_step, steps, one_pass=one_pass)


def _plans(planner: Planner, start_step: int, steps: int | None, *, one_pass: bool) -> Iterator[StepPlan]:
    cursor = planner.start()
    try:
        for _ in range(start_step):
            cursor = planner.skip(cursor)
        for _ in count() if steps is None else range(steps):
            made, cursor = planner.step(cursor)
            yield made
    except SourceExhausted:
        if not one_pass:
            raise
