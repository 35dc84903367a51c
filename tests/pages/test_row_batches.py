"""Rows of epochs in permuted order: every row once, from any place, and read ahead."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.files import flip_byte, make_tokens_file, random_tokens
from torchmix.errors import CorruptPage, OptionError
from torchmix.pages import Pages, Place, RowBatch, open_pages

DOCUMENTS = random_tokens(1, 900, mean_tokens=40)


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    make_tokens_file(tmp_path / "ids.parquet", DOCUMENTS)
    return open_pages(tmp_path / "ids.parquet", tokens="input_ids", catalog=tmp_path / "index", window_pages=2)


def numbers(batches: list[RowBatch]) -> list[int]:
    return np.concatenate([batch.numbers for batch in batches]).tolist()


@pytest.mark.parametrize("method", ["page", "row", "none"])
def test_batches_are_the_rows_of_the_orders_of_each_epoch(pages: Pages, method: Any) -> None:
    orders = [pages.permuted_order(seed=5, epoch=epoch, method=method) for epoch in range(2)]
    found = list(pages.batches(rows=20, seed=5, method=method, epochs=2))
    assert numbers(found) == np.concatenate([rows for order in orders for rows in order]).tolist()
    for batch in found:
        assert batch.rows.to_pylist() == [DOCUMENTS[row] for row in batch.numbers]
    places = [batch.place for batch in found]
    assert places == sorted(places) and len({place.window for place in places}) == len(orders[0])
    assert max(len(batch.numbers) for batch in found) == 20


def test_readers_share_an_epoch_by_windows(pages: Pages) -> None:
    num_windows = len(pages.permuted_order(seed=5))
    assert num_windows >= 5
    of_readers = [list(pages.batches(rows=64, seed=5, epochs=1, reader=r, readers=3)) for r in range(3)]
    assert sorted(row for found in of_readers for row in numbers(found)) == list(range(len(DOCUMENTS)))
    assert [found[-1].place.window for found in of_readers] == [len(range(r, num_windows, 3)) - 1 for r in range(3)]


@pytest.mark.slow
def test_any_row_is_a_place_to_begin_again_with_other_batches(pages: Pages) -> None:
    whole = list(pages.batches(rows=14, seed=5, epochs=2))
    rows = numbers(whole)
    given = 0
    for batch in whole:
        for used in {0, len(batch.numbers) // 2, len(batch.numbers)}:
            place = batch.place_after(used)
            start = place if used else list(place)  # as JSON brings it back
            again = list(islice(pages.batches(rows=9, seed=5, epochs=2, start=start), 3))
            expected = rows[given + used : given + used + sum(len(part.numbers) for part in again)]
            assert (numbers(again) if again else []) == expected
            assert again or given + used == len(rows)
        given += len(batch.numbers)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 10, 50])
def test_every_page_is_decoded_once_an_epoch_and_before_its_window_begins(pages: Pages, rows: int) -> None:
    missed_after = []
    for batch in pages.batches(rows=rows, seed=5, epochs=3):
        stats = pages.stats()
        missed_after.append((batch.place, stats["cache_misses"]))
    in_first_window = [misses for place, misses in missed_after if place.epoch == place.window == 0]
    assert {misses for _, misses in missed_after[len(in_first_window) :]} == {in_first_window[-1]}, "all were there"
    # A page may be in the last window of an epoch and in the first of the next; it is kept.
    assert 3 * pages.num_pages - 4 <= pages.stats()["pages_decoded"] <= 3 * pages.num_pages


def test_memory_stays_that_of_two_windows(tmp_path: Path, pages: Pages) -> None:
    largest = 0
    for _ in pages.batches(rows=10, seed=5, epochs=2):
        largest = max(largest, int(pages.stats()["cache_pages"]))
    assert largest <= 4


def test_a_damaged_page_of_the_coming_window_is_told_where_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "ids.parquet"
    make_tokens_file(path, DOCUMENTS, checksums=True)
    pages = open_pages(path, tokens="input_ids", catalog=tmp_path / "index", window_pages=4)
    second = pages.permuted_order(seed=5)[1]
    whole = list(islice(pages.batches(rows=5, seed=5), 40))
    of_first = [batch for batch in whole if batch.place.window == 0 and batch.place.epoch == 0]
    assert len(of_first) > 2
    damaged = int(pages._source.pages.page_of_rows(second)[0])
    place = pages._source.pages.place(np.array([damaged]))
    flip_byte(path, int(place.offset[0]) + int(place.num_bytes[0]) // 2)
    again = open_pages(path, tokens="input_ids", catalog=tmp_path / "index", window_pages=4)
    batches = again.batches(rows=5, seed=5)
    assert numbers(list(islice(batches, len(of_first)))) == numbers(of_first)
    with pytest.raises(CorruptPage, match=r"ids\.parquet"):
        list(islice(batches, 10))


def test_what_cannot_be_is_refused(pages: Pages) -> None:
    for wrong, what in (
        ({"rows": 0}, "rows=0 must be a whole number of at least 1"),
        ({"rows": 2.5}, "rows=2.5"),
        ({"rows": True}, "rows=True"),
        ({"reader": 1}, r"reader=1 must be a whole number in \[0, 0\]"),
        ({"reader": -1}, "reader=-1"),
        ({"readers": 0}, "readers=0"),
        ({"epochs": -1}, "epochs=-1"),
        ({"start": (0, -1, 0)}, r"start\.window=-1"),
        ({"start": (0, 1)}, r"start=\(0, 1\) must be three whole numbers: epoch, window, used"),
        ({"start": 3}, "start=3"),
        ({"seed": 2**63}, rf"seed={2**63} must be a whole number in \[0, 2\*\*63\)"),
        ({"seed": -1}, "seed=-1"),
        ({"method": "pages"}, r"method='pages' is not one of page, row, none \(did you mean 'page'\?\)"),
    ):
        with pytest.raises(OptionError, match=f"^batches: {what}"):
            pages.batches(**{"rows": 5, "seed": 1, **wrong})
    place = next(pages.batches(rows=5, seed=1)).place_after
    assert place(np.int64(5)) == (0, 0, 5)
    for count in (-1, 6, 1.0):
        with pytest.raises(OptionError, match=f"place_after: count={count} must be a whole number in"):
            place(count)
    with pytest.raises(ValueError, match=r"1000 readers share .* windows, so some would have none"):
        pages.batches(rows=5, seed=1, readers=1000)
    num_windows = len(pages.permuted_order(seed=1))
    for start in ((0, num_windows, 0), (0, 0, len(DOCUMENTS))):
        with pytest.raises(ValueError, match="is no place of reader 0 of 1"):
            pages.batches(rows=5, seed=1, start=start)
    assert list(pages.batches(rows=5, seed=1, start=Place(2, 0, 0), epochs=2)) == []
