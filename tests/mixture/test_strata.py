"""Pages of windows: each page once, windows of one size, and from all over the source."""

from __future__ import annotations

import numpy as np
import pytest

from torchmix.mixture.keys import named_key, pages_at, places_of

SIZES = [(1, 1), (5, 1), (5, 5), (6, 4), (7, 3), (64, 8), (65, 8), (1000, 7), (4097, 130)]


def key(epoch: int) -> int:
    return named_key(7, "strata", "web", epoch)


def windows(num_pages: int, num_windows: int, epoch: int = 0) -> list[np.ndarray]:
    return [
        pages_at(place, num_pages=num_pages, num_windows=num_windows, key=key(epoch)) for place in range(num_windows)
    ]


@pytest.mark.parametrize(("num_pages", "num_windows"), SIZES)
def test_every_page_lies_in_one_window_and_windows_are_of_one_size(num_pages: int, num_windows: int) -> None:
    for epoch in range(3):
        found = windows(num_pages, num_windows, epoch)
        assert np.array_equal(np.sort(np.concatenate(found)), np.arange(num_pages))
        assert {len(pages) for pages in found} <= {num_pages // num_windows, -(-num_pages // num_windows)}
        for pages in found:
            assert pages.dtype == np.int64 and (np.diff(pages) > 0).all()
            assert len(set((pages // num_windows).tolist())) == len(pages), "one of each stratum"


@pytest.mark.parametrize(("num_pages", "num_windows"), SIZES)
def test_the_window_of_a_page_is_the_one_that_has_it(num_pages: int, num_windows: int) -> None:
    found = places_of(np.arange(num_pages), num_windows=num_windows, key=key(2))
    for place, pages in enumerate(windows(num_pages, num_windows, 2)):
        assert np.array_equal(np.flatnonzero(found == place), pages)


def test_each_page_of_a_stratum_is_as_likely_and_strata_do_not_tell_of_each_other() -> None:
    num_windows, epochs = 8, 4000
    first = np.array([places_of(np.array([0, 8, 9]), num_windows=8, key=key(epoch)) for epoch in range(epochs)])
    for column in range(3):
        counts = np.bincount(first[:, column], minlength=num_windows)
        assert ((counts - epochs / 8) ** 2 / (epochs / 8)).sum() < 24.3, "chi-square of 7, odds 1 in 1000"
    pairs = np.bincount(first[:, 0] * 8 + first[:, 1], minlength=64)
    assert ((pairs - epochs / 64) ** 2 / (epochs / 64)).sum() < 103.4, "chi-square of 63, odds 1 in 1000"
