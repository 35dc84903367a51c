"""Which `Source` reads a source of the recipe: by the format of its files and by its column.

In: a source's name, column, tokenizer and files. Out: a `Source`. Must hold: a format that cannot be read is named
before anything is opened. Cost: none; names alone decide, and a file of an unknown name is taken for Parquet, whose
reader checks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from torchmix.errors import SourceUnreadable
from torchmix.sources.parquet import ParquetSource
from torchmix.sources.source import Source

OTHER_FORMATS = {
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".txt": "text",
    ".md": "text",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".bin": "binary",
    ".idx": "an index",
    ".npy": "NumPy",
    ".mds": "MDS",
    ".tar": "tar",
    ".zip": "zip",
    ".orc": "ORC",
    ".avro": "Avro",
}
COMPRESSIONS = {".gz", ".zst", ".bz2", ".xz", ".lz4"}


def choose_source(name: str, column: str, tokenizer: str | None, paths: Iterable[str]) -> Source:
    """Choose how a source is read.

    Args:
        name: The source.
        column: The column that holds its documents.
        tokenizer: What turns text into ids; None if the column holds ids.
        paths: Its files.

    Raises:
        SourceUnreadable: A file is of a format that is not read.
    """
    for path in paths:
        suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
        while suffixes and suffixes[-1] in COMPRESSIONS:
            suffixes.pop()
        other = OTHER_FORMATS.get(suffixes[-1]) if suffixes else None
        if other is not None:
            raise SourceUnreadable(
                f"source {name!r}: {path} is {other} by its name, and only Parquet is read; write it as Parquet, or "
                "name files that are"
            )
    return ParquetSource(name=name, column=column, kind="tokens" if tokenizer is None else "text")
