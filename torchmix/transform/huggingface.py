"""A vocabulary in a tokenizer.json, as Hugging Face's `tokenizers` reads it.

In: the file. Out: an `encoder.Encoder`. Must hold: truncation and padding that the file asks for are off, no template
adds tokens, special tokens in a text are plain text, and a file with random encoding is an error. Added tokens that
the file does not call special are ordinary words of the vocabulary, and are found in texts. Cost: that of the library,
which encodes the texts of a batch in as many threads as there are processors and without Python's lock; opening takes
about a second for a vocabulary of 200,000.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.errors import RecipeError, SourceUnreadable
from torchmix.transform.encoder import is_refusal

KIND = "huggingface-1"
NOT_CONTENT = ("truncation", "padding")
"""Keys of the file that do not affect the ids."""


class HuggingFaceEncoder:
    """A tokenizer.json, opened."""

    def __init__(self, path: Path, where: str) -> None:
        """Read the file.

        Args:
            path: The file.
            where: Path of keys in the recipe, for errors.

        Raises:
            RecipeError: The package `tokenizers` is not installed.
            SourceUnreadable: The file is missing, no tokenizer, or not deterministic.
        """
        self._path, self._where = path, where
        try:
            import tokenizers
        except ImportError as error:
            raise RecipeError(
                f"{str(path)!r} needs the package tokenizers: pip install 'torchmix[tokenizers]'", where
            ) from error
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SourceUnreadable(
                f"{where}: cannot read {path}: {getattr(error, 'strerror', None) or error}; paths are relative to the "
                "recipe's folder"
            ) from error
        try:
            content: dict[str, Any] = json.loads(text)
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises Exception itself for what it does not parse
            raise SourceUnreadable(
                f"{where}: {path} is no tokenizer.json that tokenizers {tokenizers.__version__} reads: {error}"
            ) from error
        if dropout := (content.get("model") or {}).get("dropout"):
            raise SourceUnreadable(
                f"{where}: {path} sets the model's dropout to {dropout}, so that a text has other tokens each time; "
                "set it to null"
            )
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        kept = {key: value for key, value in content.items() if key not in NOT_CONTENT}
        plain = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        self.content = hashlib.sha256(plain.encode("ascii")).hexdigest()
        self.highest_id = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    @property
    def kind(self) -> str:
        """See `encoder.Encoder`."""
        return KIND

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """See `encoder.Encoder`."""
        encodings = self._encodings(texts)
        counts = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids = chain.from_iterable(encoding.ids for encoding in encodings)
        return np.fromiter(ids, np.int32, int(counts.sum())), counts

    def count(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """See `encoder.Encoder`."""
        encodings = self._encodings(texts)
        return np.fromiter(map(len, encodings), np.int64, len(encodings))

    def id_of_token(self, token: str) -> int | None:
        """See `encoder.Encoder`."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def special_tokens(self) -> Iterable[str]:
        """See `encoder.Encoder`."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def decode(self, ids: Sequence[int]) -> str:
        """See `encoder.Encoder`."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def has_id(self, token: int) -> bool:
        """See `encoder.Encoder`."""
        return self._tokenizer.id_to_token(token) is not None

    def _encodings(self, texts: Sequence[str]) -> list[Any]:
        try:
            encodings: list[Any] = self._tokenizer.encode_batch_fast(
                list(texts), is_pretokenized=False, add_special_tokens=False
            )
        except BaseException as error:  # the library's own, as for a word of a vocabulary without an unknown token
            if not is_refusal(error):
                raise
            raise SourceUnreadable(f"{self._where}: {self._path} cannot encode a text: {error}") from error
        return encodings
