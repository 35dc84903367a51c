"""A reader that reads what its processors have time for, and asks loaders for the rest.

In: a reader of files, a reader of loaders, and how much the first one takes. Out: a `StepReader`. Must hold: the tokens
are the same whoever reads them; nothing waits for a loader that is not there, and when the last one has gone this
process reads alone, until one is back. Cost: while this process reads alone, a look at the connections; else both read
at once, and their tokens are copied into one array.

Who reads a page follows from a hash of its run: below the share it is read here, else by the run's owner. So when the
share moves by a step, only as many pages change sides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import CatalogError, LoaderLost
from torchmix.mixture.keys import U64
from torchmix.reader.pieces.piece_copy import Scratch, Tokens
from torchmix.reader.protocol import StepImages
from torchmix.reader.reader import Reader
from torchmix.service.fleet_reader import FleetReader
from torchmix.service.here.cpu_share import CpuShare
from torchmix.service.here.read_both import PiecesAsked, joined_tokens, read_both

logger = logging.getLogger(__name__)


class NodeFirst:
    """Reads here first; it belongs to one thread at a time."""

    def __init__(self, here: Reader, there: FleetReader, share: CpuShare) -> None:
        """Begin by reading all here.

        Args:
            here: Reads files; closed by `close`.
            there: Asks loaders; closed by `close`. It has not waited for them.
            share: Of the pages that are read here.
        """
        self._here, self._there, self._share = here, there, share
        self._thread = ThreadPoolExecutor(1, "torchmix-far")
        self._scratch, self._other_scratch = Scratch(), Scratch()
        self._parts = Scratch(), Scratch()
        """Memory of what is read here beside loaders, and of what they did not read."""
        self._tokens_here = self._tokens_there = self._num_lost = 0
        self._is_alone = True
        self._is_noted = False
        """Whether the log has been told that no loader answers."""

    @property
    def images(self) -> StepImages | None:
        """The images of a step: they are read here."""
        return self._here.images

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
        is_far = self._is_far(asked)
        if not is_far.any():
            self._tokens_here += int(tokens.sum())
            return asked.read_by(partial(self._here.read, scratch=self._scratch))
        if is_far.all():
            return self._far(asked, partial(asked.read_by, self._there.read), self._scratch)
        here = partial(self._here.read, scratch=self._parts[0])
        both = read_both(asked, is_far, self._thread, here=here, there=self._there.read)
        self._tokens_here += int(tokens[both.near].sum())
        theirs = self._far(both.asked_far, both.coming.result, self._parts[1])
        return joined_tokens(asked, ((both.near, both.ours), (both.far, theirs)), self._scratch)

    def pages_at_once(self, source: int) -> int:
        """As `Reader.pages_at_once`."""
        return self._here.pages_at_once(source)

    def warm(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.warm`, by whom the pages will be asked of."""
        is_far = self._are_far(self._there.runs_of_pages(source, page_ids))
        self._here.warm(source, page_ids[~is_far])
        self._there.warm(source, page_ids[is_far])

    def hold(self, source: Int64Array, rows: Int64Array, starts: Int64Array) -> None:
        """As `Reader.hold`."""
        self._here.hold(source, rows, starts)

    def forget(self, source: int, page_ids: Int64Array) -> None:
        """As `Reader.forget`, by all."""
        self._here.forget(source, page_ids)
        self._there.forget(source, page_ids)

    def end_window(self, source: int, page_ids: Int64Array | None) -> None:
        """As `Reader.end_window`, of the pages that are read here."""
        if page_ids is not None:
            page_ids = page_ids[~self._are_far(self._there.runs_of_pages(source, page_ids))]
        self._here.end_window(source, page_ids)

    def stats(self) -> dict[str, int | float]:
        """Figures of both, the tokens that each has given, the share, and how often no loader was left."""
        there, here = self._there.stats(), self._here.stats()
        return {
            **there,
            **here,
            "bytes_served": here["bytes_served"] + there["bytes_served"],
            "node_share": self._share.share,
            "total_node_tokens": self._tokens_here,
            "total_loader_tokens": self._tokens_there,
            "total_loader_losses": self._num_lost,
        }

    def close(self) -> None:
        """Close both; may be called again."""
        self._thread.shutdown()
        self._there.close()
        self._here.close()

    def _is_far(self, asked: PiecesAsked) -> NDArray[np.bool_]:
        """[n] which pieces loaders are asked for."""
        share = self._share.look()
        if self._there.look():
            self._is_alone = self._is_noted = False
        elif not self._is_alone:
            self._lose(self._there.why_none())
        elif share < 1 and not self._is_noted:
            self._is_noted = True
            logger.warning("the processors of this node are busy, and %s. It reads alone", self._there.why_none())
        if self._is_alone or share >= 1:
            return np.zeros(len(asked.rows), np.bool_)
        return self._are_far(self._there.runs_of_pieces(asked.source, asked.rows, asked.starts, asked.tokens))

    def _are_far(self, runs: U64) -> NDArray[np.bool_]:
        """Which runs of pages loaders are asked for."""
        if self._is_alone:
            return np.zeros(len(runs), np.bool_)
        found: NDArray[np.bool_] = (runs >> np.uint64(11)) * 2.0**-53 >= self._share.share
        return found

    def _far(self, asked: PiecesAsked, theirs: Callable[[], Tokens], scratch: Scratch) -> Tokens:
        """What loaders give; or what this process reads where they fail."""
        try:
            found = theirs()
            self._tokens_there += int(asked.tokens.sum())
            return found
        except LoaderLost as error:
            self._lose(str(error))
        except CatalogError as error:
            logger.warning("loaders cannot read what this node tries itself then: %s", error)
        self._tokens_here += int(asked.tokens.sum())
        return asked.read_by(partial(self._here.read, scratch=scratch))

    def _lose(self, reason: str) -> None:
        self._is_alone = self._is_noted = True
        self._num_lost += 1
        logger.warning("%s. This node reads alone until a loader answers again", reason)
