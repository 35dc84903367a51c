"""A vocabulary, and the ids that begin and end a document -> a tokenizer.

In: an encoder and two ids, or none. Out: a `tokenizer.Tokenizer`. Must hold: a document is begin, ids of its text, end;
an empty text has these two alone, a null has nothing. The transform's id follows from the vocabulary's content, the two
ids and what the installed library makes of a probe, not from a path or a library's version: whatever gives the same ids
is the same tokenizer. Cost: the encoder's, and about 50 ns a token; lengths alone cost the encoder's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.transform.encoder import PROBE, Encoder
from torchmix.transform.text_batches import text_batches
from torchmix.transform.tokenizer import Ids


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
        identity = json.dumps([encoder.content, begin_id, end_id, probe.tolist()], separators=(",", ":"))
        self.transform_id = f"{encoder.kind}:{hashlib.sha256(identity.encode('ascii')).hexdigest()[:16]}"

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[Ids, NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`."""
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
        """See `tokenizer.Tokenizer`."""
        lengths: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        around = len(self._begin) + len(self._end)
        for batch in text_batches(texts, first_row):
            lengths.append(self._encoder.count([text or "" for text in batch]) + around * _present(batch))
        return np.concatenate(lengths)

    def decode(self, ids: Sequence[int]) -> str:
        """See `tokenizer.Tokenizer`."""
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
