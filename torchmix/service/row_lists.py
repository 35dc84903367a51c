"""What maps give beside ids, in a reply of a loader.

In: lists of numbers of rows, each with the piece of the request that begins its row. Out: arrays of the reply, and the
lists again. Must hold: lists that do not fit a message are an error that names the map's output; what comes is checked
as ids are. Cost: copies.

    row/NAME           the numbers of all rows of the request, end to end
    row/NAME.lengths   int32 [n] how many come with each piece; -1 for a piece that begins no row that has some
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.errors import SourceUnreadable, WireError
from torchmix.reader.pieces.piece_copy import OtherRows, chosen_lists
from torchmix.service.messages import MOST_ARRAYS, MOST_BODY_BYTES, Arrays

PREFIX = "row/"
NONE = -1


def arrays_of_others(others: Sequence[OtherRows], num_pieces: int, *, ids_bytes: int) -> Arrays:
    """The arrays of a reply.

    Args:
        others: From the reader, of one source.
        num_pieces: Of the request.
        ids_bytes: Bytes that the ids and their lengths take.

    Raises:
        SourceUnreadable: They do not fit a message.
    """
    found: dict[str, NDArray[Any]] = {}
    for name in dict.fromkeys(other.name for other in others):
        mine = [other for other in others if other.name == name]
        piece = np.concatenate([other.piece for other in mine])
        order = np.argsort(piece, kind="stable")
        lists = chosen_lists(pa.concat_arrays([other.values for other in mine]), order)
        offsets = lists.offsets.to_numpy()
        lengths = np.full(num_pieces, NONE, np.int32)
        lengths[piece[order]] = np.diff(offsets)
        found[f"{PREFIX}{name}"] = lists.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
        found[f"{PREFIX}{name}.lengths"] = lengths
    num_bytes = ids_bytes + sum(array.nbytes + 64 for array in found.values())
    if num_bytes > MOST_BODY_BYTES or len(found) + 2 > MOST_ARRAYS:
        names = ", ".join(sorted({other.name for other in others}))
        raise SourceUnreadable(
            f"what a map gives beside ids ({names}) makes a reply of {num_bytes:,} bytes and {len(found) + 2} arrays; "
            f"a loader sends at most {MOST_BODY_BYTES:,} and {MOST_ARRAYS}: give less, or read with loaders where: node"
        )
    return found


def others_of(arrays: Arrays, piece: Int64Array) -> list[OtherRows]:
    """The inverse of `arrays_of_others`.

    Args:
        arrays: Of a reply.
        piece: [n] index of each piece of the request, in what the lists are for.

    Raises:
        WireError: The arrays are no such lists.
    """
    found: list[OtherRows] = []
    for name in arrays:
        if not name.startswith(PREFIX) or name.endswith(".lengths"):
            continue
        values, lengths = arrays[name], arrays.get(f"{name}.lengths")
        if lengths is None or lengths.dtype != np.int32 or values.ndim != 1 or values.dtype.kind not in "iuf":
            raise WireError(f"a reply with {name} and without its lengths, or of {values.dtype}")
        chosen = np.flatnonzero(lengths != NONE)
        counts = lengths[chosen].astype(np.int64)
        if len(lengths) != len(piece) or (counts < 0).any() or counts.sum() != len(values):
            raise WireError(f"a reply whose {name} have other lengths than the rows that were asked for")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        numbers = pa.array(values)
        buffers = [None, pa.py_buffer(offsets)]
        lists = pa.Array.from_buffers(pa.large_list(numbers.type), len(chosen), buffers, children=[numbers])
        found.append(OtherRows(name=name.removeprefix(PREFIX), piece=piece[chosen], values=lists))
    return found
