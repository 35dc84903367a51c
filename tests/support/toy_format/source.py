"""A format as somebody might add one: lines of numbers, each a document, ten of them a page.

It and `add_toy_format` are all that a format takes: a folder, and a row of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from torchmix.catalog.manifest import BadRows
from torchmix.errors import SourceUnreadable
from torchmix.formats.source import Documents, FileScan, FormatRow, FoundColumn, PageRun, offsets_of
from torchmix.formats.table import READ_AS
from torchmix.recipe.sources import FORMATS, FormatNames
from torchmix.storage.random_access import RandomAccessFile, hash_ends
from torchmix.storage.store_file import opened
from torchmix.transform.tokenizer import RowEncoder

PAGE_ROWS = 10


def add_toy_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the row of the table, for one test."""
    monkeypatch.setitem(FORMATS, "toy", FormatNames(title="toy", suffixes=(".toy",), has_columns=False))
    monkeypatch.setitem(READ_AS, "toy", f"{__name__}:FORMAT")


def write_toy(path: Path, documents: Sequence[Sequence[int]]) -> None:
    """Write documents to a file of the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{' '.join(map(str, document))}\n" for document in documents))


@dataclass(frozen=True, kw_only=True, slots=True)
class ToySource:
    """A source of the recipe whose files are of the format; implements `source.Source`."""

    name: str

    @property
    def format(self) -> str:
        """See `source.Source.format`."""
        return "toy"

    @property
    def transform_id(self) -> str:
        """See `source.Source.transform_id`."""
        return "toy-1"

    @property
    def vocab_size(self) -> int | None:
        """See `source.Source.vocab_size`."""
        return None

    @property
    def row_encoder(self) -> RowEncoder | None:
        """See `source.Source.row_encoder`."""
        return None

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `source.Source.fingerprint`."""
        return hash_ends(file)

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `source.Source.check`."""
        with opened(path, str(path)):
            pass

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `source.Source.scan`."""
        with opened(path, str(path)) as file:
            num_bytes, digest = hash_ends(file)
            lines = bytes(file.read(0, num_bytes)).splitlines(keepends=True)
        pages = [lines[first : first + PAGE_ROWS] for first in range(0, len(lines), PAGE_ROWS)]
        page_bytes = np.array([sum(map(len, page)) for page in pages], np.int64)
        return FileScan(
            num_bytes=num_bytes,
            footer_hash=digest,
            num_rows=len(lines),
            chunk_of_page=np.zeros(len(pages), np.int32),
            page_offset=np.cumsum(page_bytes) - page_bytes,
            page_bytes=page_bytes,
            page_rows=np.array([len(page) for page in pages], np.int64),
            kind=np.array([0], np.int8),
            tokens=np.array([len(line.split()) for line in lines], np.int32),
            schema=b"",
        )

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `source.Source.properties`."""
        raise SourceUnreadable(f"{path} has no columns")

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `source.Source.decode`."""
        return [_documents(bytes(run.pages)) for run in runs]


def _look(file: str) -> Iterator[FoundColumn]:
    yield FoundColumn(name="", kind="tokens", per_byte=0.25)


def _documents(content: bytes) -> Documents:
    rows = [[int(word) for word in line.split()] for line in content.splitlines()]
    lengths = np.array([len(row) for row in rows], np.int32)
    return Documents(values=np.array([token for row in rows for token in row], np.int32), offsets=offsets_of(lengths))


FORMAT = FormatRow(make_source=ToySource, look=_look)
