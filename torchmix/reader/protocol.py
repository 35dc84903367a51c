"""What the making of steps asks of a reader.

What is asked decides what comes, whatever was read ahead or kept; whoever has opened a reader closes it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.sizes import ItemTable
from torchmix.reader.piece_copy import Tokens
from torchmix.transform.images.decode import ImageTransform


class StoppedWaiting(Exception):
    """Nobody wants the step any more that a decision or a loader is waited for."""


class StepImages(Protocol):
    """What the making of steps asks of images; as `ImageReader`."""

    @property
    def patch_values(self) -> int:
        """Values of a patch, of any source."""
        ...

    def table(self, source: str) -> ItemTable:
        """The images of a source, as its texts have them."""
        ...

    def transform(self, source: str) -> ImageTransform:
        """What a source makes of its images."""
        ...

    def merge(self, source: str) -> int:
        """Patches of the side of a block that becomes one token; 1 where the source merges none."""

    def read(self, source: str, images: Int64Array) -> list[memoryview]:
        """The bytes of some images of a source."""
        ...

    @property
    def gives_patches(self) -> bool:
        """Whether loaders decode: `read_patches` is asked, and `read` is not."""
        ...

    def read_patches(self, source: str, images: Int64Array) -> list[NDArray[np.uint8]]:
        """The patches of some images of a source, [patches, patch_values] each."""
        ...

    def close(self) -> None:
        """Give back all that it holds."""
        ...


class StepReader(Protocol):
    """A `Reader` of files, or another that knows the same documents; errors and arguments as those of `Reader`."""

    @property
    def images(self) -> StepImages | None:
        """Reads images of its sources; None where they have none."""
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
