"""What maps give beside ids, as numpy arrays of a replica's step.

In: lists of numbers of rows, each with the piece that begins its row. Out: arrays by `NAME:PART`, beside those of a
step. Must hold: rows lie in the order of their first tokens, and each microbatch has those that begin in it; a row
that goes on in another microbatch, sample or step has its lists where it begins. Cost: copies of the lists.

    NAME:values    [v]          the numbers of all rows, end to end
    NAME:lengths   int64 [k]    how many each row has
    NAME:places    int64 [k]    the row's first token in its microbatch of B * length tokens, before any CP slice
    NAME:stop      int64 [M]    where the rows of each microbatch end

M is the microbatches of the step, B the micro_batch_size. Of several sources that give lists of one name, numbers are
of the type that holds all of them. Torch has no unsigned types beyond uint8 everywhere, so they become signed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.constructor.build import ReplicaPieces
from torchmix.reader.pieces.piece_copy import OtherRows

SEPARATOR = ":"
"""No array of a step or of a module has it in its name."""
PARTS = ("values", "lengths", "places", "stop")
_SIGNED = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


def arrays_of_rows(others: Sequence[OtherRows], pieces: ReplicaPieces, length: int) -> dict[str, NDArray[Any]]:
    """The arrays of a replica's step.

    Args:
        others: From the reader; pieces are numbered as the replica's.
        pieces: The replica's.
        length: Tokens of a sample.
    """
    of_name: dict[str, list[OtherRows]] = {}
    for other in others:
        of_name.setdefault(other.name, []).append(other)
    found: dict[str, NDArray[Any]] = {}
    tokens_of_microbatch = pieces.micro_batch_size * length
    num_microbatches = pieces.num_samples // pieces.micro_batch_size
    for name in sorted(of_name):
        values, lengths, piece = _joined(of_name[name])
        if not len(piece):
            continue
        places = pieces.places(length)[piece]
        borders = np.arange(1, num_microbatches + 1) * tokens_of_microbatch
        found |= {
            f"{name}{SEPARATOR}values": values,
            f"{name}{SEPARATOR}lengths": lengths,
            f"{name}{SEPARATOR}places": places % tokens_of_microbatch,
            f"{name}{SEPARATOR}stop": np.searchsorted(places, borders).astype(np.int64),
        }
    return found


def cut_rows(arrays: Mapping[str, NDArray[Any]], borders: range) -> list[dict[str, NDArray[Any]]]:
    """The arrays of parts of a step: of the microbatches between each two borders."""
    found: list[dict[str, NDArray[Any]]] = [{} for _ in borders[:-1]]
    for name in names_of_rows(arrays):
        values, lengths, places, stop = (arrays[f"{name}{SEPARATOR}{part}"] for part in PARTS)
        value_stop = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        for index, first in enumerate(borders[:-1]):
            begin, end = int(stop[first - 1]) if first else 0, int(stop[first + borders.step - 1])
            if begin == end:  # a name that no row of a step has is missing
                continue
            parts = (
                values[value_stop[begin] : value_stop[end]],
                lengths[begin:end],
                places[begin:end],
                stop[first : first + borders.step] - begin,
            )
            found[index] |= {f"{name}{SEPARATOR}{part}": array for part, array in zip(PARTS, parts, strict=True)}
    return found


def is_of_rows(name: str) -> bool:
    """Whether an array is one of these, by its name."""
    return SEPARATOR in name


def names_of_rows(arrays: Mapping[str, Any]) -> list[str]:
    """The maps' names for them."""
    return list(dict.fromkeys(name.rpartition(SEPARATOR)[0] for name in arrays))


def _joined(others: Sequence[OtherRows]) -> tuple[NDArray[Any], Int64Array, Int64Array]:
    """Values, lengths and first pieces of rows, in the order of their pieces."""
    piece = np.concatenate([other.piece for other in others])
    order = np.argsort(piece, kind="stable")
    parts = [_of_lists(other.values) for other in others]
    lengths = np.concatenate([lengths for _, lengths in parts])
    kind = np.result_type(*(values.dtype for values, _ in parts))
    # Row by row: an index of all numbers would take 8 bytes of each, and a list may be the bytes of a picture.
    rows = [row for values, of_rows in parts for row in _rows(values, of_rows)]
    chosen = [rows[at] for at in order.tolist()] or [np.zeros(0, kind)]
    values = np.concatenate(chosen, dtype=_SIGNED.get(kind, kind), casting="unsafe")
    return values, lengths[order], piece[order]


def _rows(values: NDArray[Any], lengths: Int64Array) -> list[NDArray[Any]]:
    """A view of each row's numbers."""
    stops = np.cumsum(lengths).tolist()
    return [values[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def _of_lists(lists: pa.Array) -> tuple[NDArray[Any], Int64Array]:
    """Values end to end, and the length of each list; `lists` are large_list without nulls inside."""
    offsets = lists.offsets.to_numpy().astype(np.int64)
    values = lists.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    return values, np.diff(offsets)
