"""Formats: said by the recipe, or by the names of the files."""

from __future__ import annotations

import pytest

from torchmix.recipe.sources import format_of, paths_of
from torchmix.recipe.structs import Source


@pytest.mark.parametrize(
    ("path", "format_", "expected"),
    [
        ("a.parquet", None, "parquet"),
        ("a", None, "parquet"),
        (("a.bin", "b/*.idx"), None, "megatron"),
        (("a.bin", "b.parquet"), None, "parquet"),
        ("a.bin", "parquet", "parquet"),
        ("web_text_document", "megatron", "megatron"),
        ((), None, "parquet"),
        (("a.jsonl", "b/*.ndjson", "c.json", "d.jsonl.gz", "e.json.zst"), None, "jsonl"),
        (("a.jsonl", "b.parquet"), None, "parquet"),
        (("a.jsonl", "b.arrow"), None, "parquet"),
        ("part-*", "jsonl", "jsonl"),
        (("cache-*.arrow", "a.feather", "b.ipc"), None, "arrow"),
        ("a.jsonl.bz2", None, "parquet"),
    ],
)
def test_a_format_is_said_or_follows_from_names(path: str | tuple[str, ...], format_: str, expected: str) -> None:
    assert format_of(Source(path=path, format=format_)) == expected


def test_paths_are_a_tuple() -> None:
    assert paths_of(Source(path="a")) == ("a",)
    assert paths_of(Source(path=("a", "b"))) == ("a", "b")
