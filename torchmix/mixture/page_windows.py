"""`shuffle: page`: a window is pages from all over a stream, with their rows permuted.

In: a space, whose units are pages. Out: see window_rows.py. Must hold: as there; sizes of windows differ by at most a
page (strata.py); a row that is not kept has a place in the permutation, so removing one row moves no other. Cost of a
window: one sort of its rows, about 0.1 ms per 15,000 rows.
"""

from __future__ import annotations

import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.keys import keyed_order, keyed_order_at
from torchmix.mixture.permutation import permute, unpermute
from torchmix.mixture.spaces.space import Space
from torchmix.mixture.strata import pages_at, places_of
from torchmix.mixture.window_rows import SPARSE, Key

KEPT_WINDOWS = 3
"""Windows whose pages are remembered: the previous, the current and the next one."""
PERMUTED_WINDOWS = 1 << 10
"""An epoch of at most this many windows is permuted in one call: one window costs as much as hundreds."""


class PageWindows:
    """Windows of permuted pages."""

    def __init__(self, space: Space, key: Key) -> None:
        self._space = space
        self._key = key
        self.num_windows = max(1, -(-space.num_units // space.window_units))
        start, stop = space.used_units()
        self.is_sparse = stop - start <= space.num_units // SPARSE
        self._last_units: dict[tuple[int, int], Int64Array] = {}
        self._last_places: tuple[int, list[int]] | None = None

    def rows(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        key = self._key("rows", epoch, window)
        if self.num_windows == 1 and self._space.num_kept == self._space.num_rows:
            return keyed_order(key, self._space.num_rows)  # a start makes it for hundreds of small sources
        members = self._space.members(self._units(epoch, window))
        if members.positions is None:
            return members.rows[keyed_order(key, len(members.rows))]
        return members.rows[keyed_order_at(key, members.positions, members.num_rows)]

    def num_rows(self, epoch: int, window: int) -> int:
        """See `WindowRows`."""
        return len(self._space.members(self._units(epoch, window)).rows)

    def pages(self, epoch: int, window: int) -> list[tuple[int, Int64Array]]:
        """See `WindowRows`."""
        return self._space.pages(self._units(epoch, window))

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        used = np.arange(*self._space.used_units())
        places = places_of(used, num_windows=self.num_windows, key=self._key("strata", epoch))
        return np.unique(unpermute(places, self.num_windows, self._key("pages", epoch)))

    def _units(self, epoch: int, window: int) -> Int64Array:
        """Units of a window; recent answers are kept, since planning and reading ahead ask for the same windows."""
        units = self._last_units.get((epoch, window))
        if units is None:
            if len(self._last_units) == KEPT_WINDOWS:
                del self._last_units[next(iter(self._last_units))]
            units = pages_at(
                self._place(epoch, window),
                num_pages=self._space.num_units,
                num_windows=self.num_windows,
                key=self._key("strata", epoch),
            )
            units.setflags(write=False)
            self._last_units[epoch, window] = units
        return units

    def _place(self, epoch: int, window: int) -> int:
        """Place of a window in the strata: permuted, so that neighbours on disk are not neighbours in time."""
        if self.num_windows > PERMUTED_WINDOWS:
            return int(permute(np.array([window]), self.num_windows, self._key("pages", epoch))[0])
        if self._last_places is None or self._last_places[0] != epoch:
            places = permute(np.arange(self.num_windows), self.num_windows, self._key("pages", epoch))
            self._last_places = epoch, places.tolist()
        return self._last_places[1][window]
