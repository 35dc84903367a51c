"""A small mixture with every awkward source, and steps planned over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from tests.support.sizes import synthetic_sizes
from torchmix.catalog.sizes import SourceSizes
from torchmix.parallel.place_tree import Layout
from torchmix.planner.cursor import Cursor
from torchmix.planner.forecast import Forecast, forecast, patient
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.recipe.parts import Part, part_of
from torchmix.recipe.structs import Recipe

SIZES: dict[str, SourceSizes] = {
    "books": synthetic_sizes(40, shortest=200, longest=3000, rows_per_page=4, window_pages=4, salt=1),
    "code": synthetic_sizes(600, shortest=20, longest=400, rows_per_page=25, window_pages=8, salt=2),
    "gaps": synthetic_sizes(300, shortest=0, longest=90, rows_per_page=10, window_pages=8, salt=3),  # half are empty
    "one": SourceSizes(first_row_of_page=np.array([0, 1]), tokens=np.array([70], np.int32), window_pages=64),
    "tiny": synthetic_sizes(12, shortest=5, longest=40, rows_per_page=5, window_pages=8, salt=4),
    "web": synthetic_sizes(900, shortest=5, longest=1500, salt=5),
}
"""Documents longer than a sample, empty ones, a single row, a source of share 1e-5: for samples of 256 tokens."""
SHARES = {"books": "20%", "code": "29.999%", "gaps": "5%", "one": "1%", "tiny": "0.001%", "web": "44%"}
PACKINGS: dict[str, dict[str, object]] = {
    "best_fit": {"method": "best_fit"},
    "best_fit truncate": {"method": "best_fit", "overflow": "truncate", "align_tokens": 32},
    "best_fit drop": {"method": "best_fit", "overflow": "drop", "align_tokens": 1},
    "concat": {"method": "concat"},
    "concat truncate": {"method": "concat", "overflow": "truncate"},
}


def plan_steps(planner: Planner, steps: int, cursor: Cursor | None = None) -> tuple[list[StepPlan], list[Cursor]]:
    """Plans of `steps` steps from a cursor (the start), and the `steps` + 1 cursors between them."""
    plans, cursors = [], [cursor or planner.start()]
    for _ in range(steps):
        plan, following = planner.step(cursors[-1])
        plans.append(plan)
        cursors.append(following)
    return plans, cursors


def make_planner(
    recipe: Recipe | Part, sizes: Mapping[str, SourceSizes], *, one_pass: bool | None = None, **layout: int
) -> Planner:
    """A planner of a part, or of the training of a recipe; with `one_pass` as given, and the epochs as they are."""
    part = recipe if isinstance(recipe, Part) else part_of(recipe, "train")
    return Planner(part if one_pass is None else replace(part, one_pass=one_pass), sizes, Layout(**layout))


def forecast_of(recipe: Recipe | Part, sizes: Mapping[str, SourceSizes], num_steps: int, **options: Any) -> Forecast:
    """What each source of a part, or of the training of a recipe, will give."""
    part = recipe if isinstance(recipe, Part) else part_of(recipe, "train")
    return forecast(part, Planner(patient(part), sizes), num_steps, **options)
