"""The items of a step's modules: read, decoded and cut into patches, for the ranks of one replica."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import MOST_ID
from torchmix.catalog.store import Catalog
from torchmix.constructor.build import ReplicaPieces
from torchmix.constructor.modules import (
    CP_RANK,
    IMAGES,
    arrays_of_module,
    image_places,
    items_of_replica,
    route_table,
    slice_align,
)
from torchmix.formats.images import IMAGE
from torchmix.parallel.place_tree import RankPlaces
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.reader.images import decode_threads
from torchmix.reader.piece_copy import Tokens
from torchmix.reader.protocol import StepImages, StepReader
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step
from torchmix.recipe.sources import masked_sources
from torchmix.recipe.structs import Module
from torchmix.steps.state import LoaderState
from torchmix.transform.images.decode import ImageTransform, PlannedImage, decoder_id

# --- Where the images of a module are decoded: by loaders, by whoever makes the steps, or by the rank that encodes
# them.
#
# All leaders of a job come to the same, since they have one recipe and one catalog; the bits of the patches are the
# same at any place. Cost: two sums over at most LOOKED_AT images of each source.
#
# By default fewer bytes travel: the files of photographs are some twenty times smaller than their patches, so they go
# to the rank as they are; where images are shrunk so much that their patches are smaller, loaders decode.

DecodeAt = Literal["loader", "worker", "rank"]
LOOKED_AT = 1 << 20
"""Images of a source whose sizes are summed."""


def decode_place(module: Module, catalog: Catalog, *, has_loaders: bool) -> DecodeAt:
    """Where the images of a module are decoded.

    Args:
        module: Of a checked recipe; its items are images.
        catalog: Of the part's sources.
        has_loaders: Whether shared loaders read. Without them whoever makes the steps loads.
    """
    asked = module.decode_at
    if asked is None:
        files, patches = bytes_that_travel(module, catalog)
        late: DecodeAt = "rank" if module.axis == "WORLD" else "worker"
        asked = late if files <= patches else "loader"
    return "worker" if asked == "loader" and not has_loaders else asked


def decoded_by_loaders(part: Part, catalog: Catalog, *, has_loaders: bool) -> bool:
    """Whether a module of a part has its images decoded by loaders; then those of all are."""
    return any(
        module.items == "image" and decode_place(module, catalog, has_loaders=has_loaders) == "loader"
        for module in part.modules.values()
    )


def decoded_at_rank(part: Part, catalog: Catalog, *, has_loaders: bool) -> frozenset[str]:
    """Modules of a part whose images the ranks decode."""
    return frozenset(
        name
        for name, module in part.modules.items()
        if module.items == "image" and decode_place(module, catalog, has_loaders=has_loaders) == "rank"
    )


def bytes_that_travel(module: Module, catalog: Catalog) -> tuple[int, int]:
    """Bytes of the files of a module's images, and of their patches."""
    files = patches = 0
    for name, source in catalog.sources.items():
        if source.images is None or (module.sources is not None and name not in module.sources):
            continue
        sizes = source.sizes.items[IMAGE].sizes
        files += int(np.asarray(sizes["bytes"][:LOOKED_AT]).sum(dtype=np.int64))
        values = ImageTransform.of(name, source.images).patch_values
        patches += values * int(np.asarray(sizes["patches"][:LOOKED_AT]).sum(dtype=np.int64))
    return files, patches


# --- Bytes of images that a rank got -> patches, in the process of the rank.
#
# The same bits, in the same order. A bad image is an error of this rank, or grey where its source masks bad rows.
#
#     MODULE.file/content     uint8             files of the rank's images, end to end
#     MODULE.item/file_bytes  int64 [n]         bytes of each
#     MODULE.item/planned     int32 [n, 3]      width, height, and number among the images of the row

CONTENT, FILE_BYTES, PLANNED = "file/content", "item/file_bytes", "item/planned"


