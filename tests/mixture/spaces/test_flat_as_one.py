"""A flat against its members as one source whose rows are shuffled: coverage, neighbours, gaps; 2^33 rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import SourceSizes
from torchmix.mixture.order import StreamOrder
from torchmix.mixture.spaces import FlatSpace, Members, SourceSpace, Space, windows_of_flat

ROWS = (9000, 3000, 160)
"""The last member is one page."""
EPOCHS = 30


def flat_space() -> FlatSpace:
    members: list[Space] = []
    for number, rows in enumerate(ROWS):
        first = np.arange(0, rows + 1, 160 if number == 2 else 40)
        sizes = SourceSizes(first_row_of_page=first, tokens=np.ones(rows, np.int32), window_pages=8)
        members.append(SourceSpace(number, sizes))
    inner = FlatSpace(members[1:], num_windows=windows_of_flat(members, 8))  # the small one lies in a flat in the flat
    return FlatSpace([members[0], inner], num_windows=windows_of_flat(members, 8))


def epochs_of(method: str) -> list[NDArray[np.int64]]:
    """Number of the member of each row, in the order of each epoch."""
    flat, found = flat_space(), []
    for epoch in range(EPOCHS):
        order = StreamOrder("f", flat, seed=7, method=method)
        rows = np.concatenate([order.window(epoch, window).rows for window in range(order.num_windows)])
        assert np.array_equal(np.sort(rows), np.arange(sum(ROWS))), "each row once"
        found.append(flat.places(rows)[0])
    return found


def chi_square(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Over its degrees of freedom: about 1 where counts are as expected."""
    return float(((counts - expected) ** 2 / expected).sum() / (counts.size - 1))


def gap_counts(epochs: list[NDArray[np.int64]], edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """Rows from one of the one-page member to the next one, counted between edges."""
    gaps = np.concatenate([np.diff(np.flatnonzero(members == 2)) for members in epochs])
    return np.histogram(gaps, edges)[0].astype(float)


def test_rows_of_a_flat_are_shuffled_as_those_of_one_source() -> None:
    """With `row`: neighbours are of any two members as chance has it, and gaps are those of a random choice."""
    epochs = epochs_of("row")
    pairs = np.zeros((3, 3))
    for members in epochs:
        np.add.at(pairs, (members[:-1], members[1:]), 1)
    parts = np.array(ROWS) / sum(ROWS)
    assert chi_square(pairs, pairs.sum() * np.outer(parts, parts)) < 2.5
    edges = np.array([1, 10, 25, 50, 80, 130, 200, 300, 10**6])
    stays = (1 - parts[2]) ** (edges - 1.0)  # no row of the member among the next edge - 1
    counts = gap_counts(epochs, edges)
    assert chi_square(counts, counts.sum() * -np.diff(stays)) < 2.5


def test_a_member_of_one_page_comes_in_parts_that_lie_anywhere() -> None:
    """With `page`: parts of 16 rows, each in any window; inside a window its rows are as far apart as chance has it."""
    flat = flat_space()
    order = StreamOrder("f", flat, seed=7)
    of_window, gaps_in_window, wanted = Counter[int](), np.zeros(4), np.zeros(4)
    edges = np.array([1, 8, 20, 45, 10**6])
    for epoch in range(EPOCHS):
        for window in range(order.num_windows):
            members = flat.places(order.window(epoch, window).rows)[0]
            at = np.flatnonzero(members == 2)
            of_window[window] += len(at)
            if len(at) == 16:
                gaps_in_window += np.histogram(np.diff(at), edges)[0]
                of_all = len(members) - np.arange(16)  # of 16 rows among all, none is among the next edge - 1
                stays = np.prod(np.maximum(of_all - (edges[:, None] - 1), 0) / of_all, axis=1)
                wanted += 15 * -np.diff(stays)
    parts = np.array([of_window[window] / 16 for window in range(order.num_windows)])
    assert parts.sum() == EPOCHS * 10
    assert chi_square(parts, np.full(len(parts), parts.mean())) < 2
    assert chi_square(gaps_in_window, wanted) < 3
    assert max(len(run) for run in epochs_of_runs(epochs_of("page"))) < 16, "no clump"


def epochs_of_runs(epochs: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Runs of neighbours of the one-page member."""
    places = [np.flatnonzero(members == 2) for members in epochs]
    return [run for at in places for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)]


class Wide:
    """Rows without data, in pages of 2^7: what is asked of a row follows from its number."""

    window_units, longest_tokens = 64, 9

    def __init__(self, source: int, num_rows: int) -> None:
        self.source = source
        self.num_rows = self.num_kept = self.num_tokens = num_rows
        self.num_units = num_rows >> 7

    def members(self, units: Int64Array) -> Members:
        rows = (units[:, None] * 128 + np.arange(128)).reshape(-1)
        return Members(rows, None, len(rows))

    def tokens(self, rows: Int64Array) -> NDArray[np.int32]:
        return np.asarray(rows % 9, np.int32)

    def places(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        return np.full(len(rows), self.source), rows

    def used_rows(self) -> tuple[int, int]:
        return 0, self.num_rows

    def used_units(self) -> tuple[int, int]:
        return 0, self.num_units


@pytest.mark.parametrize("method", ["page", "row"])
def test_a_flat_of_2_to_the_33_rows_gives_all_of_them_alike(method: str) -> None:
    sizes = [1 << 32, (1 << 32) - (1 << 20), 1 << 20]
    flat = FlatSpace([Wide(number, rows) for number, rows in enumerate(sizes)], num_windows=1 << 20)
    assert flat.num_rows == 1 << 33
    order = StreamOrder("f", flat, seed=3, method=method)
    windows = [0, 1, order.num_windows // 2, order.num_windows - 1]
    rows = np.concatenate([order.window(epoch, window).rows for epoch in (0, 9) for window in windows])
    first = np.concatenate([order.window(0, window).rows for window in windows])
    assert len(np.unique(first)) == len(first) and first.min() >= 0 and first.max() < 1 << 33
    assert 0.4 < np.mean(rows >= 1 << 32) < 0.6 and np.any(rows % 2 == 1)
    assert len(np.unique(rows >> 29)) == 16, "from every part of the flat"
    source, row = flat.places(rows)
    bases = np.cumsum([0, *sizes])[source]
    assert np.array_equal(bases + row, rows)
    assert not np.array_equal(order.window(0, 0).rows, order.window(1, 0).rows)
