"""Documents that are not given, wherever they come in the order.

In: rows of sources. Out: whether each is denied. Must hold: a denied document keeps its place and its pieces in the
order and counts for nothing, so denying one moves no other. Cost: a binary search a row, in sources that have some.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array

Denied = Mapping[int, Int64Array]
"""Source, by sorted name -> its denied rows, ascending, each once; sources without are left out."""


def are_denied(denied: Denied, source: Int64Array, row: Int64Array) -> NDArray[np.bool_]:
    """[n] whether rows of sources are denied."""
    found = np.zeros(len(row), np.bool_)
    for number, rows in denied.items():
        mine = np.flatnonzero(source == number)
        at = np.minimum(rows.searchsorted(row[mine]), len(rows) - 1)
        found[mine] = rows[at] == row[mine]
    return found


def denied_fingerprint(denied: Mapping[str, Int64Array]) -> str:
    """16 hex digits over the denied rows of sources, by name; empty where there are none."""
    if not denied:
        return ""
    digest = hashlib.sha256()
    for name, rows in sorted(denied.items()):
        digest.update(f"{name} {len(rows)}\n".encode())
        digest.update(np.ascontiguousarray(rows, "<i8").data)
    return digest.hexdigest()[:16]
