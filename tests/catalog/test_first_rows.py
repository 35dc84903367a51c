from __future__ import annotations

import numpy as np
import pytest

from torchmix.catalog.page_table import FirstRows


def make(rows_of_chunk: list[list[int]]) -> tuple[FirstRows, np.ndarray]:
    """First rows by chunks, and as the array they stand for."""
    rows = [count for chunk in rows_of_chunk for count in chunk]
    whole = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
    chunk_page = np.cumsum([0, *(len(chunk) for chunk in rows_of_chunk)])
    chunk_row = whole[chunk_page]
    page_row = np.append(whole[:-1] - np.repeat(chunk_row[:-1], np.diff(chunk_page)), 0).astype(np.uint32)
    return FirstRows(chunk_page=chunk_page, chunk_row=chunk_row, page_row=page_row), whole


def random_chunks(seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 4, rng.integers(1, 20)).tolist() for _ in range(rng.integers(1, 9))]


@pytest.mark.parametrize(
    "rows_of_chunk", [[[3, 1], [2]], [[5]], [[0, 2], [0], [1, 0, 4]], *map(random_chunks, range(5))]
)
@pytest.mark.parametrize(("whole_pages", "most_slices"), [(1000, 0), (0, -1000), (0, 16)])
def test_entries_and_searches_are_those_of_the_array(rows_of_chunk, whole_pages, most_slices, monkeypatch):
    monkeypatch.setattr("torchmix.catalog.page_table.WHOLE_PAGES", whole_pages)
    monkeypatch.setattr("torchmix.catalog.page_table.MOST_SLICES", most_slices)
    first_rows, whole = make(rows_of_chunk)
    assert len(first_rows) == len(whole)
    assert first_rows.tolist() == whole.tolist() == np.asarray(first_rows).tolist()
    assert first_rows[:].dtype == first_rows[np.arange(2)].dtype == np.int64
    assert [int(first_rows[page]) for page in range(len(whole))] == whole.tolist()
    assert first_rows[-1] == whole[-1] and first_rows[1:].tolist() == whole[1:].tolist()
    rng = np.random.default_rng(9)
    pages = rng.integers(0, len(whole), 50)
    np.testing.assert_array_equal(first_rows[pages], whole[pages])
    rows = np.arange(-2, whole[-1] + 3)
    for side in ("left", "right"):
        np.testing.assert_array_equal(first_rows.searchsorted(rows, side=side), np.searchsorted(whole, rows, side))
        assert first_rows.searchsorted(int(whole[-1]) - 1, side) == np.searchsorted(whole, whole[-1] - 1, side)
    assert first_rows.searchsorted(rows[:0]).shape == (0,)
    held = rng.permutation(np.arange(whole[-1]))
    pages, firsts = first_rows.find(held)
    np.testing.assert_array_equal(pages, np.searchsorted(whole, held, "right") - 1)
    np.testing.assert_array_equal(firsts, whole[pages])


@pytest.mark.parametrize("whole_pages", [0, 1000])
def test_rows_beyond_32_bits_of_the_source_are_found(whole_pages, monkeypatch):
    monkeypatch.setattr("torchmix.catalog.page_table.WHOLE_PAGES", whole_pages)
    first_rows = FirstRows(
        chunk_page=np.array([0, 2, 4]),
        chunk_row=np.array([0, 5_000_000_000, 9_000_000_000]),
        page_row=np.array([0, 4_000_000_000, 0, 3_999_999_999, 0], np.uint32),
    )
    assert first_rows.tolist() == [0, 4_000_000_000, 5_000_000_000, 8_999_999_999, 9_000_000_000]
    rows = np.array([3_999_999_999, 4_000_000_000, 8_999_999_998, 8_999_999_999])
    assert first_rows.searchsorted(rows, side="right").tolist() == [1, 2, 3, 4]
