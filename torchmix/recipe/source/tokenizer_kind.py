"""What kind of tokenizer a source's `tokenizer` names.

In: the recipe's words. Out: the kind. Must hold: the words alone decide, before anything is opened. Cost: none.

The recipe's fingerprint holds only the kind of a tokenizer: the path of a vocabulary must not decide the order, and its
content is in the catalog's fingerprint.
"""

from __future__ import annotations

from typing import Literal

TokenizerKind = Literal["bytes", "file", "tiktoken"]

TIKTOKEN = "tiktoken:"
"""Prefix of the name of a tiktoken encoding."""
FILE_SUFFIX = ".json"


def tokenizer_kind(tokenizer: str) -> TokenizerKind | None:
    """`bytes`; `file` for the path of a tokenizer.json; `tiktoken` for the name of an encoding; else None."""
    if tokenizer == "bytes":
        return "bytes"
    if tokenizer.startswith(TIKTOKEN) and tokenizer != TIKTOKEN:
        return "tiktoken"
    if tokenizer.endswith(FILE_SUFFIX) and "\0" not in tokenizer:
        return "file"
    return None
