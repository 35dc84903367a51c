from __future__ import annotations

import numpy as np
import pytest

from tests.support.sizes import synthetic_sizes
from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.keys import named_key, permute
from torchmix.mixture.order import SourceOrder
from torchmix.mixture.windows import Window

MASK = (1 << 64) - 1


def paged(rows_of_page: list[int], window_pages: int) -> SourceSizes:
    """Pages of the given rows; row k has k tokens, so that a length tells its row."""
    first_row = np.concatenate([[0], np.cumsum(rows_of_page)]).astype(np.int64)
    return SourceSizes(
        first_row_of_page=first_row, tokens=np.arange(first_row[-1], dtype=np.int32), window_pages=window_pages
    )


SHAPES = {
    "full pages, full windows": paged([50] * 12, 4),
    "a short last page and window": paged([50] * 13 + [7], 4),
    "pages of no rows": paged([0, 5, 0, 0, 9, 1, 0, 30, 0], 2),
    "only the last page has rows": paged([0, 0, 0, 3], 1),
    "a window wider than the source": paged([4, 5, 6], 64),
    "one row": paged([1], 1),
    "pages of one row": paged([1] * 40, 7),
    "skewed pages": paged([1000, 1, 1, 1, 300, 1, 2, 900], 3),
}


def every_window(order: SourceOrder, epoch: int) -> list[Window]:
    return [order.window(epoch, window) for window in range(order.num_windows)]


