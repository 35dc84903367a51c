"""What a look at one file finds: its columns, and how much of it is what one trains on.

In: a file, before there is a recipe. Out: the columns that hold text or lists of integers, and the ids that a byte of
the file becomes, about; each format's folder says how. Must hold: only a footer, a schema or the first lines are read.
Cost: one or two reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyarrow import fs

from torchmix.formats.column import Kind
from torchmix.storage.stores import is_uri, open_store

ID_BYTES = 4
"""Bytes of text for each id of a vocabulary, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundColumn:
    """A column that could be trained on."""

    name: str
    kind: Kind
    share: float
    """Bytes of text, or number of tokens, for each byte of the file; about."""


def open_input(file: str) -> Any:
    """A file of this machine or of a store, as pyarrow reads it."""
    if is_uri(file):
        store = open_store(file)
        return store.system.open_input_file(store.path(file))
    return fs.LocalFileSystem().open_input_file(file)
