"""A look at one dataset: the head of its .idx -> one column without a name."""

from __future__ import annotations

from collections.abc import Iterator

from torchmix.formats.found_column import FoundColumn
from torchmix.formats.megatron.files import index_path
from torchmix.formats.megatron.header import read_header
from torchmix.storage.open_path import opened


def look(file: str) -> Iterator[FoundColumn]:
    """The columns of a file, in its order; see `formats/found_column.py`."""
    path = index_path(file)
    with opened(path, path) as index:
        header = read_header(index)
    yield FoundColumn(name="", kind="tokens", share=1 / header.dtype.itemsize)
