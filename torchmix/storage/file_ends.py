"""The identity of a file that has no footer to describe the rest: a hash of its beginning and its end.

In: an open file. Out: its size and the hash. Must hold: a pure function of the file's bytes. Cost: two reads of at most
HASHED_BYTES. What is altered in the middle, at the same size, shows only when a page is read.
"""

from __future__ import annotations

import hashlib

from torchmix.storage.random_access import RandomAccessFile

HASHED_BYTES = 32 << 10
"""Hashed bytes of the beginning, and of the end."""


def hash_ends(file: RandomAccessFile) -> tuple[int, str]:
    """Size in bytes, and the first 32 hex digits of the SHA-256 of the first bytes and the last ones.

    In a file of fewer than twice HASHED_BYTES, some bytes count in both.
    """
    head = file.read(0, HASHED_BYTES)
    tail = file.read(max(file.num_bytes - HASHED_BYTES, 0), HASHED_BYTES)
    return file.num_bytes, hashlib.sha256(head + tail).hexdigest()[:32]
