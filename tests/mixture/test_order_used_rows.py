"""Rows that are not used: they keep their places, count for nothing, and cost nothing where there are many."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.sizes import synthetic_sizes
from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture import windows as row_windows
from torchmix.mixture.draw import Draw, Position, draw
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.windows import Method

METHODS: tuple[Method, ...] = ("page", "row", "none")
ALL, UNLIMITED = np.array([1 << 32], np.int64), np.array([1 << 62], np.int64)


@pytest.fixture(autouse=True)
def _short_windows_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_windows, "WINDOW_ROWS", 64)


def uneven(seed: int, num_pages: int, window_pages: int) -> SourceSizes:
    """Pages of 0 to 40 rows; a few rows are empty."""
    rng = random.Random(seed)
    first_row = np.concatenate([[0], np.cumsum([rng.choice((0, 1, 7, 40)) for _ in range(num_pages)])])
    tokens = np.array([rng.choice((0, 1, 30, 90)) for _ in range(first_row[-1])], np.int32)
    tokens[:: max(1, len(tokens) // 50)] = 11
    return SourceSizes(first_row_of_page=first_row, tokens=tokens, window_pages=window_pages)


def has_used(order: SourceOrder, rows: tuple[int, int], place: tuple[int, int]) -> bool:
    made = order.window(*place).rows
    return bool(np.any((made >= rows[0]) & (made < rows[1])))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [(0, 30), (100, 101), (250, 900), (0, 899)])
def test_unused_rows_keep_their_places_and_count_for_nothing(method: Method, rows: tuple[int, int]) -> None:
    sizes = synthetic_sizes(900, shortest=1, longest=50, rows_per_page=20, window_pages=4)
    whole = SourceOrder("web", sizes, seed=3, method=method)
    part = SourceOrder("web", sizes, seed=3, method=method, rows=rows)
    for epoch in (0, 1):
        for window in range(whole.num_windows):
            made, masked = whole.window(epoch, window), part.window(epoch, window)
            used = (made.rows >= rows[0]) & (made.rows < rows[1])
            assert np.array_equal(masked.rows, made.rows)
            assert np.array_equal(np.diff(masked.ends), np.where(used, np.diff(made.ends), 0))
            assert part.num_rows(epoch, window) == len(made.rows)
            pages = np.searchsorted(sizes.first_row_of_page, made.rows[used], side="right") - 1
            assert np.array_equal(np.sort(part.pages(epoch, window)), np.unique(pages))


def test_using_all_rows_is_using_no_mask() -> None:
    sizes = uneven(1, 20, 3)
    order = SourceOrder("web", sizes, seed=3, rows=(0, sizes.num_documents))
    assert order.window(0, 0).document_tokens is None
    assert np.array_equal(order.pages(0, 1), SourceOrder("web", sizes, seed=3).pages(0, 1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_the_next_used_window_is_the_first_that_has_used_rows(method: Method, seed: int) -> None:
    sizes = uneven(seed, 150, 1 + seed % 3)
    rng = random.Random(seed)
    start = rng.randrange(sizes.num_documents - 5)
    rows = (start, start + 1 + rng.randrange(5))
    order = SourceOrder("web", sizes, seed=seed, method=method, rows=rows)
    plain = SourceOrder("web", sizes, seed=seed, method=method)
    places = [(epoch, window) for epoch in range(3) for window in range(order.num_windows)]
    used = [place for place in places if has_used(plain, rows, place)]
    for place in places[: 2 * order.num_windows]:
        found = place
        while (passed := order.next_used(*found)) != found:
            found = passed
        assert found == next(each for each in used if each >= place)
        assert order.following(*place) == next(each for each in used if each > place)


def draw_all(order: SourceOrder, asked_tokens: int, draws: int, *, max_epochs: int = 1 << 62) -> list[Draw]:
    position, drawn = Position.start(1), []
    for _ in range(draws):
        drawn.append(draw([order], ALL, position, asked_tokens, max_epochs=np.array([max_epochs], np.int64)))
        position = drawn[-1].position
    return drawn


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", [(0.0, 0.97), (0.97, 1.0), (0.5, 0.51)])
def test_a_part_gives_its_rows_in_the_order_of_the_whole(method: Method, part: tuple[float, float]) -> None:
    sizes = uneven(5, 130, 2)
    rows = (int(part[0] * sizes.num_documents), int(part[1] * sizes.num_documents))
    plain = SourceOrder("web", sizes, seed=3, method=method)
    expected = [
        (epoch, int(row))
        for epoch in range(4)
        for window in range(plain.num_windows)
        for row in plain.window(epoch, window).rows
        if rows[0] <= row < rows[1] and sizes.tokens[row]
    ]
    order = SourceOrder("web", sizes, seed=3, method=method, rows=rows)
    tokens = int(sizes.tokens[rows[0] : rows[1]].sum())
    asked_tokens = max(157, tokens // 31)
    drawn = draw_all(order, asked_tokens, 3 * tokens // asked_tokens)
    taken = [
        place
        for each in drawn
        for place in zip(each.stretches.epoch.tolist(), each.stretches.row.tolist(), strict=True)
    ]
    assert len(taken) > len(expected) / 2
    assert taken == expected[: len(taken)]


def test_a_small_part_of_many_windows_makes_only_the_windows_it_lies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = synthetic_sizes(200_000, shortest=3, longest=30, rows_per_page=5, window_pages=4)
    rows = (100_000, 100_200)
    order = SourceOrder("web", sizes, seed=3, rows=rows)
    assert order.num_windows == 10_000
    made: list[tuple[int, int]] = []
    make = order._make
    monkeypatch.setattr(order, "_make", lambda *place: (made.append(place), make(*place))[1])
    tokens = int(sizes.tokens[rows[0] : rows[1]].sum())
    drawn = draw_all(order, tokens // 2, 7, max_epochs=3)
    assert [each.ran_out for each in drawn[-1:]] == [(0,)]
    assert sum(len(each.stretches.row) for each in drawn) == 3 * 200
    assert len(made) <= 3 * 40  # pages of the part
    assert len(made) == len(set(made))


def test_a_part_that_ran_out_stands_at_the_end_of_its_last_epoch() -> None:
    sizes = synthetic_sizes(5_000, shortest=3, longest=30, rows_per_page=5, window_pages=1)
    order = SourceOrder("web", sizes, seed=3, rows=(17, 19))
    [done] = draw_all(order, 10_000, 1, max_epochs=2)
    assert done.ran_out == (0,)
    assert sorted(done.stretches.row.tolist()) == [17, 17, 18, 18]
    assert (done.position.epoch.tolist(), done.position.window.tolist(), done.position.debt.tolist()) == ([2], [0], [0])
