"""The roles of a chat whose messages are structs of a file, so that roles and contents are columns of their own.

In: the column of roles, while a file is scanned. Out: the number of the role of each message. Must hold: a role that
the template lacks is a fault of its row. Cost: that of a small column; the catalog keeps what is found, so that roles
are not read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.catalog.bad_rows import BadRows
from torchmix.errors import SourceUnreadable
from torchmix.formats.source import FormatSource
from torchmix.transform.documents.chat import ChatCutter
from torchmix.transform.documents.interleaved import json_of_rows, parsed

FIELDS = (("content", "role"), ("value", "from"))
"""The fields of a message: what it says, and who says it."""


class RoleNames:
    """Takes the roles of one file; stands where a tokenizer stands."""

    transform_id = "roles-1"
    vocab_size = 1
    vocabulary = "roles"

    def __init__(self, cutter: ChatCutter) -> None:
        """Nothing is seen yet."""
        self._cutter = cutter
        self.roles: dict[int, list[int]] = {}
        """By row."""

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `tokenizer.Tokenizer`; no row has tokens."""
        for row, text in enumerate(json_of_rows(texts), first_row):
            if text is None:
                continue
            try:
                self.roles[row] = [self._cutter.role_number(name) for name in parsed(text)]
            except ValueError as error:
                raise SourceUnreadable(f"row {row}: {error}", row=row) from None
        return np.zeros(len(texts), np.int64)

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`; no row has tokens."""
        return np.zeros(0, np.uint8), np.zeros(len(texts) + 1, np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """See `tokenizer.Tokenizer`."""
        return f"{len(ids)} roles"


def fields_of_messages(source: FormatSource, column: str, path: str | Path) -> tuple[str, str] | None:
    """The columns of contents and roles, where messages are structs of the file; None: they are JSON.

    Args:
        source: Of the column of messages.
        column: Its name.
        path: The file.

    Raises:
        SourceUnreadable: There is no such column, or it holds something else.
    """
    try:
        source.check(path, BadRows())
    except SourceUnreadable as error:
        for content, role in FIELDS:
            if "is a struct" in str(error) and all(f"{column}.{name}" in str(error) for name in (content, role)):
                inner = f"{column}.{content}.text"  # a list of parts, each with its type
                return (inner if inner in str(error) else f"{column}.{content}"), f"{column}.{role}"
        raise
    return None
