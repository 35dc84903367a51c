"""Documents of a run -> its pages."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from torchmix.formats.source import Documents
from torchmix.reader.page_cache import cut_documents


def documents_of(values: np.ndarray, lengths: list[int]) -> Documents:
    return Documents(values=values, offsets=np.concatenate([[0], np.cumsum(lengths)]))


@pytest.mark.parametrize("rows_of_page", [[6], [1, 5], [2, 0, 3, 1]])
def test_pages_hold_their_rows_and_no_memory_but_their_own(rows_of_page):
    values, lengths = np.arange(40, dtype=np.int32), [3, 0, 20, 1, 6, 10]
    documents = documents_of(values, lengths)
    row = 0
    for page, num_rows in zip(cut_documents(documents, rows_of_page), rows_of_page, strict=True):
        expected = [values[a:b].tolist() for a, b in pairwise(documents.offsets[row : row + num_rows + 1])]
        assert [page.values[a:b].tolist() for a, b in pairwise(page.offsets)] == expected
        assert np.shares_memory(page.values, values) == (len(rows_of_page) == 1)
        row += num_rows


@pytest.mark.parametrize(
    ("dtype", "largest", "kept"),
    [
        (np.uint16, 60_000, np.uint16),
        (np.int64, 2**31 - 1, np.int32),
        (np.uint32, 7, np.int32),
        (np.int64, 2**31, np.int64),
        (np.uint32, 2**32 - 1, np.int64),
    ],
)
def test_ids_are_kept_in_32_bits_where_they_fit(dtype, largest, kept):
    values = np.array([1, 2, largest, 3], dtype)
    for rows_of_page in ([2], [1, 1]):
        pages = cut_documents(documents_of(values, [3, 1]), rows_of_page)
        assert pages[0].values.dtype == kept
        assert np.concatenate([page.values for page in pages]).tolist() == values.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_ids_that_are_known_to_be_small_are_kept_in_16_bits(dtype):
    values = np.array([1, 2, 255, 3], dtype)
    for rows_of_page in ([2], [1, 1]):
        pages = cut_documents(documents_of(values, [3, 1]), rows_of_page, is_narrow=True)
        assert pages[0].values.dtype == (np.uint8 if dtype == np.uint8 else np.uint16)
        assert (
            pages[0].num_bytes < cut_documents(documents_of(values.astype(np.int32), [3, 1]), rows_of_page)[0].num_bytes
        )
        assert np.concatenate([page.values for page in pages]).tolist() == values.tolist()
