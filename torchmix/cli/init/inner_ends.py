"""A look into a Megatron dataset: do its documents hold the id that ends them before their end, too?

In: a .bin with its .idx, and the tokenizer's EOD if the user gave it. Out: `InnerEnds`. Must hold: the id is only
guessed where every document that was looked at ends with it. Cost: reading LOOK_BYTES of the .bin at most, in RUNS
places spread evenly over its documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.errors import located
from torchmix.formats.megatron.files import index_path
from torchmix.formats.megatron.header import IndexHeader, read_header
from torchmix.storage.random_access import LocalFile

LOOK_BYTES = 32 << 20
"""Bytes of a .bin that are looked at."""
RUNS = 16
"""Runs of documents that they are spread over."""
BLOCK_DOCUMENTS = 1 << 14
"""Documents that are looked at together."""


class InnerEnds(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen."""

    end_id: int | None
    """The EOD as given; else the id that all documents end with, None where they end with several."""
    num_documents: int
    """Documents with tokens that were looked at."""
    num_holding: int
    """Those that hold `end_id` before their last token."""
    is_whole: bool
    """Whether these are all documents."""


def look_for_inner_ends(bin_path: Path, *, end_id: int | None) -> InnerEnds:
    """Look for an EOD inside documents.

    Args:
        bin_path: The .bin of the dataset.
        end_id: The tokenizer's EOD; None to take the id that all documents end with.

    Raises:
        SourceUnreadable: The .idx is none.
        OSError: A file cannot be read.
    """
    path = index_path(str(bin_path))
    index, content = LocalFile(path), LocalFile(bin_path)
    try:
        with located(path):
            header = read_header(index)
        is_whole = content.num_bytes <= LOOK_BYTES
        runs = list(_runs(index, content, header, 1 if is_whole else RUNS))
    finally:
        index.close()
        content.close()
    last = np.unique(np.concatenate([np.zeros(0, np.int64), *(values[ends - 1] for values, ends in runs)]))
    if end_id is None and len(last) == 1:
        end_id = int(last[0])
    return InnerEnds(
        end_id=end_id,
        num_documents=sum(len(ends) for _, ends in runs),
        num_holding=0 if end_id is None else sum(_num_holding(values, ends, end_id) for values, ends in runs),
        is_whole=is_whole,
    )


Run = tuple[NDArray[np.integer[Any]], NDArray[np.int64]]
"""Tokens of consecutive documents, end to end, and where each that has tokens ends."""


def _num_holding(values: NDArray[np.integer[Any]], ends: NDArray[np.int64], end_id: int) -> int:
    places = np.flatnonzero(values == end_id)
    document = np.searchsorted(ends, places, side="right")
    return len(np.unique(document[places < ends[document] - 1]))


def _runs(index: LocalFile, content: LocalFile, header: IndexHeader, num_runs: int) -> Iterator[Run]:
    """The first documents of each of some equal stretches of a dataset, whole ones, up to LOOK_BYTES in all."""
    borders = [number * header.num_documents // num_runs for number in range(num_runs + 1)]
    for first, stop in pairwise(borders):
        room = LOOK_BYTES // num_runs
        for start in range(first, stop, BLOCK_DOCUMENTS):
            if room <= 0:
                break
            values, ends = _block(index, content, header, start, min(start + BLOCK_DOCUMENTS, stop), room)
            room -= values.nbytes
            yield values, ends


def _block(index: LocalFile, content: LocalFile, header: IndexHeader, start: int, stop: int, room: int) -> Run:
    """The documents from `start` on that fit in `room` bytes, or the first one."""
    borders = header.document_indices(index, start, stop + 1)
    first = int(borders[0])
    lengths = header.lengths(index, first, int(borders[-1]))
    pointers = header.pointers(index, first, int(borders[-1]))
    token_stop = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[borders - first]
    fitting = max(1, int(np.searchsorted(token_stop[1:] * header.dtype.itemsize, room, side="right")))
    num_sequences = int(borders[fitting]) - first
    values = _tokens(content, header.dtype, lengths[:num_sequences], pointers[:num_sequences])
    return values, np.unique(token_stop[1 : fitting + 1][np.diff(token_stop[: fitting + 1]) > 0])


def _tokens(
    content: LocalFile, dtype: np.dtype[np.integer[Any]], lengths: NDArray[np.int32], pointers: NDArray[np.int64]
) -> NDArray[np.integer[Any]]:
    """Tokens of sequences, end to end; read at once where they lie so."""
    num_bytes = lengths.astype(np.int64) * dtype.itemsize
    if len(pointers) and np.array_equal(pointers, pointers[0] + np.cumsum(num_bytes) - num_bytes):
        return np.frombuffer(content.read(int(pointers[0]), int(num_bytes.sum())), dtype)
    parts = [content.read(pointer, size) for pointer, size in zip(pointers.tolist(), num_bytes.tolist(), strict=True)]
    return np.frombuffer(b"".join(parts), dtype)
