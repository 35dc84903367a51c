"""Small vocabularies for tests: a trained tokenizer.json, and an encoding that tiktoken finds by name.

Both are made here, in milliseconds; nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.files import random_texts

if TYPE_CHECKING:
    import tiktoken

TINY = "torchmix_tiny"
END = "<|endoftext|>"
MERGES = (b"th", b"the", b" the", b"qu", b"ick", b"ck", b"br", b"ow", b"12", b"34", b"1234", b"al", b"pha", b"ph")


def make_tokenizer(path: Path, *, seed: int = 0, vocabulary: int = 400, specials: tuple[str, ...] = (END,)) -> Path:
    """Train a byte-level BPE on random texts and write its tokenizer.json; `<user>` is an added, ordinary word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(specials),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(random_texts(seed, 300, mean_words=20), trainer)
    tokenizer.add_tokens([AddedToken("<user>", special=False)])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def tiny_encoding() -> dict[str, Any]:
    """What tiktoken makes an Encoding of: all bytes, a few merges, one special token."""
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += sorted(MERGES, key=len)
    return {
        "name": TINY,
        "pat_str": r"\s?\w+|\s?[^\w\s]+|\s+",
        "mergeable_ranks": {piece: rank for rank, piece in enumerate(pieces)},
        "special_tokens": {END: 300},
    }


def install_tiny_encoding(monkeypatch: pytest.MonkeyPatch) -> tiktoken.Encoding:
    """Let `tiktoken:torchmix_tiny` be found, for one test."""
    import tiktoken  # an environment for examples lacks it
    import tiktoken.registry

    tiktoken.list_encoding_names()  # fills the table that a plugin would
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, TINY, tiny_encoding)  # type: ignore[arg-type]
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, TINY, tiktoken.Encoding(**tiny_encoding()))
    return tiktoken.get_encoding(TINY)
