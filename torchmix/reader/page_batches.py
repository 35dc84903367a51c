"""Pages of a source -> runs of one chunk -> batches of runs that are read and decoded together.

In: ascending numbers of pages. Out: `PlannedRun`s, and lists of them. Must hold: pages keep their order; a run or batch
has at most BATCH_BYTES of a file, or one page. Cost: 3 microseconds a page, and some 50 a call.

Pages of a run share a companion, and those that lie end to end are one range of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.page_table import PageTable

BATCH_BYTES = 1 << 20
"""Most bytes of files that are decoded together; a larger page is decoded alone."""


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """Pages of one chunk that are decoded together."""

    pages: list[int]
    """Numbers of the pages, ascending."""
    file: int
    chunk: int
    offset: list[int]
    """[pages] first byte of each in the file."""
    num_bytes: list[int]
    """[pages] bytes of each."""
    first_row: list[int]
    """[pages] first row of each in the source."""
    num_rows: list[int]
    """[pages] rows that begin in each."""
    begins_inside_row: bool
    """Whether the beginning of the first page belongs to the row before."""
    tail_bytes: list[int]
    """[pages] bytes after each page that its last row needs."""

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """(offset, bytes) to read: pages that lie end to end are one range, and the last one has the tail."""
        ranges: list[tuple[int, int]] = []
        for offset, num_bytes in zip(self.offset, self.num_bytes, strict=True):
            if ranges and sum(ranges[-1]) == offset:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + num_bytes)
            else:
                ranges.append((offset, num_bytes))
        ranges[-1] = (ranges[-1][0], ranges[-1][1] + self.tail_bytes[-1])
        return ranges

    @property
    def rows(self) -> list[slice]:
        """Rows of the source of each page."""
        return [slice(row, row + count) for row, count in zip(self.first_row, self.num_rows, strict=True)]


def plan_runs(table: PageTable, pages: Iterable[int] | NDArray[np.int64], *, most_bytes: int) -> list[PlannedRun]:
    """Runs of at most `most_bytes`, or one page.

    The beginning or the tail of a page may belong to a neighbour, so where rows are split over pages a run has only
    neighbouring pages.
    """
    numbers = pages if isinstance(pages, np.ndarray) else np.fromiter(pages, np.int64)
    if not len(numbers):
        return []
    place = table.place(numbers)
    may_join = place.chunk[1:] == place.chunk[:-1]
    if len(table.tail_bytes):
        is_split = (place.tail_bytes[:-1] > 0) | place.begins_inside_row[1:]
        may_join &= ~is_split | (numbers[1:] == numbers[:-1] + 1)
    starts, run_bytes = [0], 0
    sizes = place.num_bytes.tolist()
    for i, (num_bytes, joins) in enumerate(zip(sizes, [True, *may_join.tolist()], strict=True)):
        if i and (not joins or run_bytes + num_bytes > most_bytes):
            starts.append(i)
            run_bytes = 0
        run_bytes += num_bytes
    listed, chunks, files = numbers.tolist(), place.chunk.tolist(), table.file_of_chunk[place.chunk].tolist()
    offset, first_row, num_rows = place.offset.tolist(), place.first_row.tolist(), place.num_rows.tolist()
    begins_inside_row, tail_bytes = place.begins_inside_row.tolist(), place.tail_bytes.tolist()
    return [
        PlannedRun(
            pages=listed[start:stop],
            file=files[start],
            chunk=chunks[start],
            offset=offset[start:stop],
            num_bytes=sizes[start:stop],
            first_row=first_row[start:stop],
            num_rows=num_rows[start:stop],
            begins_inside_row=begins_inside_row[start],
            tail_bytes=tail_bytes[start:stop],
        )
        for start, stop in zip(starts, [*starts[1:], len(listed)], strict=True)
    ]


def batches(runs: Iterable[PlannedRun], *, most_bytes: int) -> Iterator[list[PlannedRun]]:
    """Batches of runs of at most `most_bytes` together, or of one run."""
    batch: list[PlannedRun] = []
    batch_bytes = 0
    for run in runs:
        run_bytes = sum(run.num_bytes)
        if batch and batch_bytes + run_bytes > most_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(run)
        batch_bytes += run_bytes
    if batch:
        yield batch
