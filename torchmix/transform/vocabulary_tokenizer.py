"""Vocabularies of Hugging Face's `tokenizers` and of tiktoken -> tokenizers."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.errors import RecipeError, SourceUnreadable
from torchmix.recipe.fingerprint import digest_of
from torchmix.transform.tokenizer import PROBE, Encoder, Ids, SpecialToken, is_refusal, text_batches

# --- A vocabulary, and the ids that begin and end a document -> a tokenizer.
#
# A document is begin, ids of its text, end; an empty text has these two alone, a null has nothing. The transform's id
# follows from the vocabulary's content, the two ids and what the installed library makes of a probe, not from a path
# or a library's version: whatever gives the same ids is the same tokenizer. Cost: the encoder's, and about 50 ns a
# token; lengths alone cost the encoder's.


class VocabularyTokenizer:
    """A tokenizer over any encoder."""

    def __init__(self, encoder: Encoder, *, begin_id: int | None, end_id: int | None) -> None:
        """Take an encoder; `begin_id` and `end_id` stand around each document, or nothing where None."""
        self._encoder = encoder
        self._begin = [] if begin_id is None else [begin_id]
        self._end = [] if end_id is None else [end_id]
        highest = max(encoder.highest_id, *self._begin, *self._end, 0)
        self.vocab_size = highest + 1
        self._dtype = np.dtype(np.uint16 if highest < 1 << 16 else np.int32)
        probe, _ = encoder.encode([PROBE])
        self.vocabulary = hashlib.sha256(probe.astype("<i8").tobytes()).hexdigest()[:16]
        self.transform_id = f"{encoder.kind}:{digest_of([encoder.content, begin_id, end_id, probe.tolist()])}"

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[Ids, NDArray[np.int64]]:
        """See `Tokenizer`."""
        parts: list[Ids] = [np.zeros(0, self._dtype)]
        lengths: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        for batch in text_batches(texts, first_row):
            ids, counts = self._encoder.encode([text or "" for text in batch])
            present = _present(batch)
            framed, tokens = self._frame(ids, counts, present)
            parts.append(framed)
            lengths.append(tokens)
        return np.concatenate(parts), np.cumsum(np.concatenate(lengths))

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `Tokenizer`."""
        lengths: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        around = len(self._begin) + len(self._end)
        for batch in text_batches(texts, first_row):
            lengths.append(self._encoder.count([text or "" for text in batch]) + around * _present(batch))
        return np.concatenate(lengths)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        parts: list[str] = []
        for known, tokens in groupby(map(int, ids), key=self._encoder.has_id):
            run = list(tokens)
            parts.append(self._encoder.decode(run) if known else "".join(f"<|{token}|>" for token in run))
        return "".join(parts)

    def _frame(
        self, ids: NDArray[np.int32], counts: NDArray[np.int64], present: NDArray[np.bool_]
    ) -> tuple[Ids, NDArray[np.int64]]:
        """Documents with what begins and ends them, end to end, and the tokens of each."""
        tokens = counts + (len(self._begin) + len(self._end)) * present
        stops = np.cumsum(tokens)
        framed = np.empty(int(tokens.sum()), self._dtype)
        is_text = np.ones(len(framed), dtype=bool)
        for token, places in ((self._begin, (stops - tokens)[present]), (self._end, stops[present] - 1)):
            if token:
                framed[places] = token
                is_text[places] = False
        framed[is_text] = ids
        return framed, tokens


def _present(batch: list[str | None]) -> NDArray[np.bool_]:
    return np.fromiter((text is not None for text in batch), bool, len(batch))


# --- A vocabulary in a tokenizer.json, as Hugging Face's `tokenizers` reads it.
#
# Truncation and padding that the file asks for are off, no template adds tokens, special tokens in a text are plain
# text, and a file with random encoding is an error. Added tokens that the file does not call special are ordinary
# words of the vocabulary, and are found in texts.

