"""What seems to be text, tokens and conversations in a file that nobody has described.

In: the schema of a file, or objects of JSON. Out: the columns of lists of messages, and the others that one may train
on. Must hold: a message has one of the pairs of fields that `messages` reads. Cost: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from torchmix.formats.column import columns_of, leaves_of
from torchmix.formats.documents.roles import FIELDS
from torchmix.formats.found_column import FoundColumn, FoundKind


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
