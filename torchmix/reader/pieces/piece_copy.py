"""Pieces of documents -> their places in one array.

In: pieces, and arrays of tokens as they come, with where in them each piece begins. Out: every token at its place, and
the token that follows each piece in its document. Must hold: values between the places are undefined. Cost: moving the
memory, and half a microsecond a piece. Tokens are copied as they are. Only where arrays differ in type, the tokens
copied so far are widened, all at once. Widening piece by piece costs more: numpy releases the interpreter's lock for
each converting copy, and has to wait for the lock each time while other threads run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array

Run = tuple[NDArray[np.integer[Any]], int, Sequence[int]]
"""Tokens, the number of the first of consecutive pieces, and where in the tokens each of these pieces begins."""


class Scratch:
    """Memory that every call reuses."""

    def __init__(self) -> None:
        self._arrays: dict[np.dtype[Any], NDArray[Any]] = {}

    def array(self, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
        """[length] of a dtype: zeros, or values of an earlier call."""
        held = self._arrays.get(dtype)
        if held is None or len(held) < length:
            held = self._arrays[dtype] = np.zeros(length, dtype)
        return held[:length]


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
    """Places whose next token is one of an image, or without loss; None: there are none."""


class PieceCopy:
    """Copies the pieces of one call to their places."""

    __slots__ = ("_going_on", "_is_begun", "_places", "_scratch", "_sizes", "_stops", "num_bytes", "out", "successors")

    def __init__(
        self, *, sizes: Int64Array, places: Int64Array, goes_on: NDArray[np.bool_], num_places: int, scratch: Scratch
    ) -> None:
        """Nothing is copied yet.

        Args:
            sizes: [n] tokens of each piece.
            places: [n] where its first token belongs.
            goes_on: [n] whether its document has more tokens.
            num_places: Length of the result.
            scratch: Holds the result.
        """
        self._sizes = sizes.tolist()
        self._places = places.tolist()
        self._stops = (places + sizes).tolist()
        self._going_on = np.flatnonzero(goes_on).tolist()
        self._scratch = scratch
        self._is_begun = False
        self.successors = [0] * len(sizes)
        """[n] the token that follows each piece in its document; 0 where none does."""
        self.out: NDArray[np.integer[Any]] = scratch.array(np.dtype(np.int32), num_places)
        """[num_places] of the narrowest type that holds all copied tokens."""
        self.num_bytes = 0
        """Bytes copied, in the types of their pages."""

    def copy_all(self, runs: Sequence[Run]) -> None:
        """Copy several runs of pieces, narrow types first, so that they are widened together, if at all."""
        if len({values.dtype.char for values, _, _ in runs}) > 1:
            runs = sorted(runs, key=lambda run: (run[0].itemsize, run[0].dtype.char))
        for values, first, begins in runs:
            self.copy(values, first, begins)

    def copy(self, values: NDArray[np.integer[Any]], first: int, begins: Sequence[int]) -> None:
        """Copy consecutive pieces, from number `first` on, from one array; `begins` says where each begins in it."""
        dtype = values.dtype
        if not self._is_begun or (dtype != self.out.dtype and not np.can_cast(dtype, self.out.dtype)):
            self._make_room(dtype)
        # memoryviews of one dtype, whose slices cost half of numpy's, or else numpy arrays, which convert
        same = dtype == self.out.dtype
        cells: Any = values.data if same else values
        target: Any = self.out.data if same else self.out
        last = first + len(begins)
        sizes = self._sizes[first:last]
        for place, stop, begin, size in zip(
            self._places[first:last], self._stops[first:last], begins, sizes, strict=True
        ):
            target[place:stop] = cells[begin : begin + size]
        going_on = self._going_on
        for i in going_on[bisect_left(going_on, first) : bisect_left(going_on, last)]:
            self.successors[i] = int(cells[begins[i - first] + sizes[i - first]])
        self.num_bytes += sum(sizes) * dtype.itemsize

    def _make_room(self, dtype: np.dtype[np.integer[Any]]) -> None:
        """Widen the result to hold ids of a dtype; keep its tokens."""
        before = self.out
        if self._is_begun:
            dtype = np.promote_types(before.dtype, dtype)
        self.out = self._scratch.array(dtype, len(before))
        if self._is_begun:
            self.out[:] = before
        self._is_begun = True
