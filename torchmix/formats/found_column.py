"""What a look at one file finds: its columns, and how much of it is what one trains on.

In: a file, before there is a recipe. Out: the columns that hold text, conversations, lists of integers or images, and
the ids that a byte of the file becomes, about; each format's folder says how. Must hold: only a footer, a schema, the
first lines or the first rows of what may be images are read. Cost: a few reads.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pyarrow import fs

from torchmix.storage.stores import is_uri, open_store

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
