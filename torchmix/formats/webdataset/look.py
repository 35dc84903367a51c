"""A look at one shard: its first samples -> the members that one may train on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torchmix.formats.found_column import FoundColumn
from torchmix.formats.webdataset.members import samples_of
from torchmix.storage.open_path import opened

LOOKED_AT = 16


def look(file: str) -> Iterator[FoundColumn]:
    """The members of text, by suffix; see `formats/found_column.py`."""
    with opened(file, file) as shard:
        num_bytes = shard.num_bytes
        samples = list(islice(samples_of(shard.read, num_bytes), LOOKED_AT))
    for suffix in sorted({suffix for sample in samples for suffix in sample.members}):
        if suffix in ("txt", "text", "md"):
            held = sum(sample.members[suffix].num_bytes for sample in samples if suffix in sample.members)
            whole = sum(member.num_bytes for sample in samples for member in sample.members.values())
            yield FoundColumn(name=suffix, kind="text", share=held / max(1, whole))
