"""Where the images of a module are decoded: by loaders, by whoever makes the steps, or by the rank that encodes them.

In: what the recipe says, and the sizes of images in the catalog. Out: the place. Must hold: all leaders of a job come
to the same, since they have one recipe and one catalog; the bits of the patches are the same at any place. Cost: two
sums over at most LOOKED_AT images of each source.

By default fewer bytes travel: the files of photographs are some twenty times smaller than their patches, so they go to
the rank as they are; where images are shrunk so much that their patches are smaller, loaders decode.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from torchmix.catalog.store import Catalog
from torchmix.formats.images.headers import IMAGE
from torchmix.recipe.balance.structs import Module
from torchmix.recipe.parts import Part
from torchmix.transform.images.make import ImageTransform

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
