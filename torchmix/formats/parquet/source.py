"""The Parquet source: one column of token lists, or of text, read page by page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import BadRows
from torchmix.errors import SourceUnreadable, located, where_of
from torchmix.formats.column import ColumnSource, documents_of_run, find_leaf, is_without_values
from torchmix.formats.look import LOOKED_AT, columns_beside, items_in, open_input, possible_leaves
from torchmix.formats.parquet.footer import MAGIC, Footer, read_column, read_footer
from torchmix.formats.parquet.page import decode_pages, encode_schema
from torchmix.formats.parquet.scan import ChunkScan, ScannedChunk
from torchmix.formats.parquet.values import decode_values
from torchmix.formats.source import (
    Documents,
    FileScan,
    FormatRow,
    FoundColumn,
    PageRun,
    join_seen,
    offsets_of,
    scan_of_no_rows,
)
from torchmix.recipe.build import nearest
from torchmix.storage.random_access import ByteStream, RandomAccessFile
from torchmix.storage.store_file import opened

# --- A look at one Parquet file: its footer -> the columns that one may train on.

BUFFER_BYTES = 1 << 20
"""Bytes read at a time, so that a column whose first rows are looked at is not read whole."""


def look(file: str) -> Iterator[FoundColumn]:
    """The columns of a file, in its order; see `formats/look.py`."""
    with open_input(file) as stream:
        num_bytes = stream.size()
        parquet = pq.ParquetFile(stream, buffer_size=BUFFER_BYTES, pre_buffer=False)
        metadata = parquet.metadata
        text_bytes: dict[str, int] = {}
        values: dict[str, int] = {}
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(number)
                top = chunk.path_in_schema.partition(".")[0]
                text_bytes[top] = text_bytes.get(top, 0) + chunk.total_uncompressed_size
                values[top] = values.get(top, 0) + chunk.num_values
        items = _items(parquet, num_bytes)
        yield from items
        for name, kind in columns_beside(items, parquet.schema_arrow):
            held = values if kind == "tokens" else text_bytes
            size = held.get(name.partition(".")[0], 0) if metadata.num_rows else 0  # without rows a page has a header
            yield FoundColumn(name=name, kind=kind, per_byte=size / max(1, num_bytes))


def _items(parquet: pq.ParquetFile, num_bytes: int) -> list[FoundColumn]:
    """The columns of items, by their first rows."""
    leaves = possible_leaves(parquet.schema_arrow)
    if not leaves:
        return []
    batch = next(parquet.iter_batches(LOOKED_AT, columns=sorted({leaf.partition(".")[0] for leaf in leaves})), None)
    return [] if batch is None else list(items_in(batch, leaves, parquet.metadata.num_rows / max(1, num_bytes)))


# --- Other columns of a Parquet file: the properties of its rows.
#
# Rows are those of the file, in order, so they fit those of a scan. Cost: pyarrow decodes these columns once.


def read_properties(path: str | Path, columns: Sequence[str], where: str) -> pa.Table:
    """The named top-level columns of a file, as Arrow's types.

    Raises:
        SourceUnreadable: No such file or column, or not a Parquet file, which is `where`.
    """
    with opened(path, where) as file:
        try:
            parquet = pq.ParquetFile(pa.PythonFile(ByteStream(file), mode="r"))
            names = parquet.schema_arrow.names
            for column in columns:
                if column not in names:
                    raise SourceUnreadable(
                        f"it has no column {column!r} for a property{nearest(column, names)}; it has {', '.join(names)}"
                    )
            return parquet.read(columns=list(columns)).select(list(columns))
        except pa.ArrowException as error:
            raise SourceUnreadable(f"its properties cannot be read: {error}") from None


# --- The source: its scan, and the documents of its pages.
#
# What the catalog promises of a page is what `decode` gives. A writer may split a row over pages (pyarrow before 18
# without a page index, DuckDB): then pages are read on to where their last row ends.


class ParquetSource(ColumnSource, frozen=True, kw_only=True):
    """A source of the recipe whose files are Parquet; implements `source.FormatSource`."""

    @property
    def format(self) -> str:
        """See `FormatSource.format`."""
        return "parquet"

    def fingerprint(self, file: RandomAccessFile, path: str) -> tuple[int, str]:
        """See `FormatSource.fingerprint`."""
        footer = read_footer(file)
        return footer.num_bytes, footer.digest

    def check(self, path: str | Path, bad: BadRows | None = None) -> None:
        """See `FormatSource.check`."""
        with opened(path, where_of(self.name, path)) as file:
            arrow_schema, metadata, _ = _read_schema(read_footer(file))
            self._find_leaf(arrow_schema, metadata)

    def scan(
        self, path: str | Path, progress: Callable[[int], None] | None = None, bad: BadRows | None = None
    ) -> FileScan:
        """See `source.FormatSource.scan`; `progress` is called after each column chunk."""
        with opened(path, where_of(self.name, path)) as file:
            footer = read_footer(file)
            arrow_schema, metadata, created_by = _read_schema(footer)
            number = self._find_leaf(arrow_schema, metadata)
            if number is None:
                return scan_of_no_rows(footer.num_bytes, footer.digest, bad)
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
        """See `FormatSource.properties`."""
        return read_properties(path, columns, where_of(self.name, path))

    def decode(self, runs: Sequence[PageRun]) -> list[Documents]:
        """See `FormatSource.decode`."""
        values = decode_values(runs) if self._holds_tokens else [None] * len(runs)
        return list(map(self._documents, runs, values))

    def _find_leaf(self, schema: pa.Schema, metadata: pq.FileMetaData) -> int | None:
        """Number of the column's leaf; None in a file without rows whose column is missing or of another type."""
        try:
            return find_leaf(schema, self.column, self.kind)
        except SourceUnreadable:
            if any(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)):
                raise
            return None

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


def _read_schema(footer: Footer) -> tuple[pa.Schema, pq.FileMetaData, str]:
    """Arrow schema, metadata and writer, as pyarrow reads them from the footer alone."""
    size = len(footer.metadata).to_bytes(4, "little")
    content = b"".join([MAGIC, footer.metadata, size, MAGIC])
    try:
        file = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False)
        return file.schema_arrow, file.metadata, file.metadata.created_by or ""
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceUnreadable(
            f"the footer does not parse: {str(error).rstrip('.')}; the file is damaged or encrypted"
        ) from None


def _join(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, dtype=np.int64)


FORMAT = FormatRow(make_source=ParquetSource, look=look)
