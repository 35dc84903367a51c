"""Pages of a scanned file as runs, and a source's documents as Python lists, for comparing with whole-file reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from torchmix.formats.source import Documents, FileScan, FormatSource, PageRun
from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT
from torchmix.transform.tokenizer import RowsToEncode, row_array


def page_runs(path: Path, scan: FileScan, *, most_pages: int = 1) -> Iterator[PageRun]:
    """Adjacent pages of the same chunk, up to `most_pages` together, in row order."""
    content = path.read_bytes()
    first_row = np.concatenate([[0], np.cumsum(scan.page_rows)])
    stop_byte = scan.page_offset + scan.page_bytes
    tail_bytes = np.zeros_like(stop_byte) if scan.tail_bytes is None else scan.tail_bytes
    start = 0
    while start < len(scan.page_offset):
        stop = start + 1
        while (
            stop < len(scan.page_offset)
            and stop - start < most_pages
            and scan.chunk_of_page[stop] == scan.chunk_of_page[start]
            and scan.page_offset[stop] == stop_byte[stop - 1]
        ):
            stop += 1
        chunk = scan.chunk_of_page[start]
        start_byte, num_bytes = -1, 0
        if scan.companion_offset is not None and scan.companion_bytes is not None:
            start_byte, num_bytes = scan.companion_offset[chunk], scan.companion_bytes[chunk]
        yield PageRun(
            pages=content[scan.page_offset[start] : stop_byte[stop - 1] + tail_bytes[stop - 1]],
            companion=content[start_byte : start_byte + num_bytes] if start_byte >= 0 else b"",
            schema=scan.schema,
            kind=int(scan.kind[chunk]),
            num_rows=int(first_row[stop] - first_row[start]),
            path=str(path),
            offset=int(scan.page_offset[start]),
            first_row=int(first_row[start]),
            tokens=scan.tokens[first_row[start] : first_row[stop]],
            begins_inside_row=bool(start and tail_bytes[start - 1]),
            rows_behind=int(scan.page_rows[stop]) if tail_bytes[stop - 1] else 0,
        )
        start = stop


def as_lists(documents: Documents) -> list[list[int]]:
    """One list of tokens per document."""
    assert documents.offsets[0] == 0
    assert documents.offsets[-1] == len(documents.values)
    ids = documents.values.tolist()
    offsets = documents.offsets.tolist()
    return [ids[start:stop] for start, stop in pairwise(offsets)]


def encoded(source: FormatSource, documents: Documents) -> Documents:
    """Documents of a run as tokens; a null text counts as an empty one."""
    encoder = source.row_encoder
    if encoder is None:
        return documents
    rows = row_array(documents.values, documents.offsets, encoder.takes)
    numbers = np.arange(len(documents))
    made = encoder.encode(RowsToEncode(rows=rows, row=numbers, epoch=0, seed=numbers.astype(np.uint64), first_row=0))
    return Documents(values=made.values, offsets=made.offsets)


def documents_by_page(source: FormatSource, path: Path, scan: FileScan, *, most_pages: int = 1) -> list[list[int]]:
    """All documents of a file, decoded run by run."""
    documents = []
    for run in page_runs(path, scan, most_pages=most_pages):
        decoded = as_lists(encoded(source, source.decode([run])[0]))
        if source.row_encoder is not None and run.tokens is not None:
            decoded = [row if tokens else [] for row, tokens in zip(decoded, run.tokens.tolist(), strict=True)]
        assert len(decoded) == run.num_rows
        documents += decoded
    return documents


def documents_by_pyarrow(path: Path, column: str) -> list[list[int]]:
    """All documents of a file, by a whole-file read without torchmix; texts as bytes and an end."""
    rows = pq.read_table(path, columns=[column]).column(0).to_pylist()
    return [
        [] if row is None else [*row.encode(), END_OF_DOCUMENT] if isinstance(row, str) else list(row) for row in rows
    ]
