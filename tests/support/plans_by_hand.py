"""Plans that nobody would make, in files as `plan_raw` gives them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import open_catalog
from torchmix.parallel.place_tree import Layout
from torchmix.parallel.topology import Topology
from torchmix.planner.balance import Placement
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import open_planner
from torchmix.planner.plans import DEFERRED, SampleRuns, cursor_after, placement_of, plan_raw, summary_buffer
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.steps.replay import write_plan_files


def reversed_plans(recipe: Path, layout: Topology, *, steps: int = 4) -> tuple[Path, list[StepPlan]]:
    """Plans by hand in files: the ranks in reverse, and the longest piece of each step but the last deferred."""
    checked = load_recipe(recipe)
    part = part_of(checked, "train")
    catalog = open_catalog(recipe.parent / checked.catalog, settings_of(part.sources, part.shuffle))
    planner = open_planner(part, catalog, Layout(dp=layout.dp, cp=layout.cp))
    folder, plans, cursor = recipe.parent / "by-hand", [], planner.start()
    with write_plan_files(folder, planner, catalog.fingerprint) as files:
        for step in range(steps):
            summary = summary_buffer(planner, cursor)
            sample = summary.columns["sample"].copy()
            if step < steps - 1:
                longest = int(np.where(sample == DEFERRED, -1, summary.columns["tokens"]).argmax())
                if part.packing.method == "whole":
                    sample[sample > sample[longest]] -= 1
                sample[longest] = DEFERRED
            count = summary.num_samples - (part.packing.method == "whole" and step < steps - 1)
            placed: Placement | SampleRuns
            if part.packing.method == "whole":  # each document on all ranks: nobody would plan so
                ranks = layout.dp * layout.cp
                of_all = np.full(count, ranks)
                placed = SampleRuns(microbatch=np.arange(count)[::-1].copy(), first_rank=of_all - ranks, size=of_all)
            else:
                placed = placement_of(layout.dp - 1 - np.arange(count) % layout.dp, np.arange(count) // layout.dp)
            plans.append(plan_raw(summary, sample, {"backbone": placed}))
            after = cursor_after(summary, plans[-1], sample)
            files.add(plans[-1], cursor, after, by_hand=True)
            cursor = after
    return folder, plans
