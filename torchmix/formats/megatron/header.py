"""The head of a Megatron .idx file: what the two files of a dataset hold, and where the arrays lie.

In: an open .idx. Out: `IndexHeader`, and slices of its arrays. Must hold: a file that is no .idx, is of another
version, holds numbers that are no token ids, or is shorter or longer than its counts say is an error before an array is
read.
Cost: one read of 34 bytes; a slice is one copy.

The layout is that of `_IndexWriter` in Megatron-LM (megatron/core/datasets/indexed_dataset.py), little-endian:

    9 bytes   MMIDIDX\\0\\0
    u64       version, 1
    u8        dtype of the tokens in the .bin, a key of DTYPE_OF_CODE
    u64       S, sequences
    u64       D, entries of the document indices: documents + 1
    i32 [S]   tokens of each sequence
    i64 [S]   first byte of each sequence in the .bin
    i64 [D]   document indices: document d is sequences indices[d] to indices[d + 1]
    i8  [S]   mode of each sequence; only in the multimodal variant, which the size alone tells
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import SourceUnreadable
from torchmix.storage.random_access import RandomAccessFile

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34

DTYPE_OF_CODE: dict[int, np.dtype[np.integer[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
FLOAT_OF_CODE = {6: "float64", 7: "float32"}


class IndexHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a .idx says of itself."""

    num_bytes: int
    """Size of the .idx."""
    dtype: np.dtype[np.integer[Any]]
    """The type of the tokens in the .bin."""
    num_sequences: int
    """S."""
    num_documents: int
    """D - 1."""
    has_modes: bool
    """It is of the multimodal variant."""

    def lengths(self, index: RandomAccessFile, start: int, stop: int) -> NDArray[np.int32]:
        """[stop - start] tokens of sequences from `start` on."""
        return _read(index, HEADER_BYTES, np.dtype("<i4"), start, stop)

    def pointers(self, index: RandomAccessFile, start: int, stop: int) -> NDArray[np.int64]:
        """[stop - start] first bytes of sequences in the .bin."""
        return _read(index, HEADER_BYTES + 4 * self.num_sequences, np.dtype("<i8"), start, stop)

    def document_indices(self, index: RandomAccessFile, start: int, stop: int) -> NDArray[np.int64]:
        """[stop - start] of the D document indices."""
        return _read(index, HEADER_BYTES + 12 * self.num_sequences, np.dtype("<i8"), start, stop)

    def modes(self, index: RandomAccessFile, start: int, stop: int) -> NDArray[np.int8]:
        """[stop - start] modes of sequences, where `has_modes`."""
        offset = HEADER_BYTES + 12 * self.num_sequences + 8 * (self.num_documents + 1)
        return _read(index, offset, np.dtype("<i1"), start, stop)


def read_header(index: RandomAccessFile) -> IndexHeader:
    """Read and check the head of an open .idx.

    Args:
        index: The .idx.

    Raises:
        SourceUnreadable: Not a whole .idx of token ids.
    """
    size = index.num_bytes
    head = index.read(0, HEADER_BYTES)
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise SourceUnreadable(
            f"it begins with {head[:9]!r}, not with {MAGIC!r}; it is no index of Megatron's, name one that is"
        )
    if len(head) < HEADER_BYTES:
        raise SourceUnreadable(f"it has {size} bytes, less than a header; it was cut, copy it again")
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    if version != VERSION:
        raise SourceUnreadable(f"it has version {version}, and {VERSION} is read; it is damaged, or of another kind")
    if code in FLOAT_OF_CODE:
        raise SourceUnreadable(
            f"it holds {FLOAT_OF_CODE[code]} (dtype code {code}), which are no token ids; name one of tokens"
        )
    if code not in DTYPE_OF_CODE:
        raise SourceUnreadable(f"it has dtype code {code}, and 1 to 5 and 8 are token ids; it is damaged")
    num_sequences, num_indices = int.from_bytes(head[18:26], "little"), int.from_bytes(head[26:34], "little")
    plain_bytes = HEADER_BYTES + 12 * num_sequences + 8 * num_indices
    if num_indices < 1 or size not in (plain_bytes, plain_bytes + num_sequences):
        raise SourceUnreadable(
            f"it has {size} bytes, but {num_sequences} sequences and {num_indices} document indices need "
            f"{plain_bytes}, or with modes {plain_bytes + num_sequences}; it was cut or is still being written: copy "
            "it again, or wait"
        )
    return IndexHeader(
        num_bytes=size,
        dtype=DTYPE_OF_CODE[code],
        num_sequences=num_sequences,
        num_documents=num_indices - 1,
        has_modes=size > plain_bytes,
    )


def _read(index: RandomAccessFile, offset: int, dtype: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
    """A slice of an array, copied, so that its memory is aligned and no change of the file can alter it."""
    content = index.read(offset + dtype.itemsize * start, dtype.itemsize * (stop - start))
    if len(content) < dtype.itemsize * (stop - start):
        raise OSError(f"ends inside an array at byte {offset}")
    return np.frombuffer(content, dtype)
