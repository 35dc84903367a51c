"""The images of a module's items: read, decoded and cut into patches, for the ranks of one replica.

In: a plan, and a reader with images. Out: `pixel_values`, `grid_thw` and what else an encoder takes, in the order of
the items. Must hold: an image is read and decoded once in a step over the whole job, by the leader of the replica whose
ranks encode it. A bad image stops the run; where its source masks bad rows it is grey, with a log message. Cost: that
of decoding, in as many threads as there are processors, at most MOST_THREADS; Pillow works without Python's lock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.items import ItemTable
from torchmix.errors import CorruptPage, ImageUnreadable
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.reader.protocol import StepImages
from torchmix.steps.state import LoaderState
from torchmix.transform.images.decode import decoder_id
from torchmix.transform.images.make import ImageTransform

logger = logging.getLogger(__name__)

MOST_THREADS = 8


def images_of_items(
    plan: StepPlan, module: ItemPlan, chosen: Int64Array, images: StepImages, *, masked: Collection[str]
) -> dict[str, NDArray[Any]]:
    """The arrays of some items, by name.

    Args:
        plan: The step.
        module: The module.
        chosen: [n] items of it.
        images: Reads images of the sources.
        masked: Names of sources whose bad images become grey.

    Returns:
        units: int32 [n] patches of each; item/grid_thw: int32 [n, 3] segments, and rows and columns of patches in each;
        unit/pixel_values: uint8 [patches, 3 * patch * patch].

    Raises:
        CorruptPage: An image cannot be read as it was indexed.
        SourceChanged, SourceUnreadable: A file is not the indexed one, or cannot be read.
    """
    source, item = plan.pieces.source[module.items.piece[chosen]], module.items.item[chosen]
    row = plan.pieces.row[module.items.piece[chosen]]
    grid = np.zeros((len(chosen), 3), np.int32)
    patches: list[NDArray[np.uint8] | None] = [None] * len(chosen)
    width_of_patch = images.patch_values
    num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    with ThreadPoolExecutor(num_threads, "torchmix-images") as pool:
        for number in sorted(set(source.tolist())):
            name = plan.sources[number]
            mine = np.flatnonzero(source == number)
            table = images.table(name)
            for column, key in enumerate(("segments", "grid_height", "grid_width")):
                grid[mine, column] = table.sizes[key][item[mine]]
            contents = images.read(name, item[mine])
            makers = [
                _Maker(images.transform(name), table, name, name in masked, int(row[at]), int(item[at]))
                for at in mine.tolist()
            ]
            for at, made in zip(mine.tolist(), pool.map(_make, makers, contents), strict=True):
                patches[at] = made
    values = np.concatenate([np.zeros((0, width_of_patch), np.uint8), *(made for made in patches if made is not None)])
    units = grid.prod(axis=1).astype(np.int32)
    assert int(units.sum()) == len(values), "an image has the patches that were planned"
    return {"units": units, "item/grid_thw": grid, "unit/pixel_values": values}


def decoder_of_run(start: LoaderState, *, has_images: bool) -> str:
    """The build that decodes images here, "" without images; a warning where the run had another one before `start`."""
    decoder = decoder_id() if has_images else ""
    if has_images and start.decoder and start.decoder != decoder:
        logger.warning(
            "the state is of a run that decoded images with %s, and here it is %s: pixels of JPEG may differ by 1 or 2 "
            "levels, so the run goes on with the same images and not with the same bits; install that build for both",
            start.decoder,
            decoder,
        )
    return decoder


class _Maker:
    """What one image needs."""

    __slots__ = ("is_masked", "item", "row", "source", "table", "transform")

    def __init__(
        self, transform: ImageTransform, table: ItemTable, source: str, is_masked: bool, row: int, item: int
    ) -> None:
        self.transform, self.table, self.source, self.is_masked = transform, table, source, is_masked
        self.row, self.item = row, item


def _make(maker: _Maker, content: memoryview) -> NDArray[np.uint8]:
    sizes = {key: int(maker.table.sizes[key][maker.item]) for key in ("width", "height")}
    try:
        return maker.transform.patches(content, **sizes)
    except ImageUnreadable as error:
        number = maker.item - int(maker.table.first_item_of_row[maker.row])
        what = f"source {maker.source!r}: image {number} of row {maker.row}: {error}"
        if not maker.is_masked:
            raise CorruptPage(what) from None
        logger.warning("%s - it comes as a grey image, as bad_rows: mask says", what)
        return maker.transform.grey_patches(**sizes)
