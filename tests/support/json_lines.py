"""Files of JSON lines for tests: documents in, bytes out, with all that may lie between two objects; and their frames.

`None` as a document is a null.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

SKIPPABLE_FRAME = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"


def json_lines(documents: Sequence[Any], column: str = "text", seed: int = 0) -> bytes:
    """A line for each document, with keys before and behind it; blank lines, spaces and ends of lines as they come."""
    rng = random.Random(seed)
    parts = []
    for i, document in enumerate(documents):
        row = {"id": i, column: document, "about": {"braces": '}\n{"', "score": [0.5, None, True]}}
        parts.append(json.dumps(row, ensure_ascii=rng.random() < 0.5))
        parts.append(rng.choice(["\n", "\r\n", " \n", "\n", "\n\n", "\n \t\r\n"]))
    text = "".join(parts)
    return (text if rng.random() < 0.5 else text.rstrip()).encode()


def plain_lines(documents: Sequence[Any], column: str = "text") -> bytes:
    """A line for each document, with nothing else."""
    return b"".join(json.dumps({column: document}).encode() + b"\n" for document in documents)


def frame_of(content: bytes, suffix: str) -> bytes:
    """One frame of the format that a suffix names; the content itself for any other."""
    if suffix == ".gz":
        return gzip.compress(content, mtime=0)
    return pa.Codec("zstd").compress(content, asbytes=True) if suffix == ".zst" else content


def framed(content: bytes, suffix: str, *, mean_bytes: int, at_lines: bool, seed: int = 0) -> bytes:
    """Content in frames of random sizes, which end with lines or anywhere; among zstd's are some that hold nothing."""
    if suffix not in (".gz", ".zst"):
        return content
    rng = random.Random(seed)
    frames, start = [], 0
    while start < len(content):
        stop = start + 1 + int(rng.expovariate(1 / mean_bytes))
        if at_lines:
            stop = content.find(b"\n", stop) + 1 or len(content)
        if suffix == ".zst" and rng.random() < 0.2:
            frames.append(SKIPPABLE_FRAME)
        frames.append(frame_of(content[start:stop], suffix))
        start = stop
    return b"".join(frames)


def write_lines(path: Path, content: bytes, **choices: Any) -> Path:
    """Write lines to `path`, in frames if its suffix says so; see `framed`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(framed(content, path.suffix, **{"mean_bytes": 2000, "at_lines": True, **choices}))
    return path
