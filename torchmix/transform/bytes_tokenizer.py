"""Text -> tokens without a vocabulary file: the UTF-8 bytes of a document are its ids, and 256 ends it.

Pure and total; a document of b bytes has b + 1 tokens, so "" is [256]; a null is a document of no tokens;
`count_tokens` equals the lengths that `tokenize` gives. Bytes are not checked to be UTF-8: what the file holds is what
the model sees. Cost: 0.7 ns a byte, including 0.2 ns to make room for the ends; no Python per document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array

TRANSFORM_ID = "bytes-1"
"""Name and version; a change of what `tokenize` gives must change it, since catalogs hold sizes made by it."""

END_OF_DOCUMENT = 256
VOCABULARY = 257

MOST_STRING_BYTES = (1 << 31) - 1
"""Arrow's string arrays hold no more; its large ones do."""


def tokenize(texts: pa.Array) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Tokens of every document, end to end.

    Args:
        texts: [documents], string or large_string, with or without nulls.

    Returns:
        ids uint16 [tokens] in 0 ... 256, and offsets int64 [documents + 1]: document i is
        `ids[offsets[i]:offsets[i + 1]]`.
    """
    content, offsets, ends = _with_room_for_ends(texts)
    ids = content.astype(np.uint16)
    ids[ends] = END_OF_DOCUMENT
    return ids, offsets


def count_tokens(texts: pa.Array) -> NDArray[np.int64]:
    """Tokens of each document, int64 [documents], without making them; `texts` as for `tokenize`."""
    import pyarrow.compute as pc  # not needed for ids, and slow to load

    num_bytes = pc.add(pc.binary_length(texts).cast(pa.int64()), 1)
    return np.asarray(pc.fill_null(num_bytes, 0).to_numpy(zero_copy_only=False), dtype=np.int64)


def _with_room_for_ends(texts: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The bytes of every document with a zero after each, read-only; the offsets of `tokenize`; where the zeros are."""
    import pyarrow.compute as pc  # not needed for ids, and slow to load

    is_large = pa.types.is_large_string(texts.type)
    if not is_large and len(texts) and texts.nbytes + len(texts) > MOST_STRING_BYTES:
        texts, is_large = texts.cast(pa.large_string()), True
    joined = pc.binary_join_element_wise(texts, pa.scalar("\0", texts.type), pa.scalar("", texts.type))
    _, offset_buffer, byte_buffer = joined.buffers()
    offsets = np.zeros(1, np.int64)
    if len(texts):
        offset_type = np.int64 if is_large else np.int32
        offsets = np.frombuffer(offset_buffer, offset_type, len(texts) + 1).astype(np.int64)
    content = np.zeros(0, np.uint8)
    if offsets[-1]:  # Arrow may leave out the buffer of no bytes
        content = np.frombuffer(byte_buffer, np.uint8, int(offsets[-1]))
    stops = offsets[1:]
    return content, offsets, stops[stops > offsets[:-1]] - 1


def decode(ids: Sequence[int]) -> str:
    """The text of some ids; the end of a document is shown as `<|end|>`, bytes that are no UTF-8 as U+FFFD."""
    parts: list[bytes] = []
    for token in ids:
        parts.append(bytes([token]) if 0 <= token < END_OF_DOCUMENT else _shown(token))
    return b"".join(parts).decode("utf-8", errors="replace")


def _shown(token: int) -> bytes:
    return b"<|end|>" if token == END_OF_DOCUMENT else f"<|{token}|>".encode()


class BytesTokenizer(msgspec.Struct, frozen=True):
    """The functions above as a `tokenizer.Tokenizer`."""

    @property
    def transform_id(self) -> str:
        """See `Tokenizer`."""
        return TRANSFORM_ID

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer`."""
        return VOCABULARY

    @property
    def vocabulary(self) -> str:
        """See `Tokenizer`."""
        return "bytes"

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`; nothing is refused."""
        return tokenize(texts)

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `tokenizer.Tokenizer`; nothing is refused."""
        return count_tokens(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return decode(ids)


class BytesAlone(BytesTokenizer, frozen=True):
    """The same documents as plain text: their bytes unchanged, uint8, and 0 for END_OF_DOCUMENT."""

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`; not ids, but of the same lengths."""
        content, offsets, _ = _with_room_for_ends(texts)
        return content, offsets


BYTES = BytesTokenizer()
BYTES_ALONE = BytesAlone()


# --- The values of a column as they are: bytes for tokens.
#
# A row has as many tokens as its values have bytes together, a null none. So all that indexes and reads texts indexes
# and reads the items of a source, too: by page, by range, with checksums.

See = Callable[[int, list[bytes | None], bool], None]
"""Called while a file is scanned with each row and its values; True: they follow those that the row had before."""


class RawBytes:
    """Values as tokens; implements `tokenizer.Tokenizer`."""

    vocab_size = 256
    vocabulary = "raw bytes"

    def __init__(self, transform_id: str, see: See | None = None) -> None:
        """`see` is shown the values of each row that is counted."""
        self.transform_id = transform_id
        self._see = see

    def tokenize(self, texts: pa.Array, first_row: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `tokenizer.Tokenizer`; a row is its bytes."""
        import pyarrow.compute as pc  # not needed for ids, and slow to load

        lengths = np.asarray(pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False), np.int64)
        content = b"".join(value or b"" for value in _bytes(texts))
        return np.frombuffer(content, np.uint8), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def count_tokens(self, texts: pa.Array, first_row: int) -> NDArray[np.int64]:
        """See `tokenizer.Tokenizer`; a row is one value."""
        offsets = pa.array(np.arange(len(texts) + 1))
        return self.count_values(pa.LargeListArray.from_arrays(offsets, texts), first_row, goes_on=False)

    def count_values(self, lists: pa.LargeListArray, first_row: int, *, goes_on: bool) -> Int64Array:
        """Bytes of the values of each row, [rows].

        Args:
            lists: [rows] of strings or binaries, none of them null; its values may be.
            first_row: Row of the first list, in the file.
            goes_on: The first list holds one value that is not in the file, and the last values of the row before.
        """
        borders = lists.offsets.to_numpy().tolist()
        values = _bytes(lists.values)
        counts = np.zeros(len(borders) - 1, np.int64)
        for row, (start, stop) in enumerate(pairwise(borders)):
            of_row = values[start:stop]
            counts[row] = sum(len(value or b"") for value in of_row)
            if self._see is not None:
                is_rest = goes_on and not row
                self._see(first_row + row, of_row[1:] if is_rest else of_row, is_rest)
        return counts

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return f"{len(ids)} bytes"


def _bytes(texts: pa.Array) -> list[bytes | None]:
    binary = pa.large_binary() if pa.types.is_large_string(texts.type) else pa.binary()
    values: list[bytes | None] = texts.view(binary).to_pylist()
    return values
