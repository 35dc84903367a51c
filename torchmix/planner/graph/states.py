"""The road of every piece of a step: from its source to the ranks that compute it.

In: a plan. Out: columns by name, one row a piece, or one row an item of a module. Must hold: what is shown is the plan.
Cost: a few array operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.planner.plan import StepPlan


def states_of(plan: StepPlan, module: str | None = None) -> dict[str, NDArray[Any]]:
    """The road of each piece: source, when it was drawn, sample, bucket and bin; of a module's item, its consumer too.

    Args:
        plan: A step.
        module: A module of items; None for the backbone.

    Returns:
        Columns of equal length. `source` is text, the others int64: `row`, `epoch`, `start`, `tokens`, `drawn_step`,
        `sample`, `slot`, `bucket` (data-parallel rank), `bin` (microbatch); with a module `item`, `offset`, `size`,
        `cost`, `consumer`, `consumer_bin`.
    """
    pieces, placement = plan.pieces, plan.placement
    items = None if module is None else plan.item_modules[module]
    piece = np.arange(len(pieces)) if items is None else items.items.piece
    sample = plan.sample[piece]
    columns: dict[str, NDArray[Any]] = {
        "source": np.array(plan.sources)[pieces.source[piece]],
        "row": pieces.row[piece],
        "epoch": pieces.epoch[piece],
        "start": pieces.start[piece],
        "tokens": pieces.tokens[piece],
        "drawn_step": pieces.drawn_step[piece],
        "sample": sample,
        "slot": plan.slot[piece],
        "bucket": placement.dp_rank_of_sample[sample],
        "bin": placement.microbatch_of_sample[sample],
    }
    if items is not None:
        columns |= {
            "item": items.items.item,
            "offset": items.items.offset,
            "size": items.items.size,
            "cost": items.cost_of_item,
            "consumer": items.consumer_of_item,
            "consumer_bin": items.bin_of_item,
        }
    return columns
