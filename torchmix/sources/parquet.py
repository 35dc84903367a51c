"""The Parquet source: one column of token lists, or of text, read page by page.

In: a file's path; later the bytes of its pages. Out: `FileScan` and `Documents`, see source.py. Must hold: a scan
decodes every page by the very path that reads it later, so what the catalog promises is what `decode` gives. A writer
may split a row over pages (pyarrow before 18 without a page index, DuckDB): such a chunk becomes one page, whole.
Cost: a scan reads and decodes the column once, up to SCAN_RUN_BYTES of it at a time; where pages do not tell their rows
it holds a chunk's compressed bytes at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.errors import CorruptPage, SourceUnreadable
from torchmix.sources.parquet_column import Kind, check_column, count_tokens, to_documents, transform_id_of
from torchmix.sources.parquet_footer import MAGIC, Chunk, Footer, Leaf, read_column, read_footer
from torchmix.sources.parquet_layout import ChunkPages, find_pages
from torchmix.sources.parquet_page import decode_batches, decode_pages, encode_schema, read_headers
from torchmix.sources.source import Documents, FileScan, Int64Array, PageRun, read_range
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.tokenizer import Tokenizer

SCAN_RUN_BYTES = 4 << 20
"""A scan decodes adjacent pages together up to so many bytes without compression; a larger page comes alone."""

_MAX_LIST_VALUES = 2**31 - 1  # Arrow's lists count their values in 32 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetSource:
    """A source of the recipe whose files are Parquet; implements `source.Source`."""

    name: str
    column: str
    kind: Kind
    tokenizer: Tokenizer = BYTES
    """Of texts; unused with `tokens`."""

    @property
    def transform_id(self) -> str:
        """See `source.Source.transform_id`."""
        return transform_id_of(self.kind, self.tokenizer)

    def fingerprint(self, file_descriptor: int, path: str) -> tuple[int, str]:
        """See `source.Source.fingerprint`."""
        footer = read_footer(file_descriptor, self._where(path))
        return footer.num_bytes, footer.digest

    def check(self, path: Path) -> None:
        """See `source.Source.check`."""
        where = self._where(path)
        with _open_file(path, where) as file_descriptor:
            arrow_schema, _ = _read_schema(read_footer(file_descriptor, where), where)
        check_column(arrow_schema, self.column, self.kind, where)

    def scan(self, path: Path, progress: Callable[[int], None] | None = None) -> FileScan:
        """See `source.Source.scan`; `progress` is called after each column chunk."""
        where = self._where(path)
        with _open_file(path, where) as file_descriptor:
            footer = read_footer(file_descriptor, where)
            arrow_schema, created_by = _read_schema(footer, where)
            check_column(arrow_schema, self.column, self.kind, where)
            leaf, chunks = read_column(footer, self.column, where)
            scan = _ChunkScan(
                file_descriptor=file_descriptor,
                path=str(path),
                kind=self.kind,
                tokenizer=self.tokenizer,
                leaf=leaf,
                schema=encode_schema(leaf, created_by),
                where=where,
            )
            scanned: list[_ScannedChunk] = []
            first_row = 0
            for chunk in chunks:
                scanned.append(scan.scan(chunk, first_row))
                first_row += len(scanned[-1].tokens)
                if progress is not None:
                    progress(chunk.num_bytes)
        has_rows = [part.rows > 0 for part in scanned]
        return FileScan(
            num_bytes=footer.num_bytes,
            footer_hash=footer.digest,
            num_rows=first_row,
            chunk_of_page=np.repeat(np.arange(len(scanned), dtype=np.int32), [int(keep.sum()) for keep in has_rows]),
            page_offset=_join([part.pages.offset[keep] for part, keep in zip(scanned, has_rows, strict=True)]),
            page_bytes=_join([part.pages.num_bytes[keep] for part, keep in zip(scanned, has_rows, strict=True)]),
            page_rows=_join([part.rows[keep] for part, keep in zip(scanned, has_rows, strict=True)]),
            dict_offset=np.array([part.pages.dict_offset for part in scanned], dtype=np.int64),
            dict_bytes=np.array([part.pages.dict_bytes for part in scanned], dtype=np.int64),
            codec=np.array([chunk.codec for chunk in chunks], dtype=np.int8),
            tokens=_join([part.tokens for part in scanned]).astype(np.int32),
            schema=scan.schema,
            whole_chunks=any(part.is_whole for part in scanned),
        )

    def decode(self, run: PageRun) -> Documents:
        """See `source.Source.decode`."""
        where = self._where(run.path)
        return to_documents(decode_pages(run, where), self.kind, where, run.first_row, self.tokenizer)

    def _where(self, path: str | Path) -> str:
        return f"source {self.name!r}: {path}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _ScannedChunk:
    """Pages and documents of one chunk, as `FileScan` joins them."""

    pages: ChunkPages
    rows: Int64Array
    tokens: Int64Array
    is_whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _ChunkScan:
    """What the chunks of a file share while they are scanned."""

    file_descriptor: int
    path: str
    kind: Kind
    tokenizer: Tokenizer
    leaf: Leaf
    schema: bytes
    where: str

    def scan(self, chunk: Chunk, first_row: int) -> _ScannedChunk:
        """Pages with their rows, and the tokens of each row; `first_row` is the chunk's, in the file."""
        try:
            by_pages = self._scan_by_pages(chunk, first_row)
        except CorruptPage:
            if not self.leaf.is_list:
                raise
            by_pages = None  # pages that begin inside a row do not decode by themselves either
        return by_pages or self._scan_whole(chunk, first_row)

    def _scan_by_pages(self, chunk: Chunk, first_row: int) -> _ScannedChunk | None:
        """As `scan`; None where index and headers do not tell the rows, or tell them wrongly."""
        pages = find_pages(self.file_descriptor, chunk, self.leaf, self.where)
        if pages.rows is None:
            return None
        dictionary = self._read_dictionary(pages)
        most_bytes = SCAN_RUN_BYTES * chunk.num_bytes // max(chunk.decoded_bytes, 1)
        tokens, values_of_page = [], []
        row = first_row
        for start, stop in _cut_runs(pages.offset, pages.num_bytes, most_bytes):
            num_bytes, num_rows = int(pages.num_bytes[start:stop].sum()), int(pages.rows[start:stop].sum())
            run = self._run(chunk, dictionary, int(pages.offset[start]), num_bytes, num_rows, row)
            values_of_page += [header.num_values for header in read_headers(run, self.where)]
            for array in decode_pages(run, self.where):
                tokens.append(count_tokens(array, self.kind, self.where, row, self.tokenizer))
                row += len(array)
        tokens_of_row = _join(tokens)
        rows = _rows_of_pages(self._values_of_row(tokens_of_row), np.array(values_of_page, dtype=np.int64))
        if rows is None or not np.array_equal(rows, pages.rows):
            return None
        return _ScannedChunk(pages=pages, rows=rows, tokens=tokens_of_row)

    def _scan_whole(self, chunk: Chunk, first_row: int) -> _ScannedChunk:
        """As `scan`, by decoding the chunk in one: its rows, and how many values a page holds, tell the pages' rows."""
        pages = find_pages(self.file_descriptor, chunk, self.leaf, self.where, use_index=False)
        assert pages.values is not None
        start, stop = int(pages.offset[0]), int(pages.offset[-1] + pages.num_bytes[-1])
        run = self._run(chunk, self._read_dictionary(pages), start, stop - start, chunk.num_rows, first_row)
        batch_rows = max(SCAN_RUN_BYTES * chunk.num_rows // max(chunk.decoded_bytes, 1), 64)
        tokens = []
        row = first_row
        for array in decode_batches(run, batch_rows, self.where):
            tokens.append(count_tokens(array, self.kind, self.where, row, self.tokenizer))
            row += len(array)
        tokens_of_row = _join(tokens)
        values_of_row = self._values_of_row(tokens_of_row)
        if not values_of_row.sum() == pages.values.sum() == chunk.num_values:
            raise CorruptPage(
                f"{self.where}: the column chunk at bytes [{start}, {stop}) decodes to {values_of_row.sum()} values, "
                f"its pages tell {pages.values.sum()}, the footer {chunk.num_values}; the file is damaged, restore it"
            )
        rows = _rows_of_pages(values_of_row, pages.values)
        if rows is not None:
            return _ScannedChunk(pages=pages, rows=rows, tokens=tokens_of_row)
        if chunk.num_values > _MAX_LIST_VALUES:
            raise SourceUnreadable(
                f"{self.where}: rows are split over pages, so the column chunk at bytes [{start}, {stop}) must be read "
                f"whole, but it has {chunk.num_values} tokens; write the file again, with a page index or smaller row "
                "groups"
            )
        one_page = replace(pages, offset=np.array([start]), num_bytes=np.array([stop - start]))
        return _ScannedChunk(pages=one_page, rows=np.array([len(tokens_of_row)]), tokens=tokens_of_row, is_whole=True)

    def _read_dictionary(self, pages: ChunkPages) -> bytes:
        return read_range(self.file_descriptor, pages.dict_offset, pages.dict_bytes) if pages.dict_bytes else b""

    def _run(
        self, chunk: Chunk, dictionary: bytes, offset: int, num_bytes: int, num_rows: int, first_row: int
    ) -> PageRun:
        return PageRun(
            pages=read_range(self.file_descriptor, offset, num_bytes),
            dictionary=dictionary,
            schema=self.schema,
            codec=chunk.codec,
            num_rows=num_rows,
            path=self.path,
            offset=offset,
            first_row=first_row,
        )

    def _values_of_row(self, tokens: Int64Array) -> Int64Array:
        """Values that Parquet counts for each row: an empty or null list is one."""
        return np.maximum(tokens, 1) if self.leaf.is_list else np.ones_like(tokens)


@contextmanager
def _open_file(path: Path, where: str) -> Iterator[int]:
    try:
        file_descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise SourceUnreadable(f"{where}: cannot be opened: {error.strerror}") from None
    try:
        yield file_descriptor
    except OSError as error:
        raise SourceUnreadable(f"{where}: cannot be read: {error.strerror}") from None
    finally:
        os.close(file_descriptor)


def _read_schema(footer: Footer, where: str) -> tuple[pa.Schema, str]:
    """Arrow schema and writer, as pyarrow reads them from the footer alone."""
    size = len(footer.metadata).to_bytes(4, "little")
    content = b"".join([MAGIC, footer.metadata, size, MAGIC])
    try:
        file = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False)
        return file.schema_arrow, file.metadata.created_by or ""
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceUnreadable(
            f"{where}: the footer does not parse: {str(error).rstrip('.')}; the file is damaged or encrypted"
        ) from None


def _cut_runs(offset: Int64Array, num_bytes: Int64Array, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of adjacent pages, each of at most `most_bytes` or of one page."""
    stop_byte = offset + num_bytes
    start = 0
    for i in range(1, len(offset) + 1):
        ends = i == len(offset) or offset[i] != stop_byte[i - 1] or stop_byte[i] - offset[start] > most_bytes
        if ends:
            yield start, i
            start = i


def _rows_of_pages(values_of_row: Int64Array, values_of_page: Int64Array) -> Int64Array | None:
    """Rows of each page of a chunk; None if a page begins inside a row."""
    first_value = np.concatenate([[0], np.cumsum(values_of_row)])
    page_value = np.concatenate([[0], np.cumsum(values_of_page)])
    first_row = np.searchsorted(first_value, page_value)
    if page_value[-1] != first_value[-1] or np.any(first_value[first_row] != page_value):
        return None
    return np.diff(first_row)


def _join(parts: list[Int64Array]) -> Int64Array:
    return np.concatenate(parts, dtype=np.int64) if parts else np.zeros(0, dtype=np.int64)
