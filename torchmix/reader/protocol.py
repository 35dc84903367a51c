"""What the making of steps asks of a reader.

What is asked decides what comes, whatever was read ahead or kept; whoever has opened a reader closes it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import ItemTable
from torchmix.modalities.modality import Modality
from torchmix.reader.piece_copy import Tokens


class StoppedWaiting(Exception):
    """Nobody wants the step any more that a decision or a loader is waited for."""


class StepItems(Protocol):
    """What the making of steps asks of items of a kind; as `ItemReader`."""

    def table(self, source: str, kind: str) -> ItemTable:
        """The items of a source, as its texts have them."""
        ...

    def modality(self, source: str, kind: str) -> Modality:
        """What a source makes of its items."""
        ...

    def any_modality(self, kind: str) -> Modality:
        """What some source makes of its items; those of a kind have units of one size."""
        ...

    def read(self, source: str, kind: str, items: Int64Array) -> list[memoryview]:
        """The bytes of some items of a source."""
        ...

    @property
    def gives_units(self) -> bool:
        """Whether loaders decode: `read_units` is asked, and `read` is not."""
        ...

    def read_units(self, source: str, kind: str, items: Int64Array) -> list[NDArray[Any]]:
        """The units of some items of a source, [units, unit_values] each."""
        ...

    def close(self) -> None:
        """Give back all that it holds."""
        ...


class StepReader(Protocol):
    """A `Reader` of files, or another that knows the same documents; errors and arguments as those of `Reader`."""

    @property
    def items(self) -> StepItems | None:
        """Reads items of its sources; None where they have none."""
        ...

    def read(
        self,
        source: NDArray[np.integer[Any]],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        tokens: NDArray[np.int64],
        *,
        places: NDArray[np.int64],
        num_places: int,
        epochs: NDArray[np.int64] | None = None,
    ) -> Tokens:
        """Tokens of n pieces, and the successor of each."""
        ...

    def pages_at_once(self, source: int) -> int:
        """How many pages of a source, 1 or more, are worth one call of `warm`."""
        ...

    def warm(self, source: int, page_ids: NDArray[np.int64]) -> None:
        """Decode pages ahead of need, as many as there is room for."""
        ...

    def hold(self, source: NDArray[np.int64], rows: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Keep what is left of documents that continue after the next `read`."""
        ...

    def forget(self, source: int, page_ids: NDArray[np.int64]) -> None:
        """Drop pages that will not be needed soon."""
        ...

    def end_window(self, source: int, page_ids: NDArray[np.int64] | None) -> None:
        """Say that a window with these pages has ended, or with None one of all pages; for `stats` alone."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Figures since the reader was made."""
        ...

    def close(self) -> None:
        """Give back all that it holds; may be called again."""
        ...
