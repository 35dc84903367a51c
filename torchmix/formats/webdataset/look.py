"""A look at one shard: its first samples -> the members that one may train on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torchmix.formats.documents.look import are_messages, flat_items
from torchmix.formats.found_column import FoundColumn, FoundKind
from torchmix.formats.images.look import is_image, tokens_of
from torchmix.formats.webdataset.members import samples_of
from torchmix.storage.open_path import opened

LOOKED_AT = 16
TEXTS = ("txt", "text", "md")


def look(file: str) -> Iterator[FoundColumn]:
    """The members of text and of images, by suffix, and the keys of those of JSON; see `formats/found_column.py`."""
    with opened(file, file) as shard:
        samples = list(islice(samples_of(shard.read, shard.num_bytes), LOOKED_AT))
        rows = [
            {suffix: shard.read(member.offset, member.num_bytes) for suffix, member in sample.members.items()}
            for sample in samples
        ]
    whole = max(1, sum(len(content) for row in rows for content in row.values()))
    suffixes = sorted({suffix for row in rows for suffix in row})
    yield from _images(rows, suffixes, whole)
    for suffix in suffixes:
        contents = [row[suffix] for row in rows if suffix in row]
        if suffix in TEXTS:
            yield FoundColumn(name=suffix, kind="text", share=sum(map(len, contents)) / whole)
        elif suffix == "json":
            yield from _keys(contents, whole)


def _images(rows: list[dict[str, bytes]], suffixes: list[str], whole: int) -> Iterator[FoundColumn]:
    """Members of images: `jpg|png` where a sample has one of them, `*.jpg` where it has several that are numbered."""
    found = [s for s in suffixes if all(is_image(row[s]) for row in rows if s in row)]
    plain = [s for s in found if "." not in s]
    ways = [f"*.{end}" for end in sorted({s.rpartition(".")[2] for s in found if s not in plain})]
    if plain and all(len(set(plain) & row.keys()) <= 1 for row in rows):
        ways.insert(0, "|".join(plain))
    else:
        ways = plain + ways
    for way in ways:
        ends = set(way.removeprefix("*.").split("|"))
        contents = [
            content
            for row in rows
            for suffix, content in row.items()
            if suffix in found and (suffix in ends if "*" not in way else suffix.rpartition(".")[2] in ends)
        ]
        yield FoundColumn(name=way, kind="images", share=sum(map(tokens_of, contents)) / whole)


def _keys(contents: list[bytes], whole: int) -> Iterator[FoundColumn]:
    """Keys of the members of JSON whose values are texts or messages, in all of them."""
    rows: list[dict[str, Any]] = []
    for content in contents:
        try:
            row = json.loads(content)
        except ValueError:
            return
        if not isinstance(row, dict):
            return
        rows.append(dict(flat_items(row, "json.")))
    for name in rows[0]:
        values = [row[name] for row in rows if row.get(name) is not None]
        kind: FoundKind | None = None
        if all(name in row for row in rows) and values:
            kind = "messages" if are_messages(values) else "text" if all(isinstance(v, str) for v in values) else None
        if kind is not None:
            texts = values if kind == "text" else [json.dumps(value, ensure_ascii=False) for value in values]
            held = sum(len(text.encode("utf-8", "replace")) for text in texts)
            yield FoundColumn(name=name, kind=kind, share=held / whole)
