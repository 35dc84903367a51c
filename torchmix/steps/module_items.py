"""The arrays of a step's modules, for the ranks of one replica.

In: a plan, and a reader. Out: arrays by `MODULE.ARRAY`; nothing for a recipe without modules. Must hold: what a
consumer gets is what the plan says, in any process. Cost: that of reading the items that consumers of this replica
compute.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.manifest import MOST_ID
from torchmix.constructor.modules.arrays import arrays_of_module, items_of_replica
from torchmix.constructor.modules.image_places import CP_RANK, NAME, image_places
from torchmix.constructor.modules.routes import route_table, slice_align
from torchmix.parallel.modules.rank_places import RankPlaces
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.reader.protocol import StepReader
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step
from torchmix.recipe.source.bad_rows import masked_sources
from torchmix.steps.images.step_images import images_of_items


def arrays_of_modules(
    plan: StepPlan,
    *,
    part: Part,
    places: RankPlaces,
    replica: int,
    reader: StepReader,
    at_rank: Collection[str] = (),
) -> dict[str, NDArray[Any]]:
    """What the ranks of a replica get of all modules.

    Args:
        plan: The step.
        part: Of the recipe.
        places: Where ranks stand.
        replica: The replica.
        reader: Of the part's sources.
        at_rank: Modules whose images the ranks decode.
    """
    arrays: dict[str, NDArray[Any]] = {}
    length = length_of_step(part.batch, plan.step)
    for name, module in plan.item_modules.items():
        align_tokens = slice_align(part.packing)
        routes = route_table(plan, module, places, replica, length=length, align_tokens=align_tokens)
        if module.unit == "document":
            values = _documents(plan, module, replica, reader)
        else:
            assert reader.images is not None, "a source has images"
            mine = items_of_replica(module, plan.layout, replica)
            values = images_of_items(
                plan, module, mine, reader.images, masked=masked_sources(part.sources), at_rank=name in at_rank
            )
        of_module = arrays_of_module(plan, module, routes, places, replica, values=values)
        if module.unit != "document" and reader.images is not None:
            of_module[NAME] = image_places(plan, module, replica, reader.images, length=length)
            of_module[CP_RANK] = places.cp_rank_of_replica
        arrays |= {f"{name}.{key}": array for key, array in of_module.items()}
    return arrays


def _documents(plan: StepPlan, module: ItemPlan, replica: int, reader: StepReader) -> dict[str, NDArray[Any]]:
    """Tokens of the pieces that are a module's items, end to end, and where each begins in its document."""
    piece = module.items.piece[items_of_replica(module, plan.layout, replica)]
    tokens = plan.pieces.tokens[piece]
    places = np.cumsum(tokens) - tokens
    read = reader.read(
        plan.pieces.source[piece],
        plan.pieces.row[piece],
        plan.pieces.start[piece],
        tokens,
        places=places,
        num_places=int(tokens.sum()),
    )
    values = read.values
    # A piece that cannot be read has no ids; the backbone masks it, or stops.
    ids = np.where((values >= 0) & (values <= MOST_ID), values, 0)
    return {
        "units": tokens.astype(np.int32),
        "item/start": plan.pieces.start[piece],
        "unit/tokens": ids.astype(np.int32),
    }
