"""The identity of a file that has no footer to describe the rest: a hash of its beginning and its end.

In: an open file. Out: its size and the hash. Must hold: a pure function of the file's bytes. Cost: two reads of at most
HASHED_BYTES. What is altered in the middle, at the same size, shows only when a page is read.
"""

from __future__ import annotations

import hashlib
import os

from torchmix.sources.source import read_range

HASHED_BYTES = 32 << 10
"""Of the beginning, and of the end."""


def hash_ends(file_descriptor: int) -> tuple[int, str]:
    """Size in bytes, and the first 32 hex digits of the SHA-256 of the first bytes and the last ones.

    Of a file of fewer than twice HASHED_BYTES some bytes count in both.
    """
    num_bytes = os.fstat(file_descriptor).st_size
    head = read_range(file_descriptor, 0, HASHED_BYTES)
    tail = read_range(file_descriptor, max(num_bytes - HASHED_BYTES, 0), HASHED_BYTES)
    return num_bytes, hashlib.sha256(head + tail).hexdigest()[:32]
