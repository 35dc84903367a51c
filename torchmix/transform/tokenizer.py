"""What every tokenizer gives: the tokens of texts, how many they are, and text again.

In: Arrow arrays of strings. Out: ids and offsets; or lengths; or text. Must hold: pure and total; `count_tokens` equals
the lengths that `tokenize` gives; whatever can alter a length alters `transform_id`, since catalogs hold lengths made
under it. Safe to share between threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """Turns texts into tokens."""

    @property
    def transform_id(self) -> str:
        """What turns a text into ids, with its version."""

    @property
    def vocab_size(self) -> int:
        """Ids go from 0 to one less."""

    @property
    def vocabulary(self) -> str:
        """The same wherever the same text becomes the same ids, in whatever file and by whatever library."""

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[Ids, NDArray[np.int64]]:
        """Tokens of every document, end to end.

        Args:
            texts: [documents], string or large_string, with or without nulls; a null is a document of no tokens.
            first_row: Row of the first text, for messages.

        Returns:
            ids [tokens], and offsets int64 [documents + 1]: document i is `ids[offsets[i]:offsets[i + 1]]`.

        Raises:
            SourceUnreadable: A text is not UTF-8, and the tokenizer needs it to be.
        """

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """Tokens of each document, int64 [documents]; all else as `tokenize`."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, for people to read; an id without text is shown as `<|id|>`."""
