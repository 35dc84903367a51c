"""Kinds of tokenizers, by the recipe's words alone."""

from __future__ import annotations

import pytest

from torchmix.recipe.sources import tokenizer_kind


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("bytes", "bytes"),
        ("tokenizer.json", "file"),
        ("/models/llama 3/tokenizer.json", "file"),
        ("bytes.json", "file"),
        ("tiktoken:cl100k_base", "tiktoken"),
        ("tiktoken:", None),
        ("tiktoken", None),
        ("Bytes", None),
        ("", None),
        ("tokenizer.model", None),
        ("a\0.json", None),
    ],
)
def test_the_kind_is_told_by_the_words(words: str, kind: str | None) -> None:
    assert tokenizer_kind(words) == kind
