"""What images of sources mean for a run: which source the encoder works for, and images that samples cannot hold.

In: a part with its catalog, and the share of each source. Out: findings. Must hold: the work of an image is what the
module that encodes it says, or its patches. Cost: one pass over the sizes of all images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

import numpy as np

from torchmix.catalog.items import ItemTable
from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.cli.check.findings import Finding, Level
from torchmix.cli.terminal import count_text
from torchmix.planner.cost import EncoderCost, encoder_cost
from torchmix.recipe.parts import Part

DOMINATES = 1.5
"""Times its share of the tokens that a source has of the encoder's work."""


def image_findings(part: Part, catalog: Catalog, shares: Mapping[str, Fraction]) -> Iterator[Finding]:
    """Findings in the images of a part; `shares` are of tokens, by source."""
    tables = {name: table for name in sorted(part.sources) if (table := _table(catalog.sources[name])) is not None}
    for name, table in tables.items():
        yield from _cut_images(part, catalog.sources[name], table)
    yield from _without_module(part, tables)
    work = {
        name: float(shares.get(name, 0))
        * float(_cost(part, name).of_items(_patches(table)).sum(dtype=np.float64))
        / max(1, catalog.sources[name].num_tokens)
        for name, table in tables.items()
    }
    total = sum(work.values())
    for name in tables if len(tables) > 1 and total else ():
        of_work, of_tokens = work[name] / total, float(shares.get(name, 0))
        if of_work >= 0.5 and of_work >= DOMINATES * of_tokens:
            message = (
                f"its images are {of_work:.0%} of the encoder's work, and its share of the tokens is {of_tokens:.0%}; "
                "to lower that, give it a smaller share, or a smaller max_pixels"
            )
            yield Finding(level=Level.NOTE, where=f"sources.{name}.images", message=message)


def _without_module(part: Part, tables: Mapping[str, ItemTable]) -> Iterator[Finding]:
    """Sources whose images nobody encodes, although those of others are encoded."""
    encoders = {name: module for name, module in part.modules.items() if module.items == "image"}
    for name, table in tables.items() if encoders else ():
        if not any(module.sources is None or name in module.sources for module in encoders.values()):
            message = (
                f"its {count_text(len(table.offset))} images are encoded by no module: {', '.join(encoders)} name "
                f"other sources; add {name} to `sources` of one of them, or leave that key out for all sources"
            )
            yield Finding(level=Level.FINDING, where=f"sources.{name}.images", message=message)


def _table(source: SourceCatalog) -> ItemTable | None:
    return source.sizes.items.get("image") if source.images is not None else None


def _patches(table: ItemTable) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.asarray(table.sizes["patches"], np.int64)


def _cost(part: Part, name: str) -> EncoderCost:
    """The cost of an image by the first module that encodes images of the source."""
    for module in part.modules.values():
        if module.items == "image" and (module.sources is None or name in module.sources):
            return encoder_cost(module.model)
    return encoder_cost(None)


def _cut_images(part: Part, source: SourceCatalog, table: ItemTable) -> Iterator[Finding]:
    """Images that lie across the end of a sample in documents longer than one."""
    length = part.batch.length
    if source.max_document_tokens <= length or part.packing.overflow not in ("split", "truncate"):
        return
    first = np.asarray(table.offset, np.int64)
    last = first + np.asarray(table.tokens, np.int64) - 1
    is_cut = (first < length) & (last >= length)
    if part.packing.overflow == "split":
        is_cut = first // length != last // length
    if is_cut.any():
        cut, all_images = count_text(int(is_cut.sum())), count_text(len(first))
        message = (
            f"{cut} of {all_images} images lie across the end of a sample of {count_text(length)} tokens and are left "
            "out; to keep them, use longer samples, or a smaller max_pixels"
        )
        yield Finding(level=Level.NOTE, where=f"sources.{source.name}.images", message=message)
