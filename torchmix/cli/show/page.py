"""A page of HTML with samples of a step: their text, the images in it, who encodes each, and what has no loss.

In: a plan, and its samples' numbers. Out: one file that needs no network. Must hold: nothing that a document holds can
act on the page: text is escaped, images are data. Cost: that of reading the samples, and their images once.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.catalog.store import Catalog
from torchmix.cli.show.documents import DocumentReader, place_of
from torchmix.formats.documents.item_kinds import NO_LOSS
from torchmix.planner.plan import StepPlan
from torchmix.reader.images.image_reader import ImageReader, open_images

KINDS = {b"\xff\xd8": "jpeg", b"\x89P": "png", b"GI": "gif", b"RI": "webp"}
"""By the first bytes of an image, what a browser calls it."""
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em }}
article {{ border: 1px solid #8884; border-radius: 6px; margin: 1em 0; padding: .5em 1em }}
h2 {{ font-size: 1em }} .no-loss {{ color: #999; font-style: italic }}
p.of {{ color: #777; font-size: .85em; margin: .2em 0 }}
pre {{ white-space: pre-wrap; margin: .3em 0; font: inherit }}
figure {{ display: inline-block; margin: .3em .5em; vertical-align: top }}
figure img {{ max-height: 14em; max-width: 20em; display: block }} figcaption {{ font-size: .8em; color: #777 }}
</style></head><body><h1>{title}</h1>
"""


def write_page(path: Path, plan: StepPlan, catalog: Catalog, samples: Sequence[int], reader: DocumentReader) -> None:
    """Write the page.

    Args:
        path: The file to write.
        plan: The step.
        catalog: Of its sources.
        samples: Numbers of the samples to show.
        reader: Reads their documents; the recipe's folder is its own.

    Raises:
        OSError: The file cannot be written.
    """
    images = open_images(catalog, reader.directory)
    try:
        title = html.escape(f"step {plan.step}, digest {plan.order_digest.hex()}")
        with path.open("w", encoding="utf-8") as file:
            file.write(HEAD.format(title=title))
            for sample in samples:
                file.writelines(_sample(plan, catalog, sample, reader, images))
            file.write("</body></html>\n")
    finally:
        if images is not None:
            images.close()


def _sample(
    plan: StepPlan, catalog: Catalog, sample: int, reader: DocumentReader, images: ImageReader | None
) -> Iterator[str]:
    placement, pieces = plan.placement, plan.pieces
    yield (
        f"<article><h2>sample {sample}: dp rank {placement.dp_rank_of_sample[sample]}, microbatch "
        f"{placement.microbatch_of_sample[sample]}</h2>\n"
    )
    for piece in np.flatnonzero(plan.sample == sample).tolist():
        name, row = plan.sources[int(pieces.source[piece])], int(pieces.row[piece])
        start, tokens = int(pieces.start[piece]), int(pieces.tokens[piece])
        place, ids = (
            place_of(catalog.sources[name], row),
            reader.ids(name, row, start, tokens, epoch=int(pieces.epoch[piece])),
        )
        yield (
            f'<p class="of">{html.escape(name)}: {html.escape(place.file)}, row {place.file_row}, tokens {start} to '
            f"{start + tokens} of {pieces.document_tokens[piece]}</p>\n"
        )
        at, runs = 0, _runs_without_loss(catalog, name, row)
        for item, offset, count in _items(catalog, name, row):
            if images is None or offset < start or offset + count > start + tokens:
                continue
            yield _text(reader, name, ids[at : offset - start], start + at, runs)
            yield _figure(plan, piece, name, item, count, images)
            at = offset - start + count
        yield _text(reader, name, ids[at:], start + at, runs)
    yield "</article>\n"


def _items(catalog: Catalog, name: str, row: int) -> list[tuple[int, int, int]]:
    """Number, offset and tokens of the images of a row."""
    table = catalog.sources[name].sizes.items.get("image")
    if table is None:
        return []
    numbers = range(int(table.first_item_of_row[row]), int(table.first_item_of_row[row + 1]))
    return [(number, int(table.offset[number]), int(table.tokens[number])) for number in numbers]


def _runs_without_loss(catalog: Catalog, name: str, row: int) -> list[tuple[int, int]]:
    """First token of each run of a row's tokens without loss, and the one behind it."""
    table = catalog.sources[name].sizes.items.get(NO_LOSS)
    if table is None:
        return []
    numbers = range(int(table.first_item_of_row[row]), int(table.first_item_of_row[row + 1]))
    return [(int(table.offset[i]), int(table.offset[i]) + int(table.tokens[i])) for i in numbers]


def _text(reader: DocumentReader, name: str, ids: Int64Array, first: int, runs: list[tuple[int, int]]) -> str:
    """The text of some ids, from token `first` of their document on; what has no loss is marked."""
    parts: list[str] = []
    at = 0
    for start, stop in [*runs, (first + len(ids), first + len(ids))]:
        begin, end = (min(max(place - first, at), len(ids)) for place in (start, stop))
        parts.append(html.escape(reader.text(name, ids[at:begin]) or ""))
        if quiet := reader.text(name, ids[begin:end]) if end > begin else "":
            parts.append(f'<span class="no-loss">{html.escape(quiet)}</span>')
        at = end
    text = "".join(parts)
    return f"<pre>{text}</pre>\n" if text else ""


def _figure(plan: StepPlan, piece: int, name: str, item: int, count: int, images: ImageReader) -> str:
    [content] = images.read(name, np.array([item]))
    sizes = images.table(name).sizes
    told = [f"{sizes['width'][item]} x {sizes['height'][item]}, {sizes['patches'][item]} patches, {count} tokens"]
    for module, placed in plan.item_modules.items():
        found = np.flatnonzero((placed.items.piece == piece) & (placed.items.item == item))
        if len(found):
            told.append(f"{module}: consumer {int(placed.consumer_of_item[found[0]])} of {placed.num_consumers}")
    kind = KINDS.get(bytes(content[:2]), "octet-stream")
    data = base64.b64encode(content).decode("ascii")
    return (
        f'<figure><img alt="image {item}" src="data:image/{kind};base64,{data}">'
        f"<figcaption>{html.escape('; '.join(told))}</figcaption></figure>\n"
    )
