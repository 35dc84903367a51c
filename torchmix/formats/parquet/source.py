"""The Parquet source: one column of token lists, or of text, read page by page.

In: a file's path; later the bytes of its pages. Out: `FileScan` and `Documents`, see source.py. Must hold: what
the catalog promises of a page is what `decode` gives. A writer may split a row over pages (pyarrow before 18 without a
page index, DuckDB): then pages are read on to where their last row ends.
Cost: a scan reads and decodes the column once, see parquet_scan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.bad_rows import BadRows
from torchmix.errors import SourceUnreadable, located, where_of
from torchmix.formats.column import find_leaf, is_without_values
from torchmix.formats.column_source import ColumnSource
from torchmix.formats.good_rows import documents_of_run
from torchmix.formats.parquet.footer import MAGIC, Footer, read_column, read_footer
from torchmix.formats.parquet.page import decode_pages, encode_schema
from torchmix.formats.parquet.properties import read_properties
from torchmix.formats.parquet.scan import ChunkScan, ScannedChunk
from torchmix.formats.parquet.values import decode_values
from torchmix.formats.seen_ids import join_seen
from torchmix.formats.source import Documents, FileScan, PageRun, offsets_of
from torchmix.storage.open_path import opened
from torchmix.storage.random_access import RandomAccessFile


class ParquetSource(ColumnSource, frozen=True, kw_only=True):
    """A source of the recipe whose files are Parquet; implements `source.FormatSource`."""

    @property
    def format(self) -> str:
        """See `source.FormatSource.format`."""
        return "parquet"

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `source.FormatSource.fingerprint`."""
        footer = read_footer(file)
        return footer.num_bytes, footer.digest

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `source.FormatSource.check`."""
        with opened(path, where_of(self.name, path)) as file:
            arrow_schema, _ = _read_schema(read_footer(file))
            find_leaf(arrow_schema, self.column, self.kind)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `source.FormatSource.scan`; `progress` is called after each column chunk."""
        with opened(path, where_of(self.name, path)) as file:
            footer = read_footer(file)
            arrow_schema, created_by = _read_schema(footer)
            number = find_leaf(arrow_schema, self.column, self.kind)
            leaf, chunks = read_column(footer, number)
            scan = ChunkScan(
                file=file,
                path=str(path),
                kind=self.kind,
                tokenizer=self.tokenizer,
                leaf=leaf,
                schema=encode_schema(leaf, created_by),
                bad=bad,
                is_without_values=is_without_values(arrow_schema, number),
            )
            scanned: list[ScannedChunk] = []
            first_row = 0
            for chunk in chunks:
                scanned.append(scan.scan(chunk, first_row))
                first_row += len(scanned[-1].tokens)
                if progress is not None:
                    progress(chunk.num_bytes)
        return FileScan(
            num_bytes=footer.num_bytes,
            footer_hash=footer.digest,
            num_rows=first_row,
            chunk_of_page=np.repeat(np.arange(len(scanned), dtype=np.int32), [len(part.rows) for part in scanned]),
            page_offset=_join([part.offset for part in scanned]),
            page_bytes=_join([part.num_bytes for part in scanned]),
            page_rows=_join([part.rows for part in scanned]),
            tail_bytes=_join([part.tail_bytes for part in scanned]),
            companion_offset=np.array([part.dict_offset for part in scanned], dtype=np.int64),
            companion_bytes=np.array([part.dict_bytes for part in scanned], dtype=np.int64),
            kind=np.array([chunk.codec for chunk in chunks], dtype=np.int8),
            tokens=_join([part.tokens for part in scanned]).astype(np.int32),
            ids=join_seen(part.ids for part in scanned),
            page_crc=np.concatenate([np.zeros(0, np.uint32), *(part.crc for part in scanned)]),
            companion_crc=np.array([part.dict_crc for part in scanned], dtype=np.uint32),
            schema=scan.schema,
            split_pages=sum(part.split_pages for part in scanned),
            bad=bad,
        )

    def properties(self, path: str | Path, columns: Sequence[str]) -> pa.Table:
        """See `source.FormatSource.properties`."""
        return read_properties(path, columns, where_of(self.name, path))

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `source.FormatSource.decode`."""
        values = decode_values(runs) if self._holds_tokens else [None] * len(runs)
        return list(map(self._documents, runs, values))

    @property
    def _holds_tokens(self) -> bool:
        """Whether the catalog's lengths are those of the rows in the file."""
        return self.kind == "tokens" and self.map is None

    def _documents(self, run: PageRun, values: NDArray[np.integer[Any]] | None) -> Documents:
        if values is not None and run.tokens is not None:
            return Documents(values=values, offsets=offsets_of(run.tokens) if run.offsets is None else run.offsets)
        if self._holds_tokens and run.is_as_indexed and run.tokens is not None and not run.tokens.any():
            return Documents(values=np.zeros(0, np.int32), offsets=np.zeros(run.num_rows + 1, np.int64))
        with located(where_of(self.name, run.path)):
            return documents_of_run(decode_pages(run), self.kind, run)


def _read_schema(footer: Footer) -> tuple[pa.Schema, str]:
    """Arrow schema and writer, as pyarrow reads them from the footer alone."""
    size = len(footer.metadata).to_bytes(4, "little")
    content = b"".join([MAGIC, footer.metadata, size, MAGIC])
    try:
        file = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False)
        return file.schema_arrow, file.metadata.created_by or ""
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceUnreadable(
            f"the footer does not parse: {str(error).rstrip('.')}; the file is damaged or encrypted"
        ) from None


def _join(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, dtype=np.int64)
