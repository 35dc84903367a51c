"""Pages of integers alone: several chunks in one Parquet file in memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from torchmix.formats.parquet import thrift
from torchmix.formats.parquet.values import (
    PlainChunk,
    PlainColumn,
    PlainPage,
    dictionary_page,
    plain_column,
    read_chunks,
)

PLAIN, RLE_DICTIONARY = 0, 8
INT32, INT64, REPEATED = 1, 2, 2


def column(type: int = INT32) -> PlainColumn:
    fields = [(1, thrift.I32, type), (3, thrift.I32, REPEATED), (4, thrift.BINARY, b"element")]
    return plain_column(thrift.write_struct(fields), type, b"element")


def plain_page(values: np.ndarray) -> PlainPage:
    return PlainPage(len(values), PLAIN, values.tobytes())


def index_page(indices: np.ndarray) -> PlainPage:
    """Indices of 8 bits in one run of groups of eight."""
    groups = -(-len(indices) // 8)
    padded = np.zeros(8 * groups, np.uint8)
    padded[: len(indices)] = indices
    return PlainPage(len(indices), RLE_DICTIONARY, b"\x08" + thrift.write_varint(groups << 1 | 1) + padded.tobytes())


@pytest.mark.parametrize(("type", "dtype"), [(INT32, np.int32), (INT64, np.int64)])
def test_each_chunk_has_its_own_dictionary_and_pages(type, dtype):
    rng = np.random.default_rng(1)
    chunks, expected = [], []
    for i in range(5):
        values = rng.integers(0, 2**31, 1000 + i).astype(dtype)
        cuts = [0, 300, 301, len(values)]
        if i % 2:
            pages = [plain_page(values[start:stop]) for start, stop in pairwise(cuts)]
            chunks.append(PlainChunk(b"", pages))
        else:
            keys = rng.integers(0, 200, len(values))
            pages = [index_page(keys[start:stop]) for start, stop in pairwise(cuts)]
            chunks.append(PlainChunk(dictionary_page(values[:200].tobytes(), values.itemsize), pages))
            values = values[keys]
        expected.append(values)
    for found, values in zip(read_chunks(column(type), chunks), expected, strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, values)


def test_pages_that_hold_fewer_integers_than_they_say_are_an_error():
    values = np.arange(100, dtype=np.int32)
    sound, short = plain_page(values), PlainPage(100, PLAIN, values[:90].tobytes())
    lone_run = PlainPage(100, RLE_DICTIONARY, b"\x08\x14\x00")  # ten times the index 0
    dictionary = dictionary_page(values.tobytes(), 4)
    for damaged in (PlainChunk(b"", [short]), PlainChunk(dictionary, [lone_run])):
        for chunks in ([damaged], [PlainChunk(b"", [sound]), damaged], [damaged, PlainChunk(b"", [sound])]):
            with pytest.raises((pa.ArrowException, OSError, ValueError)):
                read_chunks(column(), chunks)
