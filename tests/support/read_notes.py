"""Notes what a process decodes, encodes and keeps, in the files that DECODES, ENCODES and KEPT name.

It imports no more than it must: it runs in every interpreter that a test starts.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchmix.reader.page_cache import DecodeCount, PageCache
from torchmix.transform.tokenizer import TextEncoder


def note_all() -> None:
    """Note what this process does."""
    add, encode, count = DecodeCount.add, TextEncoder.encode, PageCache._count

    def noted_add(self, key):
        _write("DECODES", key)
        add(self, key)

    def noted_encode(self, asked):
        _write("ENCODES", len(asked.rows))
        return encode(self, asked)

    def noted_count(self, num_bytes):
        count(self, num_bytes)
        of_caches = [cache.num_bytes for cache in self._room._budgets]
        _write("KEPT", f"{os.getpid()} {self._room.num_bytes} {sum(of_caches)} {sum(map(bool, of_caches))}")

    DecodeCount.add, TextEncoder.encode, PageCache._count = noted_add, noted_encode, noted_count


def _write(name: str, number: int | str) -> None:
    if path := os.environ.get(name):  # a server of forks that such a test has started serves others, too
        with Path(path).open("a") as file:
            file.write(f"{number}\n")
