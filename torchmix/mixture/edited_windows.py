"""The windows of an epoch in which a stream's rows were changed.

In: the windows of the stream's rows as they are now, and for one epoch its parts: each an era, with windows of its own.
Out: see window_rows.py. Must hold: within the epoch a row that stays comes once, whatever was changed how often; all
other epochs are those of a stream that always had these rows. Cost: a look at the window's number.

An era begins with a window. The windows before it are those of the era before, with the rows that it had. From there
on, the rows that the epoch has not given yet, and those that are new, share one permutation: a space of their own
(spaces/rest.py), shared out among strata as any other. Rows that are gone keep their places in the window that was
open, and count for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from torchmix.array_types import Int64Array
from torchmix.mixture.window_rows import WindowRows


class EraWindows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One era of an epoch."""

    start: int
    """The window of the epoch that it begins with."""
    num_windows: int
    """Its windows; the next era may begin before they are all given."""
    windows: WindowRows
    """Its windows, from 0 on."""
    numbers: Callable[[Int64Array], Int64Array]
    """Rows of its space -> their numbers in the stream's space."""
    hidden: Mapping[int, Int64Array]
    """Window of the epoch -> rows of the stream's space, ascending, that it gives no more."""


class EditedWindows:
    """The windows of a stream that was edited."""

    def __init__(self, windows: WindowRows, epoch: int, eras: Sequence[EraWindows]) -> None:
        """Take the parts of an epoch.

        Args:
            windows: Of all other epochs.
            epoch: The epoch that was edited.
            eras: Its parts, by `start`, from 0 on.
        """
        self._windows, self._epoch, self._eras = windows, epoch, tuple(eras)
        self.num_windows, self.is_sparse = windows.num_windows, windows.is_sparse

    def num_windows_of(self, epoch: int) -> int:
        """Windows of an epoch."""
        last = self._eras[-1]
        return last.start + last.num_windows if epoch == self._epoch else self.num_windows

    def is_edited(self, epoch: int) -> bool:
        """Whether an epoch has parts."""
        return epoch == self._epoch

    def hidden(self, epoch: int, window: int) -> Int64Array | None:
        """Rows of a window that are not given, ascending."""
        return self._era(window).hidden.get(window) if epoch == self._epoch else None

    def rows(self, epoch: int, window: int) -> Int64Array:
        """See `WindowRows`."""
        if epoch != self._epoch:
            return self._windows.rows(epoch, window)
        era = self._era(window)
        return era.numbers(era.windows.rows(epoch, window - era.start))

    def num_rows(self, epoch: int, window: int) -> int:
        """See `WindowRows`."""
        if epoch != self._epoch:
            return self._windows.num_rows(epoch, window)
        era = self._era(window)
        return era.windows.num_rows(epoch, window - era.start)

    def pages(self, epoch: int, window: int) -> list[tuple[int, Int64Array]]:
        """See `WindowRows`."""
        if epoch != self._epoch:
            return self._windows.pages(epoch, window)
        era = self._era(window)
        return era.windows.pages(epoch, window - era.start)

    def used_windows(self, epoch: int) -> Int64Array:
        """See `WindowRows`."""
        return np.arange(self.num_windows_of(epoch)) if epoch == self._epoch else self._windows.used_windows(epoch)

    def _era(self, window: int) -> EraWindows:
        return next(era for era in reversed(self._eras) if era.start <= window)
