"""The recipe's words for a tokenizer -> the tokenizer, each opened once.

What the vocabulary does not have is an error that names the nearest it has. Cost: reading the vocabulary, once for all
sources that share it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from torchmix.errors import RecipeError
from torchmix.recipe.sources import TIKTOKEN, tokenizer_kind
from torchmix.recipe.structs import Fim
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.fim import FimTokenizer
from torchmix.transform.tokenizer import Encoder, SpecialToken, Tokenizer
from torchmix.transform.vocabulary_tokenizer import HuggingFaceEncoder, TiktokenEncoder, VocabularyTokenizer


class Tokenizers:
    """Tokenizers of the sources of one recipe."""

    def __init__(self, directory: Path, *, for_bytes: Tokenizer = BYTES) -> None:
        """Nothing is opened yet.

        Args:
            directory: The recipe's folder, which paths are relative to.
            for_bytes: What the word `bytes` means: one that gives the same lengths.
        """
        self.directory = directory
        self._for_bytes = for_bytes
        self._encoders: dict[str, Encoder] = {}
        self._opened: dict[tuple[str, int | str | None, int | str | None], Tokenizer] = {}

    def open(
        self,
        source: str,
        tokenizer: str,
        *,
        begin_id: int | str | None = None,
        end_id: int | str | None = None,
        fim: Fim | None = None,
    ) -> Tokenizer:
        """The tokenizer of a source.

        Args:
            source: Its name, for errors.
            tokenizer: `bytes`, `tiktoken:NAME`, or the path of a tokenizer.json.
            begin_id, end_id: What stands before and after the ids of a text: an id, the name of a token, or nothing.
            fim: Which texts have their middle last, and how; None: none.

        Raises:
            RecipeError: A package is missing, or a name that the vocabulary does not have.
            SourceUnreadable: A file is missing, or no tokenizer.
        """
        key = (tokenizer, begin_id, end_id)
        if key not in self._opened:
            self._opened[key] = self._open(f"sources.{source}", *key)
        opened = self._opened[key]
        if fim is None:
            return opened
        where = f"sources.{source}.fim.ids"
        ids = tuple(self.token_id(source, tokenizer, token, f"{where}[{i}]") for i, token in enumerate(fim.ids))
        is_bytes = tokenizer_kind(tokenizer) == "bytes"
        around = (0, 1) if is_bytes else (int(begin_id is not None), int(end_id is not None))
        return FimTokenizer(inner=opened, fim=fim, ids=ids, around=around)  # type: ignore[arg-type]

    def _open(self, where: str, tokenizer: str, begin_id: int | str | None, end_id: int | str | None) -> Tokenizer:
        if tokenizer_kind(tokenizer) == "bytes":
            return self._for_bytes
        encoder = self._encoder(where, tokenizer)
        return VocabularyTokenizer(
            encoder,
            begin_id=_id(encoder, begin_id, f"{where}.begin_id"),
            end_id=_id(encoder, end_id, f"{where}.end_id"),
        )

    def token_id(self, source: str, tokenizer: str, token: int | str | None, where: str) -> int | None:
        """The id that a recipe names at `where`; None for None.

        Raises:
            RecipeError, SourceUnreadable: As `open`.
        """
        if token is None or isinstance(token, int):
            return token
        return _id(self._encoder(f"sources.{source}", tokenizer), token, where)

    def special_tokens(self, source: str, tokenizer: str) -> dict[str, int]:
        """The special tokens of a vocabulary, with their ids; errors as `open`."""
        encoder = self._encoder(f"sources.{source}", tokenizer)
        found = {name: encoder.id_of_token(name) for name in encoder.special_tokens()}
        return {name: token for name, token in found.items() if token is not None}

    def control_tokens(self, source: str, tokenizer: str, where: str) -> dict[str, SpecialToken]:
        """The tokens that a chat template of a file writes and a text never becomes, by name.

        Raises:
            RecipeError: Its tokenizer is no tokenizer.json, or one that would encode parts of a text otherwise.
            SourceUnreadable: As `open`.
        """
        encoder = None if tokenizer_kind(tokenizer) == "bytes" else self._encoder(f"sources.{source}", tokenizer)
        if not isinstance(encoder, HuggingFaceEncoder):
            raise RecipeError(f"a chat template of a file needs a tokenizer.json, and not {tokenizer}", where)
        if encoder.begins_texts:
            raise RecipeError(
                f"{tokenizer} puts a space before the first text alone (prepend_scheme first), so that texts between "
                "special tokens cannot be encoded one by one; write what the template does into turns",
                where,
            )
        return encoder.control_tokens()

    def offsets(self, source: str, tokenizer: str) -> Callable[[str], list[tuple[int, int]]]:
        """Gives the characters of each token of a text; the tokenizer is one that `control_tokens` takes."""
        encoder = self._encoder(f"sources.{source}", tokenizer)
        assert isinstance(encoder, HuggingFaceEncoder), "control_tokens has refused others"
        return encoder.offsets

    def has_id(self, source: str, tokenizer: str, token: int) -> bool:
        """Whether an id is of a vocabulary; errors as `open`."""
        return self._encoder(f"sources.{source}", tokenizer).has_id(token)

    def _encoder(self, where: str, tokenizer: str) -> Encoder:
        if tokenizer not in self._encoders:
            place = f"{where}.tokenizer"
            self._encoders[tokenizer] = (
                TiktokenEncoder(tokenizer.removeprefix(TIKTOKEN), place)
                if tokenizer_kind(tokenizer) == "tiktoken"
                else HuggingFaceEncoder(self.directory / tokenizer, place)
            )
        return self._encoders[tokenizer]


def _id(encoder: Encoder, token: int | str | None, where: str) -> int | None:
    if token is None or isinstance(token, int):
        return token
    found = encoder.id_of_token(token)
    if found is None:
        names = list(encoder.special_tokens())
        close = difflib.get_close_matches(token, names, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise RecipeError(
            f"the tokenizer has no token {token!r}{hint}; its special tokens: {', '.join(names[:20]) or 'none'}", where
        )
    return found
