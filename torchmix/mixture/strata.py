"""Which pages of a source are in which window of an epoch: one of each stratum, drawn by a keyed hash.

In: places of windows in an epoch, and a key. Out: the pages of a window, or the places of the windows of pages. Must
hold: every page lies in one window; any window can be asked alone. Cost: a few nanoseconds a page of the window.

A stratum is a run of neighbouring pages, as many as there are windows; each window takes a random page of each stratum.
So every window samples all parts of the files evenly, and holds the same mixture as the whole source. Pages drawn at
random from everywhere would make one window differ from the next. The sizes of all windows differ by at most a page.

Source: stratified sampling, Neyman 1934; which page of a stratum is a random shift, as in systematic sampling.
"""

from __future__ import annotations

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.keys import PHI64, mix64


def pages_at(place: int, *, num_pages: int, num_windows: int, key: int) -> Int64Array:
    """Pages of a window, ascending.

    Args:
        place: In [0, num_windows); windows of neighbouring places have neighbouring pages.
        num_pages: P, 1 or more.
        num_windows: Windows of the epoch, in [1, P].
        key: 64-bit key of the choice in each stratum.

    Returns:
        int64, floor or ceil of P / num_windows of them.
    """
    strata = np.arange(-(-num_pages // num_windows))
    if num_windows == 1:
        return strata
    pages = strata * num_windows + (place + _shifts(strata, num_windows, key)) % num_windows
    return pages if pages[-1] < num_pages else pages[:-1]


def places_of(pages: Int64Array, *, num_windows: int, key: int) -> Int64Array:
    """The place of the window of each page, [n]: the inverse of `pages_at`."""
    places: Int64Array = (pages - _shifts(pages // num_windows, num_windows, key)) % num_windows
    return places


def _shifts(strata: Int64Array, num_windows: int, key: int) -> Int64Array:
    """[n] in [0, num_windows), by hash."""
    hashes = mix64(strata.astype(np.uint64) * np.uint64(PHI64) + np.uint64(key))
    shifts: Int64Array = (hashes % np.uint64(num_windows)).view(np.int64)
    return shifts
