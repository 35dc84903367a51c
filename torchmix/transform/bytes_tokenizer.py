"""Text -> tokens without a vocabulary file: the UTF-8 bytes of a document are its ids, and 256 ends it.

In: an Arrow string array. Out: ids and offsets of its documents, or their lengths alone. Must hold: pure and total;
a document of b bytes has b + 1 tokens, so "" is [256]; a null is a document of no tokens; `count_tokens` equals the
lengths that `tokenize` gives. Bytes are not checked to be UTF-8: what the file holds is what the model sees.
Cost: about 0.5 ns a byte, no Python per document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

TRANSFORM_ID = "bytes-1"
"""Name and version; a change of what `tokenize` gives must change it, since catalogs hold sizes made by it."""

END_OF_DOCUMENT = 256
VOCABULARY = 257


def tokenize(texts: pa.Array) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Tokens of every document, end to end.

    Args:
        texts: [documents], string or large_string, with or without nulls.

    Returns:
        ids uint16 [tokens] in 0 ... 256, and offsets int64 [documents + 1]: document i is
        `ids[offsets[i]:offsets[i + 1]]`.
    """
    if texts.null_count:
        ends_itself = texts.is_valid().to_numpy(zero_copy_only=False)
        texts = pc.fill_null(texts, "")  # the bytes behind a null are not promised to be none
    else:
        ends_itself = np.ones(len(texts), dtype=bool)
    offset_type = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    _, offset_buffer, byte_buffer = texts.buffers()
    starts = np.zeros(1, dtype=np.int64)
    if len(texts):
        starts = np.frombuffer(offset_buffer, dtype=offset_type)[texts.offset : texts.offset + len(texts) + 1]
        starts = starts.astype(np.int64)
    text_bytes = np.zeros(0, dtype=np.uint8)
    if starts[-1] > starts[0]:  # Arrow may leave out the buffer of no bytes
        text_bytes = np.frombuffer(byte_buffer, dtype=np.uint8)[starts[0] : starts[-1]]

    offsets = np.zeros(len(starts), dtype=np.int64)
    np.cumsum(np.diff(starts) + ends_itself, out=offsets[1:])
    ids = np.empty(offsets[-1], dtype=np.uint16)
    is_text = np.ones(len(ids), dtype=bool)
    ends = offsets[1:][ends_itself] - 1
    is_text[ends] = False
    ids[is_text] = text_bytes
    ids[ends] = END_OF_DOCUMENT
    return ids, offsets


def count_tokens(texts: pa.Array) -> NDArray[np.int64]:
    """Tokens of each document, int64 [documents], without making them; `texts` as for `tokenize`."""
    num_bytes = pc.add(pc.binary_length(texts).cast(pa.int64()), 1)
    return np.asarray(pc.fill_null(num_bytes, 0).to_numpy(zero_copy_only=False), dtype=np.int64)


def decode(ids: Sequence[int]) -> str:
    """The text of some ids; the end of a document is shown as `<|end|>`, bytes that are no UTF-8 as U+FFFD."""
    parts: list[bytes] = []
    for token in ids:
        parts.append(bytes([token]) if 0 <= token < END_OF_DOCUMENT else _shown(token))
    return b"".join(parts).decode("utf-8", errors="replace")


def _shown(token: int) -> bytes:
    return b"<|end|>" if token == END_OF_DOCUMENT else f"<|{token}|>".encode()


@dataclass(frozen=True, slots=True)
class BytesTokenizer:
    """The functions above as a `tokenizer.Tokenizer`."""

    @property
    def transform_id(self) -> str:
        """See `tokenizer.Tokenizer`."""
        return TRANSFORM_ID

    def tokenize(self, texts: pa.Array, where: str, first_row: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`; nothing is refused."""
        return tokenize(texts)

    def count_tokens(self, texts: pa.Array, where: str, first_row: int) -> NDArray[np.int64]:
        """See `tokenizer.Tokenizer`; nothing is refused."""
        return count_tokens(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """See `tokenizer.Tokenizer`."""
        return decode(ids)


BYTES = BytesTokenizer()
