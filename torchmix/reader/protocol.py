"""What the making of steps asks of a reader, and what it gets.

What is asked decides what comes, whatever was read ahead or kept; whoever has opened a reader closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.catalog.sizes import TokenRuns
from torchmix.modalities.modality import Modality, PlannedItem


class WantedPieces(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """n pieces of documents, and where the tokens of each belong."""

    source: NDArray[np.int32]
    """[n] index of the source, by sorted name."""
    row: Int64Array
    """[n] row of the source."""
    epoch: Int64Array
    """[n] pass over the source, for maps of rows that are random, and for functions that alter items."""
    start: Int64Array
    """[n] first token of the piece in its document."""
    tokens: Int64Array
    """[n] tokens of the piece; `start + tokens` is at most the tokens of the document."""
    places: Int64Array
    """[n] where the piece's first token belongs; pieces do not overlap."""
    num_places: int
    """Length of the result; no piece reaches beyond it."""

    def __len__(self) -> int:
        return len(self.row)

    def take(self, chosen: Int64Array) -> WantedPieces:
        """Some of the pieces, each for the place that it has."""
        columns = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        return WantedPieces(**columns, num_places=self.num_places)

    def check_places(self) -> None:
        """Assert that no piece reaches beyond the result: copies do not look again."""
        places = self.places
        assert not len(places) or (places.min() >= 0 and (places + self.tokens).max() <= self.num_places), "in bounds"

    @staticmethod
    def end_to_end(
        *,
        source: NDArray[np.integer[Any]] | int,
        row: Int64Array,
        epoch: Int64Array | int,
        start: Int64Array | int,
        tokens: Int64Array,
    ) -> WantedPieces:
        """Pieces whose tokens follow each other without a gap; a single number holds for all of them."""
        ends = np.cumsum(tokens, dtype=np.int64)
        return WantedPieces(
            source=np.full(len(row), source, np.int32),
            row=row,
            epoch=np.full(len(row), epoch, np.int64),
            start=np.full(len(row), start, np.int64),
            tokens=tokens,
            places=ends - tokens,
            num_places=int(ends[-1]) if len(ends) else 0,
        )

    @staticmethod
    def joined(parts: Sequence[WantedPieces]) -> WantedPieces:
        """The pieces of all parts; the places of each part follow those of the part before."""
        if len(parts) == 1:
            return parts[0]
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
        sizes = np.array([part.num_places for part in parts], np.int64)
        columns["places"] += np.repeat(np.cumsum(sizes) - sizes, [len(part) for part in parts])
        return WantedPieces(**columns, num_places=int(sizes.sum()))


_COLUMNS = tuple(name for name in WantedPieces.__struct_fields__ if name != "num_places")


class OtherRows(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One of the arrays that a map gives beside ids, for some rows of a source."""

    name: str
    """The map's name for it."""
    piece: Int64Array
    """[k] index in the request of the piece that begins each row: a row's other values come with its first token."""
    values: pa.Array
    """[k] large_list of numbers."""

    def only(self, chosen: Int64Array, piece: Int64Array) -> OtherRows:
        """Some of the rows, in the order of `chosen`, with the pieces that begin them."""
        return OtherRows(name=self.name, piece=piece, values=chosen_lists(self.values, chosen))


def chosen_lists(lists: pa.Array, chosen: Int64Array) -> pa.Array:
    """Some lists, by their numbers, in any order; a view where they are neighbours.

    Arrow's own `take` makes an index of all numbers in the lists, 8 bytes of each, and a list may be the bytes of a
    picture.
    """
    borders = [0, *(np.flatnonzero(np.diff(chosen) != 1) + 1).tolist(), len(chosen)]
    runs = [lists.slice(int(chosen[start]) if start < stop else 0, stop - start) for start, stop in pairwise(borders)]
    return runs[0] if len(runs) == 1 else pa.concat_arrays(runs)


class Tokens(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The result of one call."""

    values: NDArray[np.integer[Any]]
    """[num_places] the tokens of each piece at its place; undefined elsewhere. The dtype is the narrowest one for all
    pages that were read, mostly int32 or uint16. Valid until the next read into the same memory."""
    successors: Int64Array
    """[n] the token that follows each piece in its document; 0 where the document ends with it."""
    others: tuple[OtherRows, ...] = ()
    """What maps gave beside the ids."""
    unlabelled: Int64Array | None = None
    """Places whose next token is one of an item, or without loss; None: there are none."""


NO_LABEL = -100
"""The label of a token that has none: the value that torch's `cross_entropy` ignores by default."""


class Filling(NamedTuple):
    """Memory for tokens and labels of some of the places of a call; those of the next one follow."""

    tokens: Int32Array
    """[N] ids; 0 in padding."""
    labels: Int32Array
    """[N] the next id of the document, or NO_LABEL."""


class BlankPiece(NamedTuple):
    """A piece that has a value which is no token id: its tokens are 0, without labels."""

    piece: int
    """Index in the request."""
    place: int
    """Where in the piece that value is."""
    value: int


class Filled(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a call has found while it wrote tokens and labels."""

    blank: tuple[BlankPiece, ...] = ()
    """Ascending."""
    others: tuple[OtherRows, ...] = ()
    """As in `Tokens`."""
    unlabelled: Int64Array | None = None
    """As in `Tokens`; labels are there all the same."""


class StoppedWaiting(Exception):
    """Nobody wants the step any more that a decision or a loader is waited for."""


class StepItems(Protocol):
    """What the making of steps asks of items of a kind; as `ItemReader`."""

    def table(self, source: str, kind: str) -> TokenRuns:
        """The items of a source, as its texts have them."""
        ...

    def modality(self, source: str, kind: str) -> Modality:
        """What a source makes of its items."""
        ...

    def any_modality(self, kind: str) -> Modality:
        """What some source makes of its items; those of a kind have units of one size."""
        ...

    def planned(self, source: str, kind: str, items: Int64Array, epochs: Int64Array) -> list[PlannedItem]:
        """Some items of a source, each as it is in an epoch."""
        ...

    def read(self, source: str, kind: str, items: Int64Array) -> list[memoryview]:
        """The bytes of some items of a source."""
        ...

    def gives_units(self, kind: str) -> bool:
        """Whether loaders decode items of a kind: `read_units` is asked, and `read` is not."""
        ...

    def read_units(self, source: str, kind: str, items: Int64Array, epochs: Int64Array) -> list[NDArray[Any]]:
        """The units of some items of a source, each as it is in an epoch, [units, unit_values] each."""
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

    def read(self, pieces: WantedPieces) -> Tokens:
        """Tokens of n pieces, and the successor of each."""
        ...

    def fill(self, pieces: WantedPieces, outs: Sequence[Filling], *, pads: bool = True) -> Filled:
        """Write tokens and labels of n pieces, whose places ascend, and the padding between them."""
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

    def expect(self, stream: int, pages: Sequence[tuple[int, NDArray[np.int64] | None]]) -> None:
        """Say which pages a stream may need from now on, of each of its sources, in place of those that it named
        before; None: any page."""
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
