"""Notes what a process decodes and encodes, in the files that DECODES and ENCODES name.

It imports no more than it must: it runs in every interpreter that a test starts.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchmix.reader.decode_count import DecodeCount
from torchmix.transform.row_encoder import TextEncoder


def note_all() -> None:
    """Note what this process does."""
    add, encode = DecodeCount.add, TextEncoder.encode

    def noted_add(self, key):
        _write("DECODES", key)
        add(self, key)

    def noted_encode(self, asked):
        _write("ENCODES", len(asked.rows))
        return encode(self, asked)

    DecodeCount.add, TextEncoder.encode = noted_add, noted_encode


def _write(name: str, number: int) -> None:
    if path := os.environ.get(name):  # a server of forks that such a test has started serves others, too
        with Path(path).open("a") as file:
            file.write(f"{number}\n")
