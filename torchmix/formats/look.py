"""What seems to be text, tokens, conversations and images in a file that nobody has described."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import pyarrow as pa
from pyarrow import fs

from torchmix.errors import ImageUnreadable
from torchmix.formats.column import LISTS, columns_of, leaves_of
from torchmix.formats.documents import FIELDS
from torchmix.recipe.sources import MAX_PIXELS, MIN_PIXELS
from torchmix.storage.stores import is_uri, open_store
from torchmix.transform.images.header import header_of

# --- What a look at one file finds: its columns, and how much of it is what one trains on.
#
# Only a footer, a schema, the first lines or the first rows of what may be images are read. Cost: a few reads.

FoundKind = Literal["tokens", "text", "messages", "images", "image paths"]
ID_BYTES = 4
"""Bytes of text for each id of a vocabulary, about."""


class FoundColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column that could be trained on."""

    name: str
    kind: FoundKind
    share: float
    """Bytes of text, or number of tokens, for each byte of the file; about. 0 of paths."""
    example: str = ""
    """A value, of a column of paths."""


def open_input(file: str) -> Any:
    """A file of this machine or of a store, as pyarrow reads it."""
    if is_uri(file):
        store = open_store(file)
        return store.system.open_input_file(store.path(file))
    return fs.LocalFileSystem().open_input_file(file)


# --- What seems to be text, tokens and conversations in a file that nobody has described.
#
# A message has one of the pairs of fields that `messages` reads.


def are_messages(values: Sequence[Any]) -> bool:
    """Whether values of JSON, none of them null, are lists of messages, not all of them empty."""
    return any(values) and all(isinstance(value, list) and all(map(_is_message, value)) for value in values)


def messages_in(schema: pa.Schema) -> list[str]:
    """The columns that are lists of structs with the fields of a message."""
    paths = {leaf.path for leaf in leaves_of(schema) if leaf.num_lists == 1 and "string" in str(leaf.type)}
    return [
        path.removesuffix(f".{content}")
        for content, role in FIELDS
        for path in sorted(paths)
        if path.endswith(f".{content}") and f"{path.removesuffix(content)}{role}" in paths
    ]


def columns_beside(images: Sequence[FoundColumn], schema: pa.Schema) -> Iterator[tuple[str, FoundKind]]:
    """The columns of messages, text and tokens, without those that are part of an image."""
    columns: list[tuple[str, FoundKind]] = [(name, "messages") for name in messages_in(schema)]
    for name, kind in columns + columns_of(schema):
        if not any(f"{name}.".startswith(f"{image.name}.") for image in images):
            yield name, kind


def flat_items(row: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The keys and values of an object of JSON; a key of an object inside it is a path, `meta.text`, after `path`."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from flat_items(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and any(content in value and role in value for content, role in FIELDS)


# --- What seems to be images in a file that nobody has described.
#
# A name alone makes no image of bytes, and a struct of sound is none.

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
