"""What kind of tokenizer a source's `tokenizer` names.

In: the recipe's words. Out: the kind, which is all that the recipe's fingerprint has of a tokenizer: where a vocabulary
lies must not decide the order, and what is in it is in the catalog's fingerprint. Must hold: decided by the words
alone, before anything is opened. Cost: none.
"""

from __future__ import annotations

from typing import Literal

TokenizerKind = Literal["bytes", "file", "tiktoken"]

TIKTOKEN = "tiktoken:"
"""Begins the name of an encoding of tiktoken."""
FILE_SUFFIX = ".json"


def tokenizer_kind(tokenizer: str) -> TokenizerKind | None:
    """`bytes`; `file` for the path of a tokenizer.json; `tiktoken` for the name of an encoding; None for no such."""
    if tokenizer == "bytes":
        return "bytes"
    if tokenizer.startswith(TIKTOKEN) and tokenizer != TIKTOKEN:
        return "tiktoken"
    if tokenizer.endswith(FILE_SUFFIX) and "\0" not in tokenizer:
        return "file"
    return None
