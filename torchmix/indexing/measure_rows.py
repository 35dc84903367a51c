"""Lengths of rows that must be encoded, measured by encoding them: a second pass over a file whose pages are known.

Rows are encoded as they are when they are read, so that lengths are true; a row that cannot be encoded is an error, or
a bad row, as in a scan. A map is tried on a few rows of each file with another epoch and seed: their lengths must stay,
and unless it says that it is random, their tokens. Cost: decoding the file once more, and encoding each row once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import BadRows, ListBytes, most_lists
from torchmix.catalog.sizes import IN_FILE
from torchmix.errors import SourceUnreadable, where_of
from torchmix.formats.column import reason_of, see_lists
from torchmix.formats.documents import CutIds, LaidOutTexts, with_items
from torchmix.formats.source import (
    Documents,
    FileScan,
    FormatSource,
    PageRun,
    SeenIds,
    join_seen,
    offsets_of,
    see_ids,
)
from torchmix.storage.random_access import RandomAccessFile
from torchmix.storage.store_file import opened
from torchmix.transform.bytes_tokenizer import BYTES
from torchmix.transform.maps import OTHER_EPOCH, OTHER_SEED, TRIED_ROWS, MapEncoder, told_of_trial
from torchmix.transform.tokenizer import EncodedRows, RowEncoder, RowsToEncode, join_encoded, row_array

RUN_BYTES = 1 << 20
"""Most bytes of pages that are decoded together; a larger page is decoded alone."""


def scan_and_measure(
    source: FormatSource,
    path: str | Path,
    *,
    bad: BadRows | None,
    progress: Callable[[int], None],
    keep: Callable[[NDArray[np.integer[Any]], Int64Array], None] | None,
) -> FileScan:
    """Scan one file; rows that go through a map, or whose ids are kept, are encoded. Arguments as `measure_rows`."""
    if isinstance(source, LaidOutTexts):
        return _scan_laid_out(source, path, bad=bad, progress=progress, keep=keep)
    if isinstance(source, CutIds):
        scan = source.scan(path, progress=lambda _: progress(0), bad=bad)
        cut = measure_rows(source, source.encoder, path, scan, bad=bad, progress=progress)
        return replace(cut, sizes={**cut.sizes, IN_FILE: scan.tokens}, is_quick=False)
    encoder = source.row_encoder
    if encoder is None or not (encoder.is_mapped or keep is not None):
        return source.scan(path, progress=progress, bad=bad)
    as_it_is: Any = replace(source, tokenizer=BYTES, map=None)  # type: ignore[type-var]  # a format with a tokenizer is a Struct
    scan = as_it_is.scan(path, progress=lambda _: progress(0), bad=bad)
    return measure_rows(as_it_is, encoder, path, scan, bad=bad, progress=progress, keep=keep)


def _scan_laid_out(
    source: LaidOutTexts,
    path: str | Path,
    *,
    bad: BadRows | None,
    progress: Callable[[int], None],
    keep: Callable[[NDArray[np.integer[Any]], Int64Array], None] | None,
) -> FileScan:
    """Scan a file whose rows are counted while it is scanned; where ids are kept, they are encoded once more."""
    scan = source.scan(path, progress=progress, bad=bad)
    if keep is not None:
        read = with_items(source, scan.items, scan.marks)
        encoder = read.row_encoder
        assert encoder is not None, "it has its items"
        again = measure_rows(read, encoder, path, scan, bad=bad, progress=lambda _: progress(0), keep=keep)
        if not np.array_equal(again.tokens, scan.tokens):
            row = int(np.argmax(again.tokens != scan.tokens))
            raise SourceUnreadable(
                f"row {row} has {scan.tokens[row]} tokens, and {again.tokens[row]} when it is encoded again; what a "
                "map gives must follow from the row alone",
                row=row,
            )
    return scan


def measure_rows(
    source: FormatSource,
    encoder: RowEncoder,
    path: str | Path,
    scan: FileScan,
    *,
    bad: BadRows | None,
    progress: Callable[[int], None],
    keep: Callable[[NDArray[np.integer[Any]], Int64Array], None] | None = None,
) -> FileScan:
    """Measure the rows of one file.

    Args:
        source: Gives rows as the file holds them.
        encoder: Turns them into tokens.
        path: The file.
        scan: Its scan by `source`, whose lengths are those of the rows as they are; those without any are not encoded.
        bad: Takes rows that cannot be encoded; None: the first one is an error.
        progress: Called with bytes of pages.
        keep: Called with the ids of a run of pages, and [pages] ids of each.

    Raises:
        SourceUnreadable: A row cannot be encoded.
        CorruptPage: A page does not decode.
    """
    lengths = np.zeros(scan.num_rows, np.int64)
    seen: list[SeenIds | None] = []
    lists: list[ListBytes | None] = []
    is_tried = not isinstance(encoder, MapEncoder)
    with opened(path, where_of(source.name, path)) as file:
        for pages, run in _runs(scan, file, path, has_bad_rows=bool(bad and bad.rows)):
            assert run.tokens is not None, "a run has the lengths of its scan"
            [documents] = source.decode([run])
            used = np.flatnonzero(run.tokens)
            rows = _chosen(documents, used)
            if not is_tried and len(used) and isinstance(encoder, MapEncoder):
                _try_map(encoder, rows, used + run.first_row)
                is_tried = True
            encoded = _encode(encoder, rows, used + run.first_row, bad)
            counts = np.zeros(run.num_rows, np.int64)
            counts[used] = np.diff(encoded.offsets)
            lengths[run.first_row : run.first_row + run.num_rows] = counts
            if encoder.is_mapped or encoder.takes == "tokens":  # a tokenizer knows its ids
                seen.append(see_ids(encoded.values, offsets_of(counts.astype(np.int32)), run.first_row))
                lists.append(see_lists(encoded.others, counts[used]))
            if keep is not None:
                if encoded.others:
                    raise SourceUnreadable(
                        f"the map gives {', '.join(encoded.others)} beside ids, and keep: tokens keeps ids "
                        "alone; remove it"
                    )
                first = np.cumsum(scan.page_rows[pages]) - scan.page_rows[pages]
                keep(encoded.values, np.add.reduceat(counts, first))
            progress(len(run.pages))
    return replace(scan, tokens=lengths.astype(np.int32), ids=join_seen(seen), lists=most_lists(lists), bad=bad)


def _runs(
    scan: FileScan, file: RandomAccessFile, path: str | Path, *, has_bad_rows: bool
) -> Iterator[tuple[slice, PageRun]]:
    """Adjacent pages of a chunk, with their bytes."""
    first_row = np.concatenate([np.zeros(1, np.int64), np.cumsum(scan.page_rows)])
    stop_byte = scan.page_offset + scan.page_bytes
    tail = np.zeros_like(stop_byte) if scan.tail_bytes is None else scan.tail_bytes
    start = 0
    while start < len(scan.page_offset):
        stop = start + 1
        while (
            stop < len(scan.page_offset)
            and scan.chunk_of_page[stop] == scan.chunk_of_page[start]
            and scan.page_offset[stop] == stop_byte[stop - 1]
            and stop_byte[stop] - scan.page_offset[start] <= RUN_BYTES
        ):
            stop += 1
        chunk = int(scan.chunk_of_page[start])
        begin, end = int(scan.page_offset[start]), int(stop_byte[stop - 1] + tail[stop - 1])
        companion = b""
        if scan.companion_offset is not None and scan.companion_bytes is not None and scan.companion_bytes[chunk]:
            companion = file.read(int(scan.companion_offset[chunk]), int(scan.companion_bytes[chunk]))
        yield (
            slice(start, stop),
            PageRun(
                pages=file.read(begin, end - begin),
                companion=companion,
                schema=scan.schema,
                kind=int(scan.kind[chunk]),
                num_rows=int(first_row[stop] - first_row[start]),
                path=str(path),
                offset=begin,
                first_row=int(first_row[start]),
                tokens=scan.tokens[first_row[start] : first_row[stop]],
                begins_inside_row=bool(start and tail[start - 1]),
                rows_behind=int(scan.page_rows[stop]) if tail[stop - 1] else 0,
                has_bad_rows=has_bad_rows,
            ),
        )
        start = stop


def _chosen(documents: Documents, used: Int64Array) -> Documents:
    """Some of the rows, ascending."""
    if len(used) == len(documents):
        return documents
    counts = np.diff(documents.offsets)
    is_used = np.zeros(len(documents), np.bool_)
    is_used[used] = True
    offsets = np.zeros(len(used) + 1, np.int64)
    np.cumsum(counts[used], out=offsets[1:])
    return Documents(values=documents.values[np.repeat(is_used, counts)], offsets=offsets)


def _encode(encoder: RowEncoder, rows: Documents, numbers: Int64Array, bad: BadRows | None) -> EncodedRows:
    """Ids of some rows, whose numbers in the file are given; bad ones have none."""
    if not len(rows):
        return EncodedRows(values=np.zeros(0, np.uint16), offsets=np.zeros(1, np.int64))
    try:
        return encoder.encode(_asked(encoder, rows, numbers))
    except SourceUnreadable as error:
        if len(rows) == 1:
            if bad is None:
                raise
            bad.add(int(numbers[0]), reason_of(error))
            return EncodedRows(values=np.zeros(0, np.uint16), offsets=np.zeros(2, np.int64))
    half = len(rows) // 2  # so that the error names the row, and only that one is bad
    first = _encode(encoder, _part(rows, 0, half), numbers[:half], bad)
    second = _encode(encoder, _part(rows, half, len(rows)), numbers[half:], bad)
    return join_encoded([first, second])


def _part(rows: Documents, start: int, stop: int) -> Documents:
    offsets = rows.offsets[start : stop + 1]
    return Documents(values=rows.values[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])


def _asked(encoder: RowEncoder, rows: Documents, numbers: Int64Array, *, epoch: int = 0, seed: int = 0) -> RowsToEncode:
    return RowsToEncode(
        rows=row_array(rows.values, rows.offsets, encoder.takes),
        row=numbers,
        epoch=epoch,
        seed=np.full(len(rows), seed, np.uint64),
        first_row=int(numbers[0]),
    )


def _try_map(encoder: MapEncoder, rows: Documents, numbers: Int64Array) -> None:
    """Raise SourceUnreadable where a map gives a row another length, or other tokens unasked, in another epoch."""
    few = _part(rows, 0, min(len(rows), TRIED_ROWS))
    numbers = numbers[: len(few)]
    try:
        one = encoder.encode(_asked(encoder, few, numbers))
        other = encoder.encode(_asked(encoder, few, numbers, epoch=OTHER_EPOCH, seed=OTHER_SEED))
    except SourceUnreadable:
        return  # what measures all rows finds which one
    is_same = np.array_equal(one.values, other.values)
    told = told_of_trial(encoder.map, numbers, np.diff(one.offsets), np.diff(other.offsets), is_same=is_same)
    if told is not None:
        raise SourceUnreadable(told)
