"""Which rows each window of an epoch has, and in what order: one protocol, three ways to shuffle.

In: a stream's name, its space and the seed. Out: rows and pages of any window of any epoch. Must hold: within an epoch
every row is in exactly one window; a window can be asked alone.

`page` (page_windows.py): each window takes pages from all over the source, and permutes their rows. Two rows of a batch
share a page with odds about r/W (r rows a page, W rows a window), so a window of 2B rows keeps rows of a page as well
apart as a buffer of B rows filled from permuted pages (Youmu's aggressive buffer); what the windows hold differs less.
`row` (row_windows.py): an epoch permutes all rows. Nothing brings rows of a page together, so a page is decoded for
nearly every row. `none` (row_windows.py): rows as they lie in the files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from torchmix.array_types import Int64Array
from torchmix.mixture.keys import named_key

Key = Callable[..., int]
"""A word and a place (integers) -> the 64-bit key of one choice of a stream."""

Method = Literal["page", "row", "none"]

SPARSE = 8
"""If at most one unit in SPARSE has used rows, windows without used rows are skipped and never made."""


class WindowRows(Protocol):
    """The rows of each window of each epoch of one stream, numbered as in its space.

    Windows count from 0 to `num_windows`.
    """

    @property
    def num_windows(self) -> int:
        """Windows of an epoch, 1 or more."""

    @property
    def is_sparse(self) -> bool:
        """Whether few windows have used rows; `used_windows` lists them."""

    def rows(self, epoch: int, window: int) -> Int64Array:
        """[n] kept rows of a window, used or not, in the order in which they are drawn."""

    def num_rows(self, epoch: int, window: int) -> int:
        """Kept rows of a window, used or not."""

    def pages(self, epoch: int, window: int) -> list[tuple[int, Int64Array]]:
        """Pages of a window that may hold used rows: by source, ascending, each once."""

    def used_windows(self, epoch: int) -> Int64Array:
        """Windows of an epoch that may have used rows, ascending; costs as much as their number."""


def key_of_stream(name: str, seed: int, era: int | None = None) -> Key:
    """The keys of a stream's choices; `era`: the window that an era of an edited epoch begins with."""
    of_era: tuple[str | int, ...] = () if era is None else ("era", era)

    def key(word: str, *place: int) -> int:
        return named_key(seed, word, name, *place, *of_era)

    return key