def slow_mix64(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def slow_window_rows(name: str, sizes: SourceSizes, seed: int, epoch: int, window: int) -> list[int]:
    """The rule, written out: of as many neighbouring pages as there are windows, one; rows by a hash of their place."""
    num_windows = -(-sizes.num_pages // sizes.window_pages)
    place = int(permute(np.array([window]), num_windows, named_key(seed, "pages", name, epoch))[0])
    shift_key = named_key(seed, "strata", name, epoch)
    rows: list[int] = []
    for stratum, first in enumerate(range(0, sizes.num_pages, num_windows)):
        shift = slow_mix64((stratum * 0x9E3779B97F4A7C15 + shift_key) & MASK) % num_windows
        page = first + (place + shift) % num_windows
        if page < sizes.num_pages:
            rows += range(int(sizes.first_row_of_page[page]), int(sizes.first_row_of_page[page + 1]))
    key = named_key(seed, "rows", name, epoch, window)
    bits = max(1, (len(rows) - 1).bit_length())
    hashes = [slow_mix64((place * 0x9E3779B97F4A7C15 + key) & MASK) >> bits for place in range(len(rows))]
    return [rows[place] for place in sorted(range(len(rows)), key=lambda place: (hashes[place], place))]


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_are_the_rows_of_a_page_of_each_stratum_in_the_order_of_a_hash(shape):
    sizes = SHAPES[shape]
    order = SourceOrder("web", sizes, seed=3)
    for epoch in (0, 1, 5, 1 << 40):
        for window, made in enumerate(every_window(order, epoch)):
            assert made.rows.tolist() == slow_window_rows("web", sizes, 3, epoch, window), (epoch, window)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_comes_once_in_every_epoch(shape):
    sizes = SHAPES[shape]
    for seed in range(5):
        order = SourceOrder("web", sizes, seed=seed)
        for epoch in range(4):
            rows = np.concatenate([made.rows for made in every_window(order, epoch)])
            assert np.array_equal(np.sort(rows), np.arange(sizes.num_documents)), (seed, epoch)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_knows_the_lengths_of_its_rows(shape):
    sizes = SHAPES[shape]
    whole = SourceOrder("web", sizes, seed=3)
    halved = SourceOrder("web", sizes, seed=3, counted=lambda tokens: tokens // 2)
    for made, half in zip(every_window(whole, 2), every_window(halved, 2), strict=True):
        tokens = sizes.tokens[made.rows]
        assert made.document_tokens is None and np.array_equal(half.document_tokens, tokens)
        assert made.ends.dtype == half.ends.dtype == np.int64
        assert made.ends.tolist() == [int(tokens[:k].sum()) for k in range(len(tokens) + 1)]
        assert half.ends.tolist() == [int((tokens // 2)[:k].sum()) for k in range(len(tokens) + 1)]


def test_a_draw_stops_at_the_first_document_whose_midpoint_is_not_owed():
    rng = np.random.default_rng(8)
    for _ in range(300):
        tokens = rng.integers(0, 6, rng.integers(1, 12))
        ends = np.concatenate([[0], np.cumsum(tokens)])
        window = Window(rows=np.arange(len(tokens)), ends=ends, document_tokens=None)
        for start in range(len(tokens) + 1):
            for owed in range(1, 40):
                stop = start
                while stop < len(tokens) and ends[stop] + ends[stop + 1] < 2 * (owed + ends[start]):
                    stop += 1
                assert window.take(start, owed) == (start, stop, ends[start], ends[stop]), (tokens, start, owed)


def test_lengths_that_sum_beyond_32_bits_are_summed_in_64():
    sizes = SourceSizes(
        first_row_of_page=np.array([0, 5], np.int64), tokens=np.full(5, 2**31 - 1, np.int32), window_pages=1
    )
    assert SourceOrder("web", sizes, seed=3).window(0, 0).ends[-1] == 5 * (2**31 - 1)
    halved = SourceOrder("web", sizes, seed=3, counted=lambda tokens: tokens // 2)
    assert halved.window(0, 0).ends[-1] == 5 * (2**30 - 1)


def test_a_window_made_alone_is_the_one_made_in_sequence():
    sizes = synthetic_sizes(5000, shortest=1, longest=900, rows_per_page=40, window_pages=16)
    in_sequence = SourceOrder("web", sizes, seed=3)
    walked = [(epoch, window) for epoch in range(3) for window in range(in_sequence.num_windows)]
    rows = {at: in_sequence.window(*at).rows.tolist() for at in walked}
    for at in walked:
        assert SourceOrder("web", sizes, seed=3).window(*at).rows.tolist() == rows[at]
    # Back and forth too, through what the order remembers.
    for i in np.random.default_rng(1).integers(0, len(walked), 100).tolist():
        assert in_sequence.window(*walked[i]).rows.tolist() == rows[walked[i]]


def test_seed_name_epoch_and_window_each_alter_the_order():
    sizes = paged([20] * 40, 10)
    base = SourceOrder("web", sizes, seed=3)
    others = [
        base.window(1, 0),
        base.window(0, 1),
        SourceOrder("web", sizes, seed=4).window(0, 0),
        SourceOrder("wet", sizes, seed=3).window(0, 0),
    ]
    first = base.window(0, 0).rows
    for other in others:
        assert np.count_nonzero(first == other.rows) < 10  # of 200; fewer than one is expected
    # Pages too: a window of the next epoch holds rows of other pages.
    assert set(base.pages(0, 0).tolist()) != set(base.pages(1, 0).tolist())


def test_documents_that_count_for_less_move_no_other_row():
    sizes = synthetic_sizes(3000, shortest=0, longest=900, rows_per_page=40, window_pages=16)
    plain = SourceOrder("web", sizes, seed=3)
    truncated = SourceOrder("web", sizes, seed=3, counted=lambda tokens: np.minimum(tokens, 100))
    masked = SourceOrder("web", sizes, seed=3, counted=lambda tokens: np.where(tokens % 3 == 0, 0, tokens))
    for window in range(plain.num_windows):
        rows = plain.window(1, window).rows
        tokens = sizes.tokens[rows]
        for other, counted in ((truncated, np.minimum(tokens, 100)), (masked, np.where(tokens % 3 == 0, 0, tokens))):
            made = other.window(1, window)
            assert np.array_equal(made.rows, rows)
            assert np.array_equal(made.document_tokens, tokens)
            assert np.array_equal(np.diff(made.ends), counted)


def test_a_row_more_at_the_end_moves_no_row_of_another_page():
    # Fixed windows of pages: what a longer last page adds, it adds to the window that holds it.
    short, long = paged([20] * 40, 10), paged([20] * 39 + [21], 10)
    for window in range(4):
        made, grown = (SourceOrder("web", sizes, seed=3).window(0, window) for sizes in (short, long))
        if 39 in SourceOrder("web", short, seed=3).pages(0, window):
            assert set(grown.rows.tolist()) - set(made.rows.tolist()) == {800}
        else:
            assert np.array_equal(made.rows, grown.rows)


def same_page_share(page_of_place: np.ndarray, batch: int) -> float:
    """The share of all pairs of rows in one batch that lies in one page."""
    same = pairs = 0
    for start in range(0, len(page_of_place) - batch + 1, batch):
        counts = np.unique(page_of_place[start : start + batch], return_counts=True)[1]
        same += int((counts * (counts - 1)).sum())
        pairs += batch * (batch - 1)
    return same / pairs


@pytest.mark.parametrize(("rows_per_page", "window_pages"), [(50, 20), (20, 64), (100, 8)])
def test_rows_of_a_batch_share_a_page_with_odds_of_rows_of_a_page_over_rows_of_a_window(rows_per_page, window_pages):
    sizes = paged([rows_per_page] * window_pages * 40, window_pages)
    rows = np.concatenate([made.rows for made in every_window(SourceOrder("web", sizes, seed=3), 0)])
    share = same_page_share(rows // rows_per_page, batch=100)
    expected = (rows_per_page - 1) / (rows_per_page * window_pages - 1)
    assert 0.93 * expected < share < 1.07 * expected, (share, expected)


def buffered(pages: np.ndarray, rows_per_page: int, buffer_rows: int, seed: int) -> np.ndarray:
    """Page of each row that leaves a shuffle buffer which is refilled, page by page, whenever a page fits."""
    rng = np.random.default_rng(seed)
    waiting: list[int] = []
    leaving: list[int] = []
    following = iter(pages.tolist())
    page = next(following, None)
    while waiting or page is not None:
        while page is not None and len(waiting) + rows_per_page <= buffer_rows:
            waiting += [page] * rows_per_page
            page = next(following, None)
        at = int(rng.integers(len(waiting)))
        waiting[at], waiting[-1] = waiting[-1], waiting[at]
        leaving.append(waiting.pop())
    return np.array(leaving)


def test_a_window_of_twice_the_rows_shuffles_as_well_as_a_buffer():
    rows_per_page, buffer_rows = 20, 800
    sizes = paged([rows_per_page] * 2000, 2 * buffer_rows // rows_per_page)
    order = SourceOrder("web", sizes, seed=3)
    pages = np.concatenate([order.pages(0, window) for window in range(order.num_windows)])
    buffer_share = same_page_share(buffered(pages, rows_per_page, buffer_rows, seed=1), batch=64)
    rows = np.concatenate([made.rows for made in every_window(order, 0)])
    window_share = same_page_share(rows // rows_per_page, batch=64)
    assert window_share < 1.03 * buffer_share, (window_share, buffer_share)


def test_rows_that_were_neighbours_on_disk_are_seldom_neighbours_in_the_order():
    sizes = paged([50] * 800, 20)  # windows of 1000 rows
    rows = np.concatenate([made.rows for made in every_window(SourceOrder("web", sizes, seed=3), 0)])
    beside = np.count_nonzero(np.abs(np.diff(rows)) == 1)
    # Each place of a window has odds of about 2 / 1000: 80 of 40,000 are expected.
    assert 45 < beside < 120, beside


def test_neighbours_on_disk_are_no_neighbours_in_time():
    sizes = paged([1] * 1000, 10)  # 100 windows
    beside = 0
    for epoch in range(200):
        order = SourceOrder("web", sizes, seed=3)
        window_of = np.empty(1000, np.int64)
        for window in range(order.num_windows):
            window_of[order.pages(epoch, window)] = window
        beside += np.count_nonzero(np.abs(np.diff(window_of[100:200])) == 1)
    # Of 99 pairs in a stratum, about 2 are expected in windows that follow each other.
    assert beside < 200 * 4, beside


@pytest.mark.parametrize("most", [0, 1 << 10])
def test_windows_that_are_permuted_alone_are_those_permuted_together(monkeypatch, most):
    monkeypatch.setattr("torchmix.mixture.windows.PERMUTED_WINDOWS", most)
    sizes = paged([3] * 50, 4)
    for epoch, window in [(0, 0), (0, 12), (1, 5), (0, 12), (2, 1)] * 2:
        made = SourceOrder("web", sizes, seed=3).window(epoch, window).rows
        assert made.tolist() == slow_window_rows("web", sizes, 3, epoch, window)


def test_pages_asked_again_are_the_same_in_any_order_of_asking():
    order = SourceOrder("web", paged([3] * 50, 4), seed=3)
    places = [(epoch, window) for epoch in range(3) for window in range(order.num_windows)]
    pages = {place: SourceOrder("web", paged([3] * 50, 4), seed=3).pages(*place).tolist() for place in places}
    for i in np.random.default_rng(2).integers(0, len(places), 300).tolist():
        assert order.pages(*places[i]).tolist() == pages[places[i]]
