"""Files of Megatron datasets, and the heads of their .idx files."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import SourceUnreadable
from torchmix.storage.find_files import find_files, find_objects, nearest_names
from torchmix.storage.random_access import RandomAccessFile
from torchmix.storage.stores import is_uri

# --- The head of a Megatron .idx file: what the two files of a dataset hold, and where the arrays lie.
#
# A file that is no .idx, is of another version, holds numbers that are no token ids, or is shorter or longer than its
# counts say is an error before an array is read. Cost: one read of 34 bytes; a slice is one copy.
#
# The layout is that of `_IndexWriter` in Megatron-LM (megatron/core/datasets/indexed_dataset.py), little-endian:
#
#     9 bytes   MMIDIDX\0\0
#     u64       version, 1
#     u8        dtype of the tokens in the .bin, a key of DTYPE_OF_CODE
#     u64       S, sequences
#     u64       D, entries of the document indices: documents + 1
#     i32 [S]   tokens of each sequence
#     i64 [S]   first byte of each sequence in the .bin
#     i64 [D]   document indices: document d is sequences indices[d] to indices[d + 1]
#     i8  [S]   mode of each sequence; only in the multimodal variant, which the size alone tells

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


# --- Files of Megatron datasets: prefixes, .bin, .idx and globs of them -> the .bin files.
#
# A path that leads to no whole pair is an error that says what is missing. Nothing is opened.

BIN, IDX = ".bin", ".idx"


def find_datasets(name: str, patterns: Sequence[str], directory: Path) -> list[str]:
    """Find the .bin files of one source.

    Args:
        name: The source, for messages.
        patterns: Megatron's prefixes (`/p/web_text_document`, `s3://bucket/web_text_document`), .bin or .idx files,
            or globs of any of these.
        directory: The recipe's folder.

    Raises:
        SourceUnreadable: A pattern that leads to no dataset, with the names that come nearest, or to half of one.
    """
    path_of_place: dict[str, str] = {}
    for pattern in patterns:
        for prefix in _prefixes(name, pattern, directory):
            place = prefix + BIN if is_uri(prefix) else os.path.normpath(_place(directory, prefix + BIN))
            path_of_place.setdefault(place, prefix + BIN)
    for path in path_of_place.values():
        if not is_uri(path):  # a store is asked when the .bin is opened
            _check_pair(name, path, directory)
    return sorted(path_of_place.values())


def index_path(bin_path: str) -> str:
    """The .idx that belongs to a .bin."""
    return bin_path.removesuffix(BIN) + IDX


def _prefixes(name: str, pattern: str, directory: Path) -> list[str]:
    if is_uri(pattern):
        return _prefixes_in_store(name, pattern)
    if pattern.endswith((BIN, IDX)):
        return [path[: -len(BIN)] for path in find_files(name, [pattern], directory)]
    if any(_is_file(directory, pattern + suffix) for suffix in (BIN, IDX)):
        return [pattern]
    if (directory / pattern).is_dir():
        raise SourceUnreadable(
            f"source {name!r}: {pattern!r} in {directory} is a folder; name its datasets, as "
            f"{pattern.rstrip('/') + '/*' + IDX!r}"
        )
    if glob.has_magic(pattern):
        with suppress(SourceUnreadable):
            return [path[: -len(IDX)] for path in find_files(name, [pattern + IDX], directory)]
    raise SourceUnreadable(
        f"source {name!r}: there is no dataset {pattern + BIN!r} with {pattern + IDX!r} in {directory}"
        f"{nearest_names(directory / (pattern + BIN))}"
    )


def _prefixes_in_store(name: str, pattern: str) -> list[str]:
    """A URI may be a prefix or a glob of prefixes, which its .idx tells; whether each has its .bin, the .bin does."""
    stem = pattern[: -len(BIN)] if pattern.endswith((BIN, IDX)) else pattern
    return [uri[: -len(IDX)] for uri in find_objects(name, stem + IDX)]


def _is_file(directory: Path, path: str) -> bool:
    return os.path.isfile(_place(directory, path))  # noqa: PTH113 - see `_place`


def _place(directory: Path, path: str) -> str:
    """Where a file lies; pathlib takes several times as long, which counts with hundreds of files."""
    return os.path.join(directory, path)  # noqa: PTH118


def _check_pair(name: str, path: str, directory: Path) -> None:
    for half, other in ((path, index_path(path)), (index_path(path), path)):
        if not _is_file(directory, half):
            raise SourceUnreadable(
                f"source {name!r}: {directory / other} has no {Path(half).name} beside it; a dataset is both files: "
                "copy the other one there, too"
            )
