"""A reader that asks loaders, until none answers: then it reads the files itself.

In: a reader of loaders, and what opens the files. Out: a `StepReader`. Must hold: no data file is opened while a loader
answers; what is read without loaders is what they would have given. Cost: none while loaders answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import LoaderLost, SourceUnreadable, TorchmixError
from torchmix.reader.images.image_reader import ImageReader
from torchmix.reader.pieces.piece_copy import Tokens
from torchmix.reader.protocol import StepImages, StepReader

logger = logging.getLogger(__name__)


class FleetOrFiles:
    """A `StepReader` that asks a fleet as long as one loader answers, and then reads files."""

    def __init__(
        self,
        reader: StepReader,
        read_here: Callable[[], StepReader] | None,
        *,
        lost: str = "",
        images: ImageReader | None = None,
    ) -> None:
        """Begin with a fleet; or, where it was lost before, with a reader of this process.

        Args:
            reader: Closed by `close`.
            read_here: Opens files when the fleet is lost; None: it was.
            lost: How.
            images: What reads images; closed by `close`. None: whichever reads the rest.
        """
        self._reader = reader
        self._read_here = read_here
        self._lost, self._images = lost, images
        self._held: tuple[Int64Array, Int64Array, Int64Array] | None = None

    @property
    def images(self) -> StepImages | None:
        """The images of a step, from whichever reads."""
        return self._images or self._reader.images

    def read(
        self,
        source: NDArray[np.integer[Any]],
        rows: Int64Array,
        starts: Int64Array,
        tokens: Int64Array,
        *,
        places: Int64Array,
        num_places: int,
        epochs: Int64Array | None = None,
    ) -> Tokens:
        """As `Reader.read`.

        Raises:
            LoaderLost: No loader answers, and files cannot be read here.
        """
        while True:
            try:
                found = self._reader.read(
                    source, rows, starts, tokens, places=places, num_places=num_places, epochs=epochs
                )
                # A reader of files uses its memory in each call, one of loaders in every other.
                return found if self._read_here is not None else replace(found, values=found.values.copy())
            except LoaderLost as error:
                assert self._read_here is not None, "files raise other errors"
                self._reader.close()
                self._reader, self._read_here = files_instead(error, self._read_here), None
                self._lost = str(error)
                if self._held is not None:
                    self._reader.hold(*self._held)
            except SourceUnreadable as error:
                if not self._lost:
                    raise
                raise LoaderLost(f"{self._lost}. This process cannot read in their place: {error}") from error

    def pages_at_once(self, source: int) -> int:
        """As `Reader.pages_at_once`."""
        return self._reader.pages_at_once(source)

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.warm`."""
        self._reader.warm(source, page_ids)

    def hold(self, source: Int64Array, rows: Int64Array, starts: Int64Array) -> None:
        """As `Reader.hold`."""
        self._held = source, rows, starts
        self._reader.hold(source, rows, starts)

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.forget`."""
        self._reader.forget(source, page_ids)

    def end_window(self, source: int, page_ids: Int64Array | None) -> None:
        """As `Reader.end_window`."""
        self._reader.end_window(source, page_ids)

    def stats(self) -> dict[str, int | float]:
        """Figures of whichever reads."""
        return self._reader.stats()

    def close(self) -> None:
        """Close whichever reads; may be called again."""
        self._reader.close()
        if self._images is not None:
            self._images.close()


def files_instead(error: LoaderLost, read_here: Callable[[], StepReader]) -> StepReader:
    """A reader of this process, where it sees the files.

    Args:
        error: How the loaders were lost.
        read_here: Opens the files.

    Raises:
        LoaderLost: It does not see them.
    """
    try:
        reader = read_here()
    except TorchmixError as other:
        raise LoaderLost(f"{error}. This process cannot read in their place: {other}") from other
    logger.warning("%s. This process reads in their place", error)
    return reader
