"""Which pages of a source are in which window of an epoch: one of each stratum, drawn by a keyed hash.

In: pages and windows of an epoch, a key for the order of windows and one for the strata. Out: the pages of a window, or
the windows of pages. Must hold: every page lies in one window; any window can be asked alone. Cost: a few nanoseconds a
page of the window, and one value permuted.

A stratum is as many neighbouring pages as there are windows; each window gets a random one of each. So a window holds
the same mixture of what lies together on disk as the whole source does, where pages drawn from everywhere at random
would make one window differ from the next. Windows are all of one size, to a page.

Source: stratified sampling, Neyman 1934; which page of a stratum is a random shift, as in systematic sampling.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchmix.mixture.keys import PHI64, mix64
from torchmix.mixture.permutation import permute, unpermute

Ints = NDArray[np.int64]


def pages_of_window(window: int, *, num_pages: int, num_windows: int, window_key: int, strata_key: int) -> Ints:
    """Pages of a window, ascending.

    Args:
        window: In [0, num_windows).
        num_pages: P, 1 or more.
        num_windows: Windows of the epoch, in [1, P].
        window_key: 64-bit key of the order of windows.
        strata_key: 64-bit key of what each stratum gives.

    Returns:
        int64, floor or ceil of P / num_windows of them.
    """
    strata = np.arange(-(-num_pages // num_windows))
    if num_windows == 1:
        return strata
    place = int(permute(np.array([window]), num_windows, window_key)[0])
    pages = strata * num_windows + (place + _shifts(strata, num_windows, strata_key)) % num_windows
    return pages if pages[-1] < num_pages else pages[:-1]


def windows_of_pages(pages: Ints, *, num_windows: int, window_key: int, strata_key: int) -> Ints:
    """The window of each page, [n]: the inverse of `pages_of_window`."""
    places: Ints = (pages - _shifts(pages // num_windows, num_windows, strata_key)) % num_windows
    return unpermute(places, num_windows, window_key)


def _shifts(strata: Ints, num_windows: int, key: int) -> Ints:
    """[n] in [0, num_windows), by hash."""
    shifts: Ints = (mix64(strata.astype(np.uint64) * np.uint64(PHI64) + np.uint64(key)) % np.uint64(num_windows)).view(
        np.int64
    )
    return shifts
