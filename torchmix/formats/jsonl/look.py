"""A look at one file of JSON lines: its first lines -> the keys that one may train on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from torchmix.errors import SourceUnreadable
from torchmix.formats.documents.look import are_messages, flat_items
from torchmix.formats.found_column import FoundColumn, open_input
from torchmix.formats.images.look import is_path
from torchmix.formats.jsonl.frames import codec_of_name

LOOK_BYTES = 1 << 20
LOOK_LINES = 200


def look(file: str) -> Iterator[FoundColumn]:
    """The columns of a file, in its order; see `formats/found_column.py`."""
    codec = codec_of_name(file)
    with open_input(file) as stream:
        lines_of = pa.CompressedInputStream(stream, codec) if codec is not None else stream
        content = lines_of.read(LOOK_BYTES)
        read_bytes = max(1, stream.tell())
    lines = content.splitlines()
    if len(content) == LOOK_BYTES and len(lines) > 1:
        lines.pop()  # it may be cut
    rows = [_row(line, file) for line in lines[:LOOK_LINES] if line.strip()]
    seen_bytes = max(1, sum(len(line) for line in lines[:LOOK_LINES]))
    names = set(rows[0]).intersection(*rows) if rows else set()
    for name in (name for name in (rows[0] if rows else ()) if name in names):
        values = [row[name] for row in rows if row[name] is not None]
        is_tokens = any(values) and all(
            isinstance(value, list) and all(type(item) is int for item in value) for value in values
        )
        paths = [path for value in values for path in (value if isinstance(value, list) else [value])]
        if paths and all(isinstance(path, str) and is_path(path) for path in paths):
            yield FoundColumn(name=name, kind="image paths", share=0, example=paths[0])
        elif are_messages(values):
            held = sum(len(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")) for value in values)
            yield FoundColumn(name=name, kind="messages", share=held / seen_bytes * len(content) / read_bytes)
        elif is_tokens or (values and all(isinstance(value, str) for value in values)):
            held = sum(len(value) if is_tokens else len(value.encode("utf-8", "replace")) for value in values)
            share = held / seen_bytes * len(content) / read_bytes
            yield FoundColumn(name=name, kind="tokens" if is_tokens else "text", share=share)


def _row(line: bytes, file: str) -> dict[str, Any]:
    """The keys of a line, those of objects in it by their paths."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise SourceUnreadable(f"{file}: a line is no JSON ({error}): {line[:60]!r}") from None
    if not isinstance(row, dict):
        raise SourceUnreadable(f"{file}: a line is no object, with a key for each column: {line[:60]!r}")
    return dict(flat_items(row))
