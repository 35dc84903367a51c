"""The pieces of a step, split between this process and loaders, read by both at once and joined.

In: what a call of `StepReader.read` asks for, and which of its pieces are far. Out: the tokens of each part, and those
of all. Must hold: a thread asks loaders while this process reads; when `read_both` returns or raises, nobody uses the
connections. Cost: the tokens of both parts are copied once more, into one array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.reader.pieces.piece_copy import PieceCopy, Run, Scratch, Tokens

Read = Callable[..., Tokens]
"""The `read` of a `StepReader`."""


class PiecesAsked(NamedTuple):
    """The arguments of a call of `read`."""

    source: NDArray[np.integer[Any]]
    rows: Int64Array
    starts: Int64Array
    tokens: Int64Array
    places: Int64Array
    epochs: Int64Array | None
    num_places: int

    def some(self, chosen: Int64Array) -> PiecesAsked:
        """Some of the pieces, each for the place that it has."""
        return PiecesAsked(
            self.source[chosen],
            self.rows[chosen],
            self.starts[chosen],
            self.tokens[chosen],
            self.places[chosen],
            None if self.epochs is None else self.epochs[chosen],
            self.num_places,
        )

    def read_by(self, read: Callable[..., Tokens]) -> Tokens:
        """The tokens, from a reader's `read`."""
        return read(
            self.source,
            self.rows,
            self.starts,
            self.tokens,
            places=self.places,
            num_places=self.num_places,
            epochs=self.epochs,
        )


class ReadBoth(NamedTuple):
    """What two readers have read of one step."""

    near: Int64Array
    """[n] the pieces that this process has read, by their places in what was asked for."""
    far: Int64Array
    """[m] the pieces that loaders were asked for, likewise."""
    asked_far: PiecesAsked
    """These, as loaders were asked for them."""
    ours: Tokens
    """The tokens of the near pieces."""
    coming: Future[Tokens]
    """What loaders gave, or their error; it is there."""


def read_both(
    asked: PiecesAsked, is_far: NDArray[np.bool_], thread: ThreadPoolExecutor, *, here: Read, there: Read
) -> ReadBoth:
    """Read some pieces here while a thread asks loaders for the others.

    Args:
        asked: All pieces.
        is_far: [n] which of them loaders are asked for.
        thread: Runs `there`.
        here: Reads files.
        there: Asks loaders. Its error stays in `coming`.
    """
    near, far = np.flatnonzero(~is_far), np.flatnonzero(is_far)
    asked_far = asked.some(far)
    coming = thread.submit(asked_far.read_by, there)
    try:
        ours = asked.some(near).read_by(here)
    finally:
        wait([coming])  # nobody uses the connections afterwards
    return ReadBoth(near, far, asked_far, ours, coming)


def joined_tokens(asked: PiecesAsked, parts: Sequence[tuple[Int64Array, Tokens]], scratch: Scratch) -> Tokens:
    """Join the tokens of several parts; each part is the places of its pieces, with their tokens."""
    order = np.concatenate([chosen for chosen, _ in parts])
    places = asked.places[order]
    copy = PieceCopy(
        sizes=asked.tokens[order],
        places=places,
        goes_on=np.zeros(len(order), np.bool_),
        num_places=asked.num_places,
        scratch=scratch,
    )
    successors, runs, first = np.empty(len(order), np.int64), list[Run](), 0
    for chosen, found in parts:
        successors[chosen] = found.successors
        runs.append((found.values, first, places[first : first + len(chosen)].tolist()))
        first += len(chosen)
    copy.copy_all(runs)
    others = [replace(other, piece=chosen[other.piece]) for chosen, found in parts for other in found.others]
    without = [found.unlabelled for _, found in parts if found.unlabelled is not None]
    return Tokens(
        values=copy.out,
        successors=successors,
        others=tuple(others),
        unlabelled=np.concatenate(without) if without else None,
    )
