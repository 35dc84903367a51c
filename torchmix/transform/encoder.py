"""What a vocabulary gives: ids of texts, and what is tried on it to know it again.

In: Python strings. Out: ids, or their number; names of tokens and their ids. Must hold: text that looks like a special
token is encoded as plain text: who writes a document must not be able to end it, or to speak for the system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PROBE = (
    "The quick brown fox, 1234567890 3.14 don't DON'T\n\n\t  def f(x):\r\n    return x**2  # na\u00efve caf\u00e9"
    " cafe\u0301 \u00df \ufb01 \u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \u041f\u0440\u0438"
    "\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea"
    " \u00a0\u200b\ufeff <|endoftext|></s>[INST] http://x.y/z?q=1&r=%20 aaaaaaaaaaaaaaaa\x00\x7f"
)
"""Its ids are part of a tokenizer's identity: a library that splits such text otherwise makes another tokenizer."""


class Encoder(Protocol):
    """A vocabulary, and how text is cut into it. Safe to share between threads."""

    @property
    def kind(self) -> str:
        """Name and version of this way to encode; begins the transform's id."""

    @property
    def content(self) -> str:
        """64 hex digits over all that the vocabulary's author decided."""

    @property
    def highest_id(self) -> int:
        """No text gives an id above it."""

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of all texts, end to end, and how many each has.

        Raises:
            SourceUnreadable: One of them cannot be encoded.
        """

    def count(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """How many ids each text has."""

    def id_of_token(self, token: str) -> int | None:
        """The id of a token by its name, special or not; None if there is none."""

    def special_tokens(self) -> Iterable[str]:
        """Names that may stand for ids, for messages."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; ids that are not of the vocabulary are left out."""

    def has_id(self, token: int) -> bool:
        """Whether an id is of the vocabulary."""


def is_refusal(error: BaseException) -> bool:
    """Whether a library's error is about the given text: any error except lack of memory or an interrupt.

    Libraries in Rust raise panics, for example when a regular expression exceeds its stack. A panic is no `Exception`.
    """
    is_panic = type(error).__name__ == "PanicException"
    return is_panic or (isinstance(error, Exception) and not isinstance(error, MemoryError))
