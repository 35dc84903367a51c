"""What seems to be text, tokens, conversations and items in a file that nobody has described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import fs

from torchmix.formats.column import LISTS, columns_of, leaves_of
from torchmix.formats.documents import FIELDS
from torchmix.formats.source import FoundColumn, FoundKind
from torchmix.modalities.table import all_kinds
from torchmix.storage.stores import is_uri, open_store

# --- What a look at one file finds: its columns, and how much of it is what one trains on.
#
# Only a footer, a schema, the first lines or the first rows of what may be items are read. Cost: a few reads.

ID_BYTES = 4
"""Bytes of text for each id of a vocabulary, about."""


def open_input(file: str) -> Any:
    """A file of this machine or of a store, as pyarrow reads it."""
    if is_uri(file):
        store = open_store(file)
        return store.system.open_input_file(store.path(file))
    return fs.LocalFileSystem().open_input_file(file)


# --- What a file is that is not of the format that its name says, by its first bytes.

FIRST_BYTES = 512
_TAR_AT = 257
_BEGINNINGS = (
    (b"version https://git-lfs", "", "a pointer of Git LFS, and not the data; run `git lfs pull` where it was cloned"),
    (b"<!doctype html", "", "a page of HTML, as servers answer in the place of a file; download it again"),
    (b"<html", "", "a page of HTML, as servers answer in the place of a file; download it again"),
    (b"\x1f\x8b", "gzip", "compressed by gzip; name it .jsonl.gz if it holds JSON lines, else `gunzip` it"),
    (b"\x28\xb5\x2f\xfd", "zstd", "compressed by zstd; name it .jsonl.zst if it holds JSON lines, else `unzstd` it"),
    (b"bzh", "", "compressed by bzip2, which is not read; `bunzip2` it"),
    (b"\xfd7zxz", "", "compressed by xz, which is not read; `unxz` it"),
    (b"pk\x03\x04", "", "a zip archive, which is not read; `unzip` it"),
    (b"par1", "parquet", "Parquet; name it .parquet"),
    (b"arrow1", "arrow", "Arrow; name it .arrow"),
    (b"\xff\xfe", "", "UTF-16; write it as UTF-8, as by `iconv -f UTF-16 -t UTF-8`"),
    (b"\xfe\xff", "", "UTF-16; write it as UTF-8, as by `iconv -f UTF-16 -t UTF-8`"),
    (b"{", "jsonl", "JSON without compression; name it .jsonl if each of its lines is an object"),
)
"""First bytes in lower case, the format or codec that has them, what such a file is and what to do."""


def known_by(begin: bytes, format: str = "") -> str:
    """What a file is, and what to do with it, if its first bytes tell that it is none of a format or codec; else
    nothing."""
    found = next((row for row in _BEGINNINGS if begin.lower().startswith(row[0])), None)
    if begin[_TAR_AT : _TAR_AT + 5] == b"ustar":
        found = (b"", "webdataset", "a tar archive; name it .tar")
    return "" if found is None or found[1] == format else f"by its first bytes it is {found[2]}"


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


def columns_beside(items: Sequence[FoundColumn], schema: pa.Schema) -> Iterator[tuple[str, FoundKind]]:
    """The columns of messages, text and tokens, without those that are part of an item."""
    columns: list[tuple[str, FoundKind]] = [(name, "messages") for name in messages_in(schema)]
    for name, kind in columns + columns_of(schema):
        if not any(f"{name}.".startswith(f"{item.name}.") for item in items):
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


# --- What seems to be items, such as images, in a file that nobody has described.
#
# A name alone makes no item of bytes, and a struct of sound is no image.

LOOKED_AT = 8
"""Rows whose values are looked at."""
_BINARY = {"binary", "large_binary", "binary_view"}


def kind_of(value: Any) -> str | None:
    """The first kind of items as which bytes begin; None: they are of none."""
    return next((kind for kind, row in all_kinds().items() if isinstance(value, bytes) and row.seems_item(value)), None)


def kind_of_paths(values: Sequence[Any]) -> str | None:
    """The first kind of items whose files have such names, all of them; None: there is none."""
    are_texts = bool(values) and all(isinstance(value, str) for value in values)
    return next((kind for kind, row in all_kinds().items() if are_texts and all(map(row.seems_path, values))), None)


def possible_leaves(schema: pa.Schema) -> list[str]:
    """Paths of the leaves of a file that may be items, by their types and names."""
    return [
        leaf.path
        for leaf in leaves_of(schema)
        if str(leaf.type) in _BINARY
        or ("string" in str(leaf.type) and any(row.seems_column(leaf.path) for row in all_kinds().values()))
    ]


def items_in(batch: pa.RecordBatch | pa.Table, leaves: Sequence[str], rows_per_byte: float) -> Iterator[FoundColumn]:
    """The columns of items among some leaves.

    Args:
        batch: The first rows of a file.
        leaves: The leaves of `possible_leaves`.
        rows_per_byte: Rows of the file for each byte of it.
    """
    seen: dict[str, FoundColumn] = {}
    for leaf in leaves:
        values = [value for value in _values(batch, leaf) if value]
        if not values:
            continue
        kind = kind_of(values[0])
        if kind is not None and all(kind_of(value) == kind for value in values):
            name = leaf.removesuffix(".bytes")
            tokens = sum(all_kinds()[kind].usual_tokens(value) for value in values if isinstance(value, bytes))
            of_row = tokens / max(1, min(batch.num_rows, LOOKED_AT))
            seen[name] = FoundColumn(
                name=name,
                kind="items",
                per_byte=of_row * rows_per_byte,
                items=kind,
                item_tokens=tokens / len(values),
            )
        elif (kind := kind_of_paths(values)) is not None:
            name = leaf.removesuffix(".path")
            found = FoundColumn(name=name, kind="item paths", per_byte=0, example=str(values[0]), items=kind)
            seen.setdefault(name, found)
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
