"""The images of a module's items: read, decoded and cut into patches, for the ranks of one replica.

In: a plan, and a reader with images. Out: `pixel_values`, `grid_thw` and what else an encoder takes, in the order of
the items. Must hold: an image is read and decoded once in a step over the whole job, for the replica whose ranks encode
it: by loaders, here, or by the rank that gets its file. A bad image stops the run; where its source masks bad rows it
is grey, with a log message. Cost: that of decoding, in several threads.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.reader.images.patches import decode_threads
from torchmix.reader.protocol import StepImages
from torchmix.steps.images.at_rank import CONTENT, FILE_BYTES, PLANNED
from torchmix.steps.state import LoaderState
from torchmix.transform.images.decode import decoder_id
from torchmix.transform.images.make import ImageTransform, PlannedImage

logger = logging.getLogger(__name__)


def images_of_items(
    plan: StepPlan,
    module: ItemPlan,
    chosen: Int64Array,
    images: StepImages,
    *,
    masked: Collection[str],
    at_rank: bool = False,
) -> dict[str, NDArray[Any]]:
    """The arrays of some items, by name.

    Args:
        plan: The step.
        module: The module.
        chosen: [n] items of it.
        images: Reads images of the sources.
        masked: Names of sources whose bad images become grey.
        at_rank: Files are given as they are, for the rank to decode.

    Returns:
        units: int32 [n] patches of each; item/grid_thw: int32 [n, 3] segments, and rows and columns of patches in each;
        unit/pixel_values: uint8 [patches, 3 * patch * patch], or with `at_rank` the arrays of `at_rank.py`.

    Raises:
        CorruptPage: An image cannot be read as it was indexed.
        SourceChanged, SourceUnreadable: A file is not the indexed one, or cannot be read.
    """
    source, item = plan.pieces.source[module.items.piece[chosen]], module.items.item[chosen]
    grid, planned = np.zeros((len(chosen), 3), np.int32), np.zeros((len(chosen), 3), np.int32)
    held: list[Any] = [None] * len(chosen)
    """By item, its file, or its patches."""
    with ThreadPoolExecutor(decode_threads(), "torchmix-images") as pool:
        for number in sorted(set(source.tolist())):
            name = plan.sources[number]
            mine = np.flatnonzero(source == number)
            table = images.table(name)
            for column, key in enumerate(("segments", "grid_height", "grid_width")):
                grid[mine, column] = table.sizes[key][item[mine]]
            found: Iterable[Any]
            if images.gives_patches:
                found = images.read_patches(name, item[mine])
            else:
                found = contents = images.read(name, item[mine])
                of_items = [PlannedImage.of(name, table, i) for i in item[mine].tolist()]
                planned[mine] = np.array([(one.width, one.height, one.number) for one in of_items], np.int32)
                if not at_rank:
                    make = partial(_make, images.transform(name), name in masked)
                    found = pool.map(make, of_items, contents)
            for at, one in zip(mine.tolist(), found, strict=True):
                held[at] = one
    units = grid.prod(axis=1).astype(np.int32)
    arrays = {"units": units, "item/grid_thw": grid}
    if at_rank and not images.gives_patches:
        content = np.frombuffer(bytearray(b"".join(held)), np.uint8)
        return arrays | {CONTENT: content, FILE_BYTES: np.array(list(map(len, held)), np.int64), PLANNED: planned}
    values = np.concatenate([np.zeros((0, images.patch_values), np.uint8), *held])
    assert int(units.sum()) == len(values), "an image has the patches that were planned"
    return arrays | {"unit/pixel_values": values}


def _make(transform: ImageTransform, is_masked: bool, planned: PlannedImage, content: memoryview) -> NDArray[np.uint8]:
    return transform.patches_of(planned, content, is_masked=is_masked)


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
