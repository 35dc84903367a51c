"""Shuffling by row and not at all, against the formats' second implementation and what each promises."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.book_order import BookSource
from tests.support.sizes import synthetic_sizes
from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.draw import Position, draw
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.windows import WINDOW_ROWS, Method

METHODS: tuple[Method, ...] = ("row", "none")


def sizes_of(num_rows: int, rows_per_page: int = 50) -> SourceSizes:
    """Pages of equal rows, with a page of no rows in front; row k has k % 97 tokens."""
    stops = [*range(rows_per_page, num_rows, rows_per_page), num_rows]
    return SourceSizes(
        first_row_of_page=np.array([0, 0, *stops], np.int64),
        tokens=(np.arange(num_rows) % 97).astype(np.int32),
        window_pages=4,
    )


def all_rows(order: SourceOrder, epoch: int) -> np.ndarray:
    return np.concatenate([order.window(epoch, window).rows for window in range(order.num_windows)])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_rows", [1, 100, WINDOW_ROWS, WINDOW_ROWS + 1])
def test_windows_are_those_of_the_book(method: Method, num_rows: int) -> None:
    sizes = sizes_of(num_rows)
    order = SourceOrder("web", sizes, seed=3, method=method)
    book = BookSource(
        name="web",
        first_row_of_page=sizes.first_row_of_page.tolist(),
        tokens=sizes.tokens.tolist(),
        window_pages=4,
        method=method,
    )
    assert order.num_windows == book.num_windows
    for epoch in (0, 3) if num_rows < WINDOW_ROWS else (3,):
        for window in range(order.num_windows):
            assert order.window(epoch, window).rows.tolist() == book.window(3, epoch, window)


@pytest.mark.parametrize("num_rows", [1, 7, WINDOW_ROWS, 3 * WINDOW_ROWS - 5])
def test_every_row_comes_once_in_every_epoch(num_rows: int) -> None:
    sizes = sizes_of(num_rows)
    by_row, unshuffled = (SourceOrder("web", sizes, seed=3, method=method) for method in METHODS)
    assert by_row.num_windows == unshuffled.num_windows == -(-num_rows // WINDOW_ROWS)
    for epoch in (0, 1):
        assert np.array_equal(np.sort(all_rows(by_row, epoch)), np.arange(num_rows))
        assert np.array_equal(all_rows(unshuffled, epoch), np.arange(num_rows))


@pytest.mark.parametrize("method", METHODS)
def test_lengths_go_with_their_rows_and_masks_move_none(method: Method) -> None:
    sizes = sizes_of(WINDOW_ROWS + 1000)
    plain = SourceOrder("web", sizes, seed=3, method=method)
    halved = SourceOrder("web", sizes, seed=3, method=method, counted=lambda tokens: tokens // 2)
    for window in range(plain.num_windows):
        made, half = plain.window(1, window), halved.window(1, window)
        tokens = sizes.tokens[made.rows]
        assert np.array_equal(half.rows, made.rows)
        assert np.array_equal(np.diff(made.ends), tokens)
        assert np.array_equal(np.diff(half.ends), tokens // 2)


def test_seed_name_and_epoch_each_alter_the_order_of_rows() -> None:
    sizes = sizes_of(400)
    first = SourceOrder("web", sizes, seed=3, method="row").window(0, 0).rows
    others = [
        SourceOrder("web", sizes, seed=3, method="row").window(1, 0).rows,
        SourceOrder("web", sizes, seed=4, method="row").window(0, 0).rows,
        SourceOrder("wet", sizes, seed=3, method="row").window(0, 0).rows,
    ]
    for other in others:
        assert np.count_nonzero(first == other) < 10  # of 400; one is expected


@pytest.mark.parametrize("method", METHODS)
def test_pages_of_a_window_are_those_of_its_rows(method: Method) -> None:
    sizes = sizes_of(WINDOW_ROWS + 130)
    order = SourceOrder("web", sizes, seed=3, method=method)
    for window in range(order.num_windows):
        rows = order.window(0, window).rows
        assert order.pages(0, window).tolist() == sorted({row // 50 + 1 for row in rows.tolist()})


def test_rows_of_a_batch_share_a_page_no_more_often_than_in_a_full_shuffle() -> None:
    rows = SourceOrder("web", sizes_of(40 * WINDOW_ROWS), seed=3, method="row").window(0, 7).rows
    pages = rows[: 128 * 100].reshape(128, 100) // 50
    same = sum(int((np.unique(batch, return_counts=True)[1] ** 2).sum()) - 100 for batch in pages)
    expected = 128 * 100 * 99 * 49 / (40 * WINDOW_ROWS - 1)  # ordered pairs
    assert same < 3 * expected


@pytest.mark.parametrize("method", METHODS)
def test_draws_go_on_through_windows_and_epochs(method: Method) -> None:
    sizes = synthetic_sizes(WINDOW_ROWS + 300, shortest=1, longest=40, rows_per_page=40, window_pages=16)
    order = SourceOrder("web", sizes, seed=3, method=method)
    expected = np.concatenate([all_rows(order, epoch) for epoch in range(2)])
    position, taken = Position.start(1), []
    shares, epochs = np.array([1 << 32], np.int64), np.array([1 << 62], np.int64)
    for _ in range(30):
        drawn = draw([order], shares, position, 10_000, max_epochs=epochs)
        position = drawn.position
        taken.append(drawn.stretches.row)
    rows = np.concatenate(taken)
    assert len(expected) / 2 < len(rows) < len(expected)
    assert np.array_equal(rows, expected[: len(rows)]), "every document once an epoch, in order"