class RankDecoder:
    """Decodes for one rank."""

    def __init__(self, part: Part) -> None:
        """Nothing is imported before the first image comes."""
        self._part = part
        self._masked = masked_sources(part.sources)
        self._names = sorted(part.sources)
        self._transforms: dict[str, ImageTransform] = {}
        self.images_decoded = 0

    def decoded(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The arrays of a rank's modules, with `unit/pixel_values` in the place of files.

        Raises:
            CorruptPage: An image cannot be read as it was indexed.
        """
        found = dict(arrays)
        for name in [name for name in arrays if name.endswith(f".{CONTENT}")]:
            module = name.removesuffix(CONTENT)
            content, file_bytes, planned = (found.pop(module + key) for key in (CONTENT, FILE_BYTES, PLANNED))
            source, row = found[f"{module}item/source"], found[f"{module}item/row"]
            found[f"{module}unit/pixel_values"] = self._patches(content, file_bytes, planned, source, row)
        return found

    def _patches(
        self,
        content: NDArray[Any],
        file_bytes: NDArray[Any],
        planned: NDArray[Any],
        source: NDArray[Any],
        row: NDArray[Any],
    ) -> NDArray[np.uint8]:
        stops = np.cumsum(file_bytes, dtype=np.int64).tolist()
        held = np.ascontiguousarray(content).data
        asked = [
            (
                PlannedImage(source=self._names[s], row=r, number=number, width=width, height=height),
                held[stop - count : stop],
            )
            for s, r, (width, height, number), stop, count in zip(
                source.tolist(), row.tolist(), planned.tolist(), stops, file_bytes.tolist(), strict=True
            )
        ]
        for name in {image.source for image, _ in asked} - self._transforms.keys():
            images = self._part.sources[name].images
            assert images is not None, "it has images"
            self._transforms[name] = ImageTransform.of(name, images)
        self.images_decoded += len(asked)
        with ThreadPoolExecutor(decode_threads(), "torchmix-images") as pool:
            made = list(pool.map(self._make, asked))
        width = next((one.patch_values for one in self._transforms.values()), None) or self._patch_values()
        return np.concatenate([np.zeros((0, width), np.uint8), *made])

    def _make(self, asked: tuple[PlannedImage, memoryview]) -> NDArray[np.uint8]:
        planned, content = asked
        is_masked = planned.source in self._masked
        return self._transforms[planned.source].patches_of(planned, content, is_masked=is_masked)

    def _patch_values(self) -> int:
        """Values of a patch, which all sources have alike."""
        return next(
            ImageTransform.of(name, source.images).patch_values
            for name, source in self._part.sources.items()
            if source.images is not None
        )


# --- The images of a module's items: read, decoded and cut into patches, for the ranks of one replica.
#
# An image is read and decoded once in a step over the whole job, for the replica whose ranks encode it: by loaders,
# here, or by the rank that gets its file. A bad image stops the run; where its source masks bad rows it is grey, with
# a log message.

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
        unit/pixel_values: uint8 [patches, 3 * patch * patch], or with `at_rank` the arrays of `module_items.py`.

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


# --- The arrays of a step's modules, for the ranks of one replica.
#
# What a consumer gets is what the plan says, in any process.


def arrays_of_modules(
    plan: StepPlan,
    *,
    part: Part,
    places: RankPlaces,
    replica: int,
    documents: Mapping[str, Tokens],
    reader: StepReader,
    at_rank: Collection[str] = (),
) -> dict[str, NDArray[Any]]:
    """What the ranks of a replica get of all modules.

    Args:
        plan: The step.
        part: Of the recipe.
        places: Where ranks stand.
        replica: The replica.
        documents: By module, the tokens of `pieces_of_documents`.
        reader: Of the part's sources.
        at_rank: Modules whose images the ranks decode.
    """
    arrays: dict[str, NDArray[Any]] = {}
    length = length_of_step(part.batch, plan.step)
    for name, module in plan.item_modules.items():
        align_tokens = slice_align(part.packing)
        routes = route_table(plan, module, places, replica, length=length, align_tokens=align_tokens)
        if module.unit == "document":
            values = _documents(plan, module, replica, documents[name])
        elif reader.images is None:  # no source of this part has images
            values = {
                "units": np.zeros(0, np.int32),
                "item/grid_thw": np.zeros((0, 3), np.int32),
                "unit/pixel_values": np.zeros((0, 0), np.uint8),
            }
        else:
            mine = items_of_replica(module, plan.layout, replica)
            values = images_of_items(
                plan, module, mine, reader.images, masked=masked_sources(part.sources), at_rank=name in at_rank
            )
        of_module = arrays_of_module(plan, module, routes, places, replica, values=values)
        if module.unit != "document" and reader.images is not None:
            of_module[IMAGES] = image_places(plan, module, replica, reader.images, length=length)
            of_module[CP_RANK] = places.cp_rank_of_replica
        arrays |= {f"{name}.{key}": array for key, array in of_module.items()}
    return arrays


def pieces_of_documents(plan: StepPlan, replica: int, *, length: int) -> dict[str, ReplicaPieces]:
    """By module, the pieces that are its items and that consumers of a replica compute, to be read end to end.

    They are read with the samples of the step, in one call: the next call of a reader uses the memory of the one
    before, and a reader is asked from one thread.

    Args:
        plan: The step.
        replica: The replica.
        length: Tokens of a sample.
    """
    found = {}
    for name, module in plan.item_modules.items():
        if module.unit != "document":
            continue
        piece = module.items.piece[items_of_replica(module, plan.layout, replica)]
        tokens = plan.pieces.tokens[piece]
        found[name] = ReplicaPieces(
            step=plan.step,
            num_tokens_global=0,
            num_samples=-(-int(tokens.sum()) // length),
            micro_batch_size=1,
            sample=np.zeros(len(piece), np.int64),
            sample_offset=np.cumsum(tokens) - tokens,
            source=plan.pieces.source[piece].astype(np.int32),
            row=plan.pieces.row[piece],
            start=plan.pieces.start[piece],
            tokens=tokens,
            ends_document=np.zeros(len(piece), np.bool_),
            epoch=plan.pieces.epoch[piece],
            source_names=plan.sources,
        )
    return found


def _documents(plan: StepPlan, module: ItemPlan, replica: int, read: Tokens) -> dict[str, NDArray[Any]]:
    """Tokens of the pieces that are a module's items, end to end, and where each begins in its document."""
    piece = module.items.piece[items_of_replica(module, plan.layout, replica)]
    tokens = plan.pieces.tokens[piece]
    values = read.values[: int(tokens.sum())]
    # A piece that cannot be read has no ids; the backbone masks it, or stops.
    ids = np.where((values >= 0) & (values <= MOST_ID), values, 0)
    return {
        "units": tokens.astype(np.int32),
        "item/start": plan.pieces.start[piece],
        "unit/tokens": ids.astype(np.int32),
    }
