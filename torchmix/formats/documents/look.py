"""What seems to be conversations in a file that nobody has described.

In: the schema of a file, or values of a key of JSON lines. Out: the columns of lists of messages. Must hold: a message
has one of the pairs of fields that `messages` reads. Cost: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from torchmix.formats.column import leaves_of
from torchmix.formats.documents.roles import FIELDS


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


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and any(content in value and role in value for content, role in FIELDS)
