"""A reader that reads and transforms some sources itself, and asks loaders for the others.

In: a reader of files, a reader that asks loaders, and which sources are read here. Out: a `StepReader`. Must hold: the
tokens are the same wherever a source is read; no loader is asked for a source of this process. Cost: where a step has
sources of both, they are read at once, and their tokens are copied into one array.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.reader.pieces.piece_copy import Scratch, Tokens
from torchmix.reader.protocol import StepImages, StepReader
from torchmix.reader.reader import Reader
from torchmix.service.here.read_both import PiecesAsked, joined_tokens, read_both


class BySource:
    """Reads some sources here; it belongs to one thread at a time."""

    def __init__(self, here: Reader, there: StepReader, names: Sequence[str], here_names: Collection[str]) -> None:
        """Nothing is read.

        Args:
            here: Reads files; closed by `close`.
            there: Asks loaders; closed by `close`.
            names: All sources, by number.
            here_names: Those that are read here.
        """
        self._here, self._there = here, there
        self._is_here = np.array([name in here_names for name in names], np.bool_)
        self._thread = ThreadPoolExecutor(1, "torchmix-there")
        self._scratch, self._other_scratch = Scratch(), Scratch()
        self._part = Scratch()
        self._tokens_here = self._tokens_there = 0

    @property
    def images(self) -> StepImages | None:
        """The images of a step: loaders are asked for them."""
        return self._there.images

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
        """As `Reader.read`; values are valid until the next call but one."""
        self._scratch, self._other_scratch = self._other_scratch, self._scratch
        asked = PiecesAsked(source, rows, starts, tokens, places, epochs, num_places)
        is_here = self._is_here[np.asarray(source, np.int64)]
        self._tokens_here += int(tokens[is_here].sum())
        self._tokens_there += int(tokens[~is_here].sum())
        if is_here.all():
            return asked.read_by(partial(self._here.read, scratch=self._scratch))
        if not is_here.any():
            return asked.read_by(self._there.read)
        here = partial(self._here.read, scratch=self._part)
        both = read_both(asked, ~is_here, self._thread, here=here, there=self._there.read)
        return joined_tokens(asked, ((both.near, both.ours), (both.far, both.coming.result())), self._scratch)

    def pages_at_once(self, source: int) -> int:
        """As `Reader.pages_at_once`."""
        return self._of(source).pages_at_once(source)

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.warm`."""
        self._of(source).warm(source, page_ids)

    def hold(self, source: Int64Array, rows: Int64Array, starts: Int64Array) -> None:
        """As `Reader.hold`, each of its own."""
        is_here = self._is_here[source]
        self._here.hold(source[is_here], rows[is_here], starts[is_here])
        self._there.hold(source[~is_here], rows[~is_here], starts[~is_here])

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.forget`."""
        self._of(source).forget(source, page_ids)

    def end_window(self, source: int, page_ids: Int64Array | None) -> None:
        """As `Reader.end_window`."""
        self._of(source).end_window(source, page_ids)

    def stats(self) -> dict[str, int | float]:
        """Figures of both, and the tokens that each has given."""
        there, here = self._there.stats(), self._here.stats()
        return {
            **there,
            **here,
            "bytes_served": here["bytes_served"] + there["bytes_served"],
            "total_worker_tokens": self._tokens_here,
            "total_loader_tokens": self._tokens_there,
        }

    def close(self) -> None:
        """Close both; may be called again."""
        self._thread.shutdown()
        self._there.close()
        self._here.close()

    def _of(self, source: int) -> StepReader:
        return self._here if self._is_here[source] else self._there
