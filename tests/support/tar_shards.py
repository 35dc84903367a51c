"""WebDataset shards for tests, written by the standard library."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_shard(path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]], **options: int) -> None:
    """Write samples, each a key and the content of its members by suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as shard:
        for key, members in samples:
            for suffix, content in members.items():
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
