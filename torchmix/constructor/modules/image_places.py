"""Where the images of a replica's microbatches stand, and how their tokens lie in them.

In: a plan, and the sizes of images. Out: one table for all ranks of the replica. Must hold: images come by microbatch
and token. Cost: a few array operations, and 20 bytes an image for each rank.
"""

from __future__ import annotations

import numpy as np

from torchmix.array_types import Int32Array
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.reader.protocol import StepImages

NAME = "images"
"""The table's name among the arrays of a module."""
CP_RANK = "cp_rank_of_rank"
"""Name of the array that says which CP slice each rank has, by which it knows where its tokens stand."""


def image_places(plan: StepPlan, module: ItemPlan, replica: int, images: StepImages, *, length: int) -> Int32Array:
    """int32 [k, 5]: microbatch, first token in it at full length, tokens, and rows and columns of tokens, or 0 and 0.

    Args:
        plan: The step.
        module: A module of images.
        replica: The replica whose texts have them.
        images: Of the sources.
        length: Tokens of a sample.
    """
    items, placement = module.items, plan.placement
    chosen = np.flatnonzero(placement.dp_rank_of_sample[items.sample] == replica)
    sample = items.sample[chosen]
    source = plan.pieces.source[items.piece[chosen]]
    table = np.zeros((len(chosen), 5), np.int64)
    table[:, 0] = placement.microbatch_of_sample[sample]
    table[:, 1] = placement.slot_of_sample[sample] * length + items.offset[chosen]
    table[:, 2] = items.tokens[chosen]
    for number in np.unique(source).tolist():
        name = plan.sources[number]
        mine = np.flatnonzero(source == number)
        sizes, item, merge = images.table(name).sizes, items.item[chosen[mine]], images.merge(name)
        rows, columns = (np.asarray(sizes[key][item], np.int64) // merge for key in ("grid_height", "grid_width"))
        is_grid = (np.asarray(sizes["segments"][item]) == 1) & (rows * columns == table[mine, 2])
        table[mine, 3], table[mine, 4] = rows * is_grid, columns * is_grid
    return table[np.lexsort((table[:, 1], table[:, 0]))].astype(np.int32)
