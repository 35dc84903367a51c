"""A flat array, filled range by range with a ramp in each.

In: where the ranges lie, tens to thousands of values each, and what each begins with. Out: the caller's array, filled.
Must hold: the result is that of a loop over the ranges, which native code runs, and nothing else as large is made: the
first touch of fresh memory costs more than all the work (see `memory.py`). So it goes in blocks, whose scratch stays in
the processor's cache. Cost: 0.2 ns a value beyond writing it for a slope of 0, 0.6 for 1, and 15 ns a range.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 14
"""Values filled together: their scratch, 128 KiB of int64, fits a core's own cache."""
LONG = 256
"""Ramps from 0 of so many values on average are copied one by one from the longest of them, in half the time."""


def fill_ramps(start: NDArray[np.int64], value: NDArray[Any], *, slope: int, out: NDArray[Any]) -> None:
    """Write out[start[i] + k] = value[i] + slope * k, up to the next start.

    Positions that begin again at each document, the number of each document's source, and the index of a rank's slice
    are ramps.

    Args:
        start: [n] places in out, never falling.
        value: [n] first value of each ramp.
        slope: What each place adds to the one before, 0 or 1.
        out: Integers, written in place; nothing is written before start[0].
    """
    if not len(start):
        return
    if slope and (len(out) - start[0]) >= LONG * len(start) and not value.any():
        _copy_ramps(start, out)
        return
    # A ramp is a constant, plus the place in the block where its slope is 1; one that spans blocks is cut there.
    borders = np.arange(int(start[0]) // BLOCK * BLOCK, len(out), BLOCK)
    cut = np.searchsorted(start, borders[1:])
    edges = np.insert(start, cut, borders[1:])
    level = value - start if slope else value
    level = np.insert(level, cut, level[cut - 1])
    if slope:
        level += edges // BLOCK * BLOCK
    level = level.astype(out.dtype, copy=False)
    count = np.diff(edges, append=len(out))
    edge_of_border = [0, *(cut + np.arange(len(cut))).tolist(), len(edges)]
    place = np.arange(BLOCK, dtype=out.dtype)
    for block, border in enumerate(borders.tolist()):
        here = slice(edge_of_border[block], edge_of_border[block + 1])
        levels = np.repeat(level[here], count[here])
        stop = min(border + BLOCK, len(out))
        part = out[stop - len(levels) : stop]
        if slope:
            np.add(levels, place[stop - border - len(levels) : stop - border], out=part)
        else:
            part[:] = levels


def _copy_ramps(start: NDArray[np.int64], out: NDArray[Any]) -> None:
    counts = np.diff(start, append=len(out))
    longest = np.arange(counts.max(), dtype=out.dtype).data
    cells = out.data
    for first, count in zip(start.tolist(), counts.tolist(), strict=True):
        cells[first : first + count] = longest[:count]