HUGGINGFACE_KIND = "huggingface-1"
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
            raise RecipeError(f"{str(path)!r} needs the package tokenizers: pip install tokenizers", where) from error
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
        """See `Encoder`."""
        return HUGGINGFACE_KIND

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """See `Encoder`."""
        encodings = self._encodings(texts)
        counts = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids = chain.from_iterable(encoding.ids for encoding in encodings)
        return np.fromiter(ids, np.int32, int(counts.sum())), counts

    def count(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """See `Encoder`."""
        encodings = self._encodings(texts)
        return np.fromiter(map(len, encodings), np.int64, len(encodings))

    def id_of_token(self, token: str) -> int | None:
        """See `Encoder`."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def special_tokens(self) -> Iterable[str]:
        """See `Encoder`."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def control_tokens(self) -> dict[str, SpecialToken]:
        """The tokens that the file calls special, by name: those that a text never becomes."""
        return {
            token.content: SpecialToken(id=number, lstrip=token.lstrip, rstrip=token.rstrip)
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content
        }

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters of each token of a text: first, and one behind the last."""
        found: list[tuple[int, int]] = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return found

    @property
    def begins_texts(self) -> bool:
        """Whether the first token of a text differs from the same characters behind a special token."""
        return '"prepend_scheme":"first"' in self._tokenizer.to_str(pretty=False)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Encoder`."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def has_id(self, token: int) -> bool:
        """See `Encoder`."""
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


# --- A vocabulary of tiktoken, by the name of its encoding.
#
# Special tokens in a text are plain text. tiktoken looks for the encoding's file in TIKTOKEN_CACHE_DIR, and downloads
# it if it is not there: a machine without a connection needs it there beforehand.

TIKTOKEN_KIND = "tiktoken-1"
CHARACTERS_OF_THREAD = 1 << 16
"""Less text is not worth a thread."""
GROUPS_OF_THREAD = 4
"""Texts are dealt in groups: few, since each is handed over, and more than threads, since texts are uneven."""


class TiktokenEncoder:
    """An encoding, opened."""

    def __init__(self, name: str, where: str) -> None:
        """Load the encoding.

        Args:
            name: The name of the encoding: one of tiktoken's, or of a plugin of it.
            where: Path of keys in the recipe, for errors.

        Raises:
            RecipeError: The package `tiktoken` is not installed, or has no such encoding.
            SourceUnreadable: The encoding's file is neither in the cache nor can it be loaded.
        """
        try:
            import tiktoken
        except ImportError as error:
            raise RecipeError(f"tiktoken:{name} needs the package tiktoken: pip install tiktoken", where) from error
        self._where = where
        known = tiktoken.list_encoding_names()
        if name not in known:
            raise RecipeError(f"tiktoken {tiktoken.__version__} has no encoding {name!r}; it has {known}", where)
        try:
            self._encoding = tiktoken.get_encoding(name)
        except Exception as error:  # of the network, the disk, or the hash of the file
            raise SourceUnreadable(
                f"{where}: tiktoken cannot load {name}: {error}. Without a connection, copy the folder that "
                "TIKTOKEN_CACHE_DIR names from a machine that has loaded it, and set TIKTOKEN_CACHE_DIR here"
            ) from error
        self.highest_id = int(self._encoding.max_token_value)
        self.content = _content(self._encoding)
        self._callers = 0
        self._counting = threading.Lock()

    @property
    def kind(self) -> str:
        """See `Encoder`."""
        return TIKTOKEN_KIND

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """See `Encoder`."""
        parts = self._of_each(texts, self._encoding.encode_ordinary)
        counts = np.fromiter(map(len, parts), np.int64, len(parts))
        return np.fromiter(chain.from_iterable(parts), np.int32, int(counts.sum())), counts

    def count(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """See `Encoder`."""
        counts = self._of_each(texts, lambda text: len(self._encoding.encode_ordinary(text)))
        return np.array(counts, np.int64)

    def id_of_token(self, token: str) -> int | None:
        """See `Encoder`."""
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None

    def special_tokens(self) -> Iterable[str]:
        """See `Encoder`."""
        return sorted(self._encoding.special_tokens_set)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Encoder`."""
        return str(self._encoding.decode([token for token in ids if self.has_id(token)], errors="replace"))

    def has_id(self, token: int) -> bool:
        """See `Encoder`."""
        try:
            self._encoding.decode_single_token_bytes(token)
        except (KeyError, OverflowError):
            return False
        return True

    def _of_each(self, texts: Sequence[str], call: Callable[[str], Any]) -> list[Any]:
        """Results of a call on each text, in threads where there is enough to do."""
        with self._counting:
            self._callers += 1
            most = _num_processors() // self._callers
        try:
            num_threads = min(most, len(texts), sum(map(len, texts)) // CHARACTERS_OF_THREAD)
            if num_threads < 2:
                return [call(text) for text in texts]
            some = -(-len(texts) // (num_threads * GROUPS_OF_THREAD))
            groups = [texts[start : start + some] for start in range(0, len(texts), some)]
            with ThreadPoolExecutor(num_threads, "torchmix-tiktoken") as pool:
                return list(chain.from_iterable(pool.map(lambda group: [call(text) for text in group], groups)))
        except BaseException as error:
            if not is_refusal(error):
                raise
            raise SourceUnreadable(f"{self._where}: {self._encoding.name} cannot encode a text: {error}") from error
        finally:
            with self._counting:
                self._callers -= 1


def _num_processors() -> int:
    # Some systems cannot say which processors are ours.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _content(encoding: Any) -> str:
    """All that an encoding is made of: how text is split, what is merged first, and special tokens."""
    digest = hashlib.sha256()
    for part in (encoding._pat_str.encode(), *_tokens(encoding._mergeable_ranks), b"", *_tokens(_named(encoding))):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _named(encoding: Any) -> dict[bytes, int]:
    return {name.encode(): token for name, token in encoding._special_tokens.items()}


def _tokens(id_of_token: dict[bytes, int]) -> Iterable[bytes]:
    for token, number in sorted(id_of_token.items(), key=lambda item: item[1]):
        yield number.to_bytes(8, "little") + token
