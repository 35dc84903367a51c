"""How a source is read: its files, and the `Source` for their format.

In: a source's name, and what the recipe or the catalog says of it. Out: paths of files, and a `Source`. Must hold: a
format that cannot be read is named before anything is opened. Cost: none beside listing folders; the recipe's `format`
and names alone decide, and a file of an unknown name is taken for Parquet, whose reader checks it.

A new format is one more branch of both functions, a file that implements `source.Source`, and a line in the recipe's
`source_format.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Protocol

from torchmix.catalog.settings import SourceSettings
from torchmix.errors import SourceUnreadable
from torchmix.formats.arrow.source import ArrowSource
from torchmix.formats.column import Kind
from torchmix.formats.jsonl.source import JsonLinesSource
from torchmix.formats.megatron.files import find_datasets, index_path
from torchmix.formats.megatron.source import IndexedSource
from torchmix.formats.parquet.source import ParquetSource
from torchmix.formats.source import Source
from torchmix.storage.find_files import find_files
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.open_tokenizer import Tokenizers
from torchmix.transform.tokenizer import Tokenizer

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
"""By their suffix, what a source that counts as Parquet may not hold."""
COMPRESSIONS = {".gz", ".zst", ".bz2", ".xz", ".lz4"}


class Reading(Protocol):
    """What decides how a source is read: settings of a recipe, or a source of a catalog."""

    @property
    def format(self) -> str:
        """What its files are."""

    @property
    def column(self) -> str | None:
        """The column that holds its documents; None in formats without columns."""

    @property
    def tokenizer(self) -> str | None:
        """What turns text into ids; None where the files hold ids."""

    @property
    def begin_id(self) -> int | str | None:
        """What stands before the ids of a text."""

    @property
    def end_id(self) -> int | str | None:
        """What stands after the ids of a text."""


def find_source_files(name: str, settings: SourceSettings, directory: Path) -> list[str]:
    """Find the data files of a source; `directory` is the recipe's.

    Returns:
        Paths, relative where the recipe's are, sorted by code point, each file once.

    Raises:
        SourceUnreadable: A path that leads to no file, with the names that come nearest.
    """
    if settings.format == "megatron":
        return find_datasets(name, settings.patterns, directory)
    return find_files(name, settings.patterns, directory)


def choose_source(name: str, reading: Reading, paths: Iterable[str], tokenizers: Tokenizers) -> Source:
    """Choose how a source is read.

    Args:
        name: The source.
        reading: What is known of it.
        paths: Its files.
        tokenizers: Opens its tokenizer, if it has one.

    Raises:
        SourceUnreadable: A file is of a format that is not read, or the tokenizer cannot be.
        RecipeError: The tokenizer's package is missing, or it lacks a token that the recipe names.
    """
    if reading.format == "megatron":
        return IndexedSource(name=name)
    assert reading.column is not None, "the recipe names a column of any other source"
    kind: Kind = "tokens" if reading.tokenizer is None else "text"
    tokenizer: Tokenizer = BYTES
    if reading.tokenizer is not None:
        tokenizer = tokenizers.open(name, reading.tokenizer, begin_id=reading.begin_id, end_id=reading.end_id)
    if reading.format == "jsonl":
        return JsonLinesSource(name=name, column=reading.column, kind=kind, tokenizer=tokenizer)
    if reading.format == "arrow":
        return ArrowSource(name=name, column=reading.column, kind=kind, tokenizer=tokenizer)
    if reading.format != "parquet":
        raise SourceUnreadable(f"source {name!r}: this torchmix reads no {reading.format}; update it")
    for path in paths:
        _refuse_other_names(name, path)
    return ParquetSource(name=name, column=reading.column, kind=kind, tokenizer=tokenizer)


def files_beside(source: Source, path: str) -> tuple[str, ...]:
    """Files that the fingerprint of the one at `path` covers, too."""
    return (index_path(path),) if isinstance(source, IndexedSource) else ()


def _refuse_other_names(name: str, path: str) -> None:
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
    while suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    other = OTHER_FORMATS.get(suffixes[-1]) if suffixes else None
    if other is not None:
        raise SourceUnreadable(
            f"source {name!r}: {path} is {other} by its name, and this source counts as Parquet; name files that are, "
            "or say the source's `format`: one source is read as one format"
        )
