"""The order of a flat: the text of docs/formats.md written again, exact coverage; small members come evenly."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.book_order import BookSource
from torchmix.catalog.sizes import SourceSizes, window_pages_of, window_units_of_view
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.spaces import FlatSpace, SourceSpace, Space, ViewSpace, drawn_units, windows_of_flat

Place = tuple[int, int]
"""Number of a source, and a row of it."""


def sizes_of(pages: Sequence[int], window_pages: int = 8) -> SourceSizes:
    first = np.concatenate([[0], np.cumsum(pages)]).astype(np.int64)
    tokens = np.arange(first[-1], dtype=np.int32) % 50 + 1
    return SourceSizes(first_row_of_page=first, tokens=tokens, window_pages=window_pages)


def book_order(
    members: list[tuple[SourceSizes, list[int]]], *, most_pages: int, most_bytes: int, seed: int, epoch: int
):
    """Windows of a flat `f` by section "window order": members with the rows of each that can be drawn."""
    pages = [-(-(len(sizes.first_row_of_page) - 1) * len(rows) // len(sizes.tokens)) for sizes, rows in members]
    tokens = sum(int(sizes.tokens[row]) for sizes, rows in members for row in rows)
    most = max(1, min(most_bytes * sum(pages) // max(1, 4 * tokens), most_pages))
    count = -(-sum(pages) // most)
    places: list[Place] = []
    first = [0]
    for number, (sizes, _) in enumerate(members):
        borders = sizes.first_row_of_page.tolist()
        if len(borders) - 1 < count:
            borders = [*range(0, len(sizes.tokens), 16), len(sizes.tokens)]
        first += [len(places) + border for border in borders[1:]]
        places += [(number, row) for row in range(len(sizes.tokens))]
    window_pages = -(-(len(first) - 1) // count)
    book = BookSource(name="f", first_row_of_page=first, tokens=[1] * len(places), window_pages=window_pages)
    kept = {(number, row) for number, (_, rows) in enumerate(members) for row in rows}
    for window in range(book.num_windows):
        yield [places[i] for i in book.window(seed, epoch, window) if places[i] in kept]


@pytest.mark.parametrize("seed", range(12))
def test_a_flat_has_the_order_of_the_book(seed: int) -> None:
    rng = random.Random(seed)
    members: list[tuple[SourceSizes, list[int]]] = []
    spaces: list[Space] = []
    for number in range(rng.randint(1, 4)):
        sizes = sizes_of([rng.randint(1, 30) for _ in range(rng.choice([1, 2, 20, 60]))])
        rows = list(range(sizes.num_documents))
        if rng.random() < 0.5:
            rows = sorted(rng.sample(rows, max(1, len(rows) // rng.choice([2, 9]))))
            spaces.append(ViewSpace(number, sizes, np.array(rows, np.uint32), window_units=3))
        else:
            spaces.append(SourceSpace(number, sizes))
        members.append((sizes, rows))
    most_pages, most_bytes = rng.choice([1, 3, 256]), rng.choice([2000, 1 << 20])
    window_pages = window_pages_of(
        num_pages=sum(map(drawn_units, spaces)),
        num_tokens=sum(space.num_tokens for space in spaces),
        most_pages=most_pages,
        most_bytes=most_bytes,
    )
    flat = FlatSpace(spaces, num_windows=windows_of_flat(spaces, window_pages))
    order = StreamOrder("f", flat, seed=seed)
    wanted = list(book_order(members, most_pages=most_pages, most_bytes=most_bytes, seed=seed, epoch=2))
    assert order.num_windows == len(wanted)
    for window, places in enumerate(wanted):
        source, row = flat.places(order.window(2, window).rows)
        assert list(zip(source.tolist(), row.tolist(), strict=True)) == places


def test_a_row_left_out_of_a_view_moves_no_other() -> None:
    sizes = sizes_of([20] * 50)
    kept = np.arange(0, 1000, 3)
    for method in ("page", "row"):
        whole = StreamOrder("v", ViewSpace(0, sizes, kept, window_units=9), seed=4, method=method)
        less = StreamOrder("v", ViewSpace(0, sizes, np.delete(kept, [7, 200]), window_units=9), seed=4, method=method)
        for window in range(whole.num_windows):
            rows = whole.window(1, window).rows
            assert less.window(1, window).rows.tolist() == [row for row in rows.tolist() if row not in (21, 600)]


def test_a_view_draws_its_rows_in_their_order_among_all_rows() -> None:
    sizes = sizes_of([20] * 50)
    kept = np.arange(0, 1000, 7)
    view = StreamOrder("web", ViewSpace(0, sizes, kept, window_units=8), seed=4)
    whole = StreamOrder("web", SourceSpace(0, sizes), seed=4)
    for window in range(whole.num_windows):
        rows = [row for row in whole.window(0, window).rows.tolist() if row % 7 == 0]
        assert view.window(0, window).rows.tolist() == rows


def test_a_view_of_few_rows_has_windows_of_as_many_rows_as_its_source() -> None:
    sizes = sizes_of([20] * 500)
    kept = np.arange(0, 10_000, 10)
    units = window_units_of_view(num_pages=500, num_rows=10_000, num_kept=1000, window_pages=8)
    view = StreamOrder("v", ViewSpace(0, sizes, kept, window_units=units), seed=4)
    assert abs(view.num_rows(0, 0) - 8 * 20) <= 20


@pytest.mark.slow
def test_a_small_member_comes_evenly_and_anywhere() -> None:
    """A page of 160 rows beside 400 pages: each part of 16 rows has a window of its own, any as often as others."""
    large, small = SourceSpace(0, sizes_of([40] * 400)), SourceSpace(1, sizes_of([160]))
    flat = FlatSpace([large, small], num_windows=windows_of_flat([large, small], 8))
    in_window, place_in_window, pairs = Counter[int](), Counter[int](), 0
    for seed in range(60):
        order = StreamOrder("f", flat, seed=seed)
        seen: list[int] = []
        for window in range(order.num_windows):
            rows = order.window(0, window).rows
            seen += rows.tolist()
            at = np.flatnonzero(rows >= 16_000)
            assert len(at) in (0, 16), "a part of the member comes whole, and at most one in a window"
            in_window[window] += len(at) > 0
            place_in_window.update((at * 8 // len(rows)).tolist())
            pairs += int(np.count_nonzero((rows[1:] // 40 == rows[:-1] // 40) & (rows[1:] < 16_000)))
        assert sorted(seen) == list(range(16_160)), "each row once"

    def chi_square(counts: Counter[int], cells: int) -> float:
        mean = sum(counts.values()) / cells
        return sum((counts[cell] - mean) ** 2 for cell in range(cells)) / mean / (cells - 1)

    assert chi_square(in_window, order.num_windows) < 1.6 and chi_square(place_in_window, 8) < 3
    # In a window of 9 pages or so, the next row is of the same page once in about 9.
    expected = 60 * 16_160 * 39 / (16_160 / order.num_windows)
    assert 0.95 < pairs / expected < 1.1
