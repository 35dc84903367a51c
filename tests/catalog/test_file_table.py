from __future__ import annotations

import numpy as np
import pytest

from torchmix.catalog import page_table as file_table
from torchmix.catalog.page_table import PageColumns, PageTable, table_of_file


def table_of(
    chunk_of_page: list[int], offset: list[int], num_bytes: list[int], rows: list[int], tails=None
) -> PageTable:
    chunks = max(chunk_of_page, default=-1) + 2  # the last one has no pages
    table = table_of_file(
        PageColumns(
            chunk_of_page=np.array(chunk_of_page, np.int32),
            page_offset=np.array(offset, np.int64),
            page_bytes=np.array(num_bytes, np.int64),
            tail_bytes=None if tails is None else np.array(tails, np.int64),
            page_rows=np.array(rows, np.int64),
            companion_offset=np.arange(chunks) * 10,
            companion_bytes=np.arange(chunks) + 1,
            kind=np.arange(chunks).astype(np.int8),
            page_crc=np.arange(len(offset), dtype=np.uint32) + 1,
            companion_crc=np.arange(chunks, dtype=np.uint32) + 1,
        )
    )
    table.check()
    place = table.place(np.arange(len(offset)))
    assert (place.offset.tolist(), place.num_bytes.tolist(), place.num_rows.tolist()) == (offset, num_bytes, rows)
    assert table.kind[place.chunk].tolist() == chunk_of_page
    assert table.companion_offset[place.chunk].tolist() == [10 * chunk for chunk in chunk_of_page]
    assert table.page_crc.tolist() == list(range(1, len(offset) + 1))
    assert table.companion_crc[place.chunk].tolist() == [chunk + 1 for chunk in chunk_of_page]
    assert place.tail_bytes.tolist() == (tails or [0] * len(offset))
    assert table.first_row.tolist() == [0, *np.cumsum(rows).tolist()]
    return table


def test_pages_that_lie_end_to_end_are_one_chunk():
    table = table_of([0, 0, 0], [4, 14, 34], [10, 20, 30], [1, 2, 3])
    assert (table.num_chunks, table.page_start.tolist(), table.page_row.tolist()) == (1, [0, 10, 30, 0], [0, 1, 3, 0])
    assert len(table.tail_bytes) == 0


def test_a_gap_or_another_column_chunk_begins_a_chunk_and_chunks_without_pages_are_left_out():
    assert table_of([0, 0, 2, 2], [4, 20, 30, 35], [10, 10, 5, 5], [1, 1, 1, 1]).chunk_page.tolist() == [0, 1, 2, 4]
    assert table_of([], [], [], []).num_chunks == 0


def test_a_tail_is_kept_also_where_it_lies_in_the_next_chunk(monkeypatch):
    monkeypatch.setattr(file_table, "MOST_IN_CHUNK", 15)
    table = table_of([0, 0, 0], [4, 14, 24], [10, 10, 10], [1, 1, 1], [3, 10, 0])
    assert table.chunk_page.tolist() == [0, 2, 3]
    assert table.place(np.arange(3)).begins_inside_row.tolist() == [False, True, True]


@pytest.mark.parametrize("most", [1, 7, 25, 1000])
def test_what_exceeds_a_chunk_is_several(monkeypatch, most):
    monkeypatch.setattr(file_table, "MOST_IN_CHUNK", most)
    rng = np.random.default_rng(most)
    num_bytes, rows = rng.integers(1, 9, 60), rng.integers(1, 30, 60)
    table = table_of([0] * 60, (np.cumsum(num_bytes) - num_bytes).tolist(), num_bytes.tolist(), rows.tolist())
    assert max(table.page_start.max(), table.page_row.max()) < most
    assert (table.num_chunks == 1) == (most == 1000)


def test_large_files_need_no_more_than_32_bits_a_page():
    gibibyte = 1 << 30
    table = table_of([0] * 9, [gibibyte * i for i in range(9)], [gibibyte] * 9, [1 << 29] * 9)
    assert table.page_start.dtype == table.page_row.dtype == np.uint32
    assert table.num_chunks == 5


def test_a_format_without_companions_tails_or_checksums_leaves_them_out():
    table = table_of_file(
        PageColumns(
            chunk_of_page=np.array([0, 0, 1], np.int32),
            page_offset=np.array([4, 14, 30], np.int64),
            page_bytes=np.array([10, 10, 5], np.int64),
            page_rows=np.array([1, 2, 3], np.int64),
            kind=np.array([7, 0], np.int8),
        )
    )
    table.check()
    assert table.kind.tolist() == [7, 0]
    assert table.companion_offset.tolist() == [-1, -1] and table.companion_bytes.tolist() == [0, 0]
    assert not len(table.companion_crc) and not len(table.page_crc) and not len(table.tail_bytes)
