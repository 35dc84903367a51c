"""What seems to be images in a file that nobody has described.

In: first rows of the columns that may hold images, as Arrow has them; or single values. Out: the columns whose values
are images by their first bytes, or end as the names of images do. Must hold: a name alone makes no image of bytes, and
a struct of sound is none. Cost: that of the headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pyarrow as pa

from torchmix.errors import ImageUnreadable
from torchmix.formats.array_rows import LISTS
from torchmix.formats.column import leaves_of
from torchmix.formats.found_column import FoundColumn
from torchmix.recipe.source.images import MAX_PIXELS, MIN_PIXELS
from torchmix.transform.images.header import header_of

LOOKED_AT = 8
"""Rows whose values are looked at."""
TOKEN_PIXELS = 28 * 28
"""Pixels that become a token by the default rule."""
_BEGINS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_AVIF = (b"ftypavif", b"ftypavis")
_PATH = re.compile(r".+\.(?:jpe?g|png|webp|avif|gif|bmp|tiff?)", re.IGNORECASE | re.DOTALL)
_NAMES_IMAGES = re.compile(r"image|img|picture|photo", re.IGNORECASE)
_BINARY = {"binary", "large_binary", "binary_view"}


def is_image(value: bytes) -> bool:
    """Whether bytes begin as an image does."""
    return value.startswith(_BEGINS) or (value[:4], value[8:12]) == (b"RIFF", b"WEBP") or value[4:12] in _AVIF


def is_path(value: str) -> bool:
    """Whether a text ends as the name of an image file does."""
    return len(value) < 4096 and _PATH.fullmatch(value) is not None


def tokens_of(value: bytes) -> float:
    """About how many tokens an image becomes by the default rule."""
    try:
        header = header_of(value)
    except ImageUnreadable:
        return MIN_PIXELS / TOKEN_PIXELS
    return min(MAX_PIXELS, max(MIN_PIXELS, header.width * header.height)) / TOKEN_PIXELS


def possible_leaves(schema: pa.Schema) -> list[str]:
    """Paths of the leaves of a file that may be images, by their types and names."""
    return [
        leaf.path
        for leaf in leaves_of(schema)
        if str(leaf.type) in _BINARY or ("string" in str(leaf.type) and _NAMES_IMAGES.search(leaf.path))
    ]


def images_in(batch: pa.RecordBatch | pa.Table, leaves: Sequence[str], rows_per_byte: float) -> Iterator[FoundColumn]:
    """The columns of images among some leaves.

    Args:
        batch: The first rows of a file.
        leaves: Of `possible_leaves`.
        rows_per_byte: Rows of the file for each byte of it.
    """
    seen: dict[str, FoundColumn] = {}
    for leaf in leaves:
        values = [value for value in _values(batch, leaf) if value]
        if not values:
            continue
        images = [value for value in values if isinstance(value, bytes) and is_image(value)]
        if len(images) == len(values):
            name = leaf.removesuffix(".bytes")
            tokens = sum(map(tokens_of, images)) / max(1, min(batch.num_rows, LOOKED_AT))
            seen[name] = FoundColumn(name=name, kind="images", share=tokens * rows_per_byte)
        elif all(isinstance(value, str) and is_path(value) for value in values):
            name = leaf.removesuffix(".path")
            seen.setdefault(name, FoundColumn(name=name, kind="image paths", share=0, example=str(values[0])))
    yield from seen.values()


def _values(batch: pa.RecordBatch | pa.Table, leaf: str) -> list[bytes | str | None]:
    """Values of the first rows of a leaf, those of lists one after the other."""
    top, *fields = leaf.split(".")
    if batch.schema.get_field_index(top) < 0:
        return []
    array = batch.column(top).slice(0, LOOKED_AT)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif isinstance(array.type, LISTS):
            array = array.flatten()
        elif isinstance(array.type, pa.StructType) and fields and array.type.get_field_index(fields[0]) >= 0:
            array = array.field(fields.pop(0)).filter(array.is_valid())
        else:
            break
    is_plain = not fields and ("string" in str(array.type) or str(array.type) in _BINARY)
    return array.to_pylist() if is_plain else []
