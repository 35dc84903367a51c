"""A vocabulary of tiktoken, by the name of its encoding.

In: a name, as `cl100k_base`. Out: an `encoder.Encoder`. Must hold: special tokens in a text are plain text. tiktoken
looks for the encoding's file in TIKTOKEN_CACHE_DIR, and downloads it if it is not there: a machine without a connection
needs it there beforehand. Cost: that of the library. It encodes a text in one thread, so texts of a batch are dealt to
as many threads as other callers leave processors.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.errors import RecipeError, SourceUnreadable
from torchmix.transform.encoder import is_refusal

KIND = "tiktoken-1"
CHARACTERS_OF_THREAD = 1 << 16
"""Less text is not worth a thread."""
GROUPS_OF_THREAD = 4
"""Texts are dealt in groups: few, since each is handed over, and more than threads, since texts are uneven."""


class TiktokenEncoder:
    """An encoding, opened."""

    def __init__(self, name: str, where: str) -> None:
        """Load the encoding.

        Args:
            name: Of the encoding: one of tiktoken's, or of a plugin of it.
            where: Path of keys in the recipe, for errors.

        Raises:
            RecipeError: The package `tiktoken` is not installed, or has no such encoding.
            SourceUnreadable: The encoding's file is neither in the cache nor can it be loaded.
        """
        try:
            import tiktoken
        except ImportError as error:
            raise RecipeError(
                f"tiktoken:{name} needs the package tiktoken: pip install 'torchmix[tiktoken]'", where
            ) from error
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
        """See `encoder.Encoder`."""
        return KIND

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """See `encoder.Encoder`."""
        parts = self._of_each(texts, self._encoding.encode_ordinary)
        counts = np.fromiter(map(len, parts), np.int64, len(parts))
        return np.fromiter(chain.from_iterable(parts), np.int32, int(counts.sum())), counts

    def count(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """See `encoder.Encoder`."""
        counts = self._of_each(texts, lambda text: len(self._encoding.encode_ordinary(text)))
        return np.array(counts, np.int64)

    def id_of_token(self, token: str) -> int | None:
        """See `encoder.Encoder`."""
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None

    def special_tokens(self) -> Iterable[str]:
        """See `encoder.Encoder`."""
        return sorted(self._encoding.special_tokens_set)

    def decode(self, ids: Sequence[int]) -> str:
        """See `encoder.Encoder`."""
        return str(self._encoding.decode([token for token in ids if self.has_id(token)], errors="replace"))

    def has_id(self, token: int) -> bool:
        """See `encoder.Encoder`."""
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
