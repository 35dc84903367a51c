"""Pages of one source, decoded: bytes of runs of pages -> one `DecodedPage` each."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int32Array, Int64Array
from torchmix.catalog.in_store import catalog_place
from torchmix.catalog.page_table import PageTable
from torchmix.catalog.sizes import IN_FILE
from torchmix.catalog.store import Catalog, SourceCatalog
from torchmix.errors import CatalogStale, CorruptPage, SourceUnreadable
from torchmix.formats.documents import with_items
from torchmix.formats.source import Documents, FormatSource, PageRun, PageSource, offsets_of
from torchmix.formats.table import choose_source
from torchmix.reader.mapped_files import MappedFiles
from torchmix.reader.open_files import OpenFiles, RangeFetch, Wanted
from torchmix.reader.page_cache import (
    PAGE_OVERHEAD_BYTES,
    Companion,
    DecodedPage,
    DecodeFigures,
    PageCache,
    blank_page,
    cut_documents,
)
from torchmix.recipe.sources import is_template_file
from torchmix.transform.maps import open_maps
from torchmix.transform.open_tokenizer import Tokenizers

# --- Pages of a source -> runs of one chunk -> batches of runs that are read and decoded together.
#
# Pages keep their order; a run or batch has at most BATCH_BYTES of a file, or one page. Cost: 3 microseconds a page,
# and some 50 a call.
#
# Pages of a run share a companion, and those that lie end to end are one range of the file.

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


# --- How each source of a catalog is read.
#
# What turns rows into tokens here is what the catalog's lengths were taken with. Cost: opening tokenizers, once each.


def decoders_of(
    catalog: Catalog,
    directory: Path,
    chosen: Mapping[str, FormatSource] | None,
    *,
    maps: Mapping[str, str] | None,
) -> list[FormatSource]:
    """Choose how each source is read.

    Args:
        catalog: The catalog.
        directory: The recipe's folder; paths of tokenizers are relative to it.
        chosen: By name; by default as the catalog says.
        maps: The words of the function of each source that has one, by name, as a recipe has them.

    Raises:
        CatalogStale: The catalog holds lengths of another transform, for example of another tokenizer.
        RecipeError, SourceUnreadable: A tokenizer or a function cannot be opened here.
    """
    tokenizers, decoders = Tokenizers(directory), list[FormatSource]()
    opened = open_maps(maps or {}, directory)
    for name, source in catalog.sources.items():
        if chosen is not None:
            decoder = chosen[name]
        else:
            decoder = choose_source(name, source, (file.path for file in source.files), tokenizers, opened.get(name))
        if decoder.transform_id != source.transform_id:
            of, first = "this torchmix", ""
            if source.map is not None:
                of, first = f"the map {source.map.function} here", "put back the version it was indexed with, or "
            elif source.tokenizer not in (None, "bytes"):
                chat = None if source.layout is None else source.layout.chat
                template = (
                    "" if chat is None or not is_template_file(chat) else f" or the chat template {chat.template}"
                )
                of, first = f"the tokenizer {source.tokenizer}{template} here", "put back what it was when indexed, or "
            raise CatalogStale(
                f"source {name!r}: the catalog at {catalog_place(catalog.directory)} holds lengths of transform "
                f"{source.transform_id!r}, {of} has {decoder.transform_id!r}; {first}run torchmix index"
            )
        decoders.append(with_items(decoder, source.sizes.items, source.sizes.marks))
    return decoders


# --- Pages of one source, decoded: bytes of runs of pages -> one `DecodedPage` each. Where tokens lie in a file as
# they are, a page is a view of the mapped file.
#
# Every page has exactly the documents, and they the lengths, that the catalog holds; otherwise an error names source,
# file, page and row. Pages of all files are decoded together, up to BATCH_BYTES, those of a chunk as one run, so that
# their companion is unpacked once; those that lie end to end are read by one `pread`, of objects in stores with their
# neighbours by requests that were begun before (open_files.py). Nothing else is read than these pages, the chunk's
# companion, and where the last row of a page ends in the next one the beginning of that.

logger = logging.getLogger(__name__)


class SourcePages:
    """Decodes pages of one source; not for several threads at once."""

    def __init__(
        self,
        catalog: SourceCatalog,
        decoder: PageSource,
        files: OpenFiles,
        companions: PageCache[tuple[str, int], Companion],
        *,
        masks_bad: bool = False,
        figures: DecodeFigures | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            catalog: The source in the catalog.
            decoder: How its pages become documents.
            files: Its files.
            companions: Keeps companions, by source and chunk, of all sources.
            figures: Sums of all sources, to which this one adds.
            masks_bad: Whether a page that does not decode, or decodes to other documents than were indexed, becomes
                blank (`NO_ID`) with one log message. Otherwise it is an error.
        """
        self.masks_bad = masks_bad
        self.row_encoder = decoder.row_encoder
        """What turns rows of its pages into tokens; None where they are tokens."""
        ids = catalog.ids if decoder.row_encoder is None else None
        self._is_narrow = ids is not None and ids.smallest >= 0 and ids.largest < 1 << 16
        """Whether all ids fit 2 bytes, if the pages are as they were indexed."""
        self._bad_pages: set[int] = set()
        self.catalog = catalog
        self._decoder = decoder
        self._files = files
        self._companions = companions
        self.mapped = MappedFiles(catalog, files, is_encoded=decoder.row_encoder is not None)
        in_file = None if decoder.row_encoder is None else catalog.sizes.columns.get(IN_FILE)
        self._tokens_in_file = catalog.sizes.tokens if in_file is None else in_file
        self.figures = figures or DecodeFigures()
        self._bytes_counted = 0

    def take_uncounted(self) -> int:
        """Bytes of pages and companions that were read from files since the last call."""
        before, self._bytes_counted = self._bytes_counted, self._files.bytes_read
        return self._bytes_counted - before

    def place_of_row(self, row: int) -> tuple[str, int]:
        """Source and file of a row, for messages, and its number in the file."""
        number = max(i for i, file in enumerate(self.catalog.files) if file.first_row <= row)
        return self._files.where(number), row - self.catalog.files[number].first_row

    def planned_bytes(self, pages: NDArray[np.int64]) -> list[int]:
        """Memory that each page will take decoded, if its ids fit int32 and are not narrower in the file; of texts, if
        a token has 4 bytes of text.
        """
        if not len(pages):
            return []
        place, lengths = self.catalog.pages.place(pages), self._tokens_in_file
        first_row = place.first_row.tolist()
        stop_row = (place.first_row + place.num_rows).tolist()
        ends = offsets_of(np.concatenate([lengths[a:b] for a, b in zip(first_row, stop_row, strict=True)]))
        stop = place.num_rows.cumsum()
        tokens = ends[stop] - ends[stop - place.num_rows]
        num_bytes: list[int] = (
            (2 if self._is_narrow else 4) * tokens + 8 * (place.num_rows + 1) + PAGE_OVERHEAD_BYTES
        ).tolist()
        return num_bytes

    def will_need(self, pages: NDArray[np.int64]) -> None:
        """Let the kernel read pages of mapped files ahead of need.

        Raises:
            SourceChanged: A file is not the indexed one.
        """
        place = self.catalog.pages.place(pages)
        files = self.catalog.pages.file_of_chunk[place.chunk]
        for file in sorted(set(files.tolist())):  # np.unique would import numpy.ma
            starts, num_bytes = place.offset[files == file].tolist(), place.num_bytes[files == file].tolist()
            self._files.will_need(file, zip(starts, num_bytes, strict=True))

    def wanted(self, pages: Iterable[int]) -> list[Wanted]:
        """What `decode` of these pages will read from stores, in its order."""
        objects = self._files.objects
        if objects is None:
            return []
        table, wanted = self.catalog.pages, list[Wanted]()
        companions: set[int] = set()
        for run in plan_runs(table, pages, most_bytes=BATCH_BYTES):
            if not self._files.is_in_store(run.file):
                continue
            chunk = run.chunk
            if chunk not in companions and (self.catalog.name, chunk) not in self._companions:
                companions.add(chunk)
                wanted.append(
                    Wanted(objects, run.file, int(table.companion_offset[chunk]), int(table.companion_bytes[chunk]))
                )
            wanted += [Wanted(objects, run.file, *span) for span in run.ranges]
        return wanted

    def decode(self, pages: Iterable[int], fetch: RangeFetch | None = None) -> Iterator[DecodedPage]:
        """Read and decode pages, one batch after the other.

        Args:
            pages: Ascending numbers, each once.
            fetch: Requests for the ranges in `wanted`; without it, each range of a store is one request when it is due.

        Yields:
            The pages, in that order.

        Raises:
            SourceChanged, SourceUnreadable: A file is not the indexed one, or cannot be read.
            CorruptPage: A page does not decode, or to other documents than were indexed.
        """
        numbers = np.fromiter(pages, np.int64)
        for part in self._parts_by_file(numbers) if self.mapped.is_possible else (numbers,):
            mapped = self.mapped.files_of_pages(part)
            if mapped is not None:
                self.mapped.verify(part)
                yield from self._views(part, mapped[0][1])
                continue
            runs = plan_runs(self.catalog.pages, part, most_bytes=BATCH_BYTES)
            for batch in batches(runs, most_bytes=BATCH_BYTES):
                yield from self._decode_batch(batch, fetch)

    def _parts_by_file(self, numbers: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """The pages of each file."""
        table = self.catalog.pages
        starts = np.flatnonzero(np.diff(table.file_of_chunk[table.chunk_of_pages(numbers)], prepend=-1)).tolist()
        for start, stop in pairwise([*starts, len(numbers)]):
            yield numbers[start:stop]

    def _views(self, pages: NDArray[np.int64], tokens: NDArray[np.integer[Any]]) -> Iterator[DecodedPage]:
        """Pages of a mapped file."""
        lengths, place = self.catalog.sizes.tokens, self.catalog.pages.place(pages)
        begins = (place.offset // tokens.itemsize).tolist()
        for begin, row, count in zip(begins, place.first_row.tolist(), place.num_rows.tolist(), strict=True):
            offsets = np.zeros(count + 1, np.int64)
            np.cumsum(lengths[row : row + count], out=offsets[1:])
            values = tokens[begin : begin + int(offsets[-1])]
            yield DecodedPage(values=values, offsets=offsets.data, is_view=True)

    def _decode_batch(self, batch: Sequence[PlannedRun], fetch: RangeFetch | None) -> Iterator[DecodedPage]:
        try:
            documents, is_proven = self._decode_together(batch, fetch)
        except CorruptPage as error:
            numbers = [page for run in batch for page in run.pages]
            if len(numbers) == 1 and self.masks_bad:
                yield self._blank(numbers[0], batch[0].rows[0], error)
                return
            if len(numbers) == 1:
                raise
            for page in numbers:  # one by one, so that the error names the damaged page
                yield from self._decode_batch(plan_runs(self.catalog.pages, [page], most_bytes=1), None)
            return
        for run, of_run in zip(batch, documents, strict=True):
            for decoded in cut_documents(of_run, run.num_rows, is_narrow=self._is_narrow and is_proven):
                self.figures.pages_decoded += 1
                self.figures.bytes_decoded += decoded.values.nbytes
                yield decoded

    def _blank(self, page: int, rows: slice, error: CorruptPage) -> DecodedPage:
        if page not in self._bad_pages:
            self._bad_pages.add(page)
            self.figures.bad_pages += 1
            logger.warning("%s - its rows come without loss, as bad_rows: mask says", error)
        return blank_page(offsets_of(self.catalog.sizes.tokens[rows]))

    def _decode_together(self, batch: Sequence[PlannedRun], fetch: RangeFetch | None) -> tuple[list[Documents], bool]:
        began = time.perf_counter()
        companions: dict[int, Companion | None] = {}
        contents: list[list[bytes]] = []
        for run in batch:
            if run.chunk not in companions:
                companions[run.chunk] = self._companion(run, fetch)
            contents.append([self._read(run.file, offset, num_bytes, fetch) for offset, num_bytes in run.ranges])
        lengths = self._tokens_in_file
        tokens = np.concatenate([lengths[rows] for run in batch for rows in run.rows])
        offsets, row = offsets_of(tokens), 0
        runs: list[PageRun] = []
        for run, parts in zip(batch, contents, strict=True):
            is_as_indexed = self._check_pages(run, parts)
            stop = row + sum(run.num_rows)
            planned = tokens[row:stop], offsets[row : stop + 1] - offsets[row]
            runs.append(self._as_read(run, planned, companions[run.chunk], parts, is_as_indexed=is_as_indexed))
            row = stop
        read = time.perf_counter()
        try:
            documents = self._decoder.decode(runs)
        except SourceUnreadable as error:  # a row became bad after it was indexed
            if not self.masks_bad:
                raise
            raise CorruptPage(str(error)) from error
        for chunk, companion in companions.items():
            if companion is not None:  # with the memo made from it
                self._companions.keep((self.catalog.name, chunk), companion, companion.num_bytes)
        for run, as_read, of_run in zip(batch, runs, documents, strict=True):
            if self.row_encoder is not None:
                self._check_num_rows(of_run, as_read.num_rows, run)
            elif of_run.offsets is not as_read.offsets:
                self._check_lengths(of_run, as_read.tokens, run)
        self.figures.read_s += read - began
        self.figures.decode_s += time.perf_counter() - read
        self.figures.bytes_read += self.take_uncounted()
        return documents, all(run.is_as_indexed for run in runs)

    def _as_read(
        self,
        run: PlannedRun,
        planned: tuple[Int32Array, Int64Array],
        companion: Companion | None,
        parts: Sequence[bytes],
        *,
        is_as_indexed: bool,
    ) -> PageRun:
        table, file = self.catalog.pages, self.catalog.files[run.file]
        tokens, offsets = planned
        return PageRun(
            pages=parts[0] if len(parts) == 1 else b"".join(parts),
            companion=b"" if companion is None else companion.content,
            memo=None if companion is None else companion.memo,
            schema=self.catalog.schemas[file.schema],
            kind=int(table.kind[run.chunk]),
            num_rows=len(tokens),
            path=self._files.path(run.file),
            offset=run.offset[0],
            first_row=run.first_row[0] - file.first_row,
            tokens=tokens,
            offsets=offsets,
            begins_inside_row=run.begins_inside_row,
            rows_behind=int(table.place(np.array([run.pages[-1] + 1])).num_rows[0]) if run.tail_bytes[-1] else 0,
            has_bad_rows=file.num_bad_rows > 0,
            is_as_indexed=is_as_indexed,
        )

    def _read(self, file: int, offset: int, num_bytes: int, fetch: RangeFetch | None) -> bytes:
        if fetch is not None and self._files.objects is not None:
            content = fetch.take(self._files.objects, file, offset, num_bytes)
            if content is not None:
                return content
        return self._files.read(file, offset, num_bytes)

    def _companion(self, run: PlannedRun, fetch: RangeFetch | None) -> Companion | None:
        table = self.catalog.pages
        num_bytes = int(table.companion_bytes[run.chunk])
        if not num_bytes:
            return None
        companion = self._companions.use((self.catalog.name, run.chunk))
        if companion is None:
            offset = int(table.companion_offset[run.chunk])
            companion = Companion(content=self._read(run.file, offset, num_bytes, fetch))
            if len(table.companion_crc):
                self._check_bytes(companion.content, int(table.companion_crc[run.chunk]), run.file, offset)
        return companion

    def _check_pages(self, run: PlannedRun, parts: Sequence[bytes]) -> bool:
        """Compare the checksum of each page with its tail; `parts` are the bytes of `run.ranges`.

        Returns:
            Whether every page has one.
        """
        checksums = self.catalog.pages.page_crc
        if not len(checksums):
            return False
        have_one = True
        left = list(zip(run.ranges, parts, strict=True))  # the parts hold the pages in order
        pages = zip(run.pages, run.offset, run.num_bytes, run.tail_bytes, strict=True)
        for page, offset, num_bytes, tail_bytes in pages:
            while offset >= sum(left[0][0]):
                left.pop(0)
            (start, _), part = left[0]
            content = memoryview(part)[offset - start : offset - start + num_bytes + tail_bytes]
            have_one &= self._check_bytes(content, int(checksums[page]), run.file, offset)
        return have_one

    def _check_bytes(self, content: bytes | memoryview, checksum: int, file: int, offset: int) -> bool:
        if checksum and (found := zlib.crc32(content)) != checksum:
            raise CorruptPage(
                f"the page at bytes [{offset}, {offset + len(content)}) has checksum {found:08x}, it was indexed with "
                f"{checksum:08x}; the file was altered after it was indexed, or its disk fails: put it back, or "
                "run torchmix index",
                self._files.where(file),
                offset=offset,
            )
        return bool(checksum)

    def _check_lengths(self, documents: Documents, planned: Int32Array | None, run: PlannedRun) -> None:
        assert planned is not None
        self._check_num_rows(documents, len(planned), run)
        found = documents.offsets[1:] - documents.offsets[:-1]
        if not np.array_equal(planned, found):
            i = int(np.argmax(planned != found))
            row = int(np.concatenate([np.arange(span.start, span.stop) for span in run.rows])[i])
            raise self._other_documents(run, row, f"decodes to {found[i]} tokens, the catalog says {planned[i]}")

    def _check_num_rows(self, documents: Documents, num_rows: int, run: PlannedRun) -> None:
        if len(documents) != num_rows:
            what = f"begins {len(documents)} documents, the catalog says {num_rows}"
            raise self._other_documents(run, run.first_row[0], what)

    def _other_documents(self, run: PlannedRun, row: int, what: str) -> CorruptPage:
        page = int(self.catalog.pages.page_of_rows(np.array([row]))[0])
        row -= self.catalog.files[run.file].first_row
        remedy = "the file was altered after it was indexed: put it back, or run torchmix index"
        return CorruptPage(f"row {row}, in page {page}, {what}; {remedy}", self._files.where(run.file), row=row)
