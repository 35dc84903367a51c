"""Pages of one source, decoded: bytes of runs of pages -> one `DecodedPage` each. Where tokens lie in a file as they
are, a page is a view of the mapped file.

In: numbers of pages, ascending. Out: their documents. Must hold: every page has exactly the documents, and they the
lengths, that the catalog holds; otherwise an error names source, file, page and row. Pages of a chunk are decoded
together, up to RUN_BYTES, so that their dictionary is unpacked once; those that lie end to end are read by one `pread`,
of objects in stores with their neighbours by requests that were begun before (range_requests.py).
Nothing else is read than these pages, the chunk's dictionary, and where the last row of a page ends in the next one the
beginning of that.
Cost: that of decoding, and about 50 microseconds a run; a copy at 0.3 ns a token where several pages were one run.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.page_table import PlacedPages
from torchmix.catalog.store import SourceCatalog
from torchmix.errors import CorruptPage
from torchmix.sources.mapped_files import MappedFiles
from torchmix.sources.open_files import OpenFiles
from torchmix.sources.page_cache import PageCache
from torchmix.sources.range_requests import RangeFetch, Wanted
from torchmix.sources.source import Documents, PageRun, Source

RUN_BYTES = 1 << 20
"""Most bytes of a file that are decoded together; a page that is larger comes alone."""
PAGE_OVERHEAD_BYTES = 512
"""Python's objects around a decoded page."""

INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecodedPage:
    """The documents of one page."""

    values: NDArray[np.integer[Any]]
    """[tokens] its documents end to end: the file's integers if those are narrower than 32 bits, else int32, or int64
    where an id needs it."""
    offsets: memoryview
    """[rows + 1] int64, where each document begins in `values`."""
    is_view: bool = False
    """`values` is the kernel's memory, and not this process's."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return (0 if self.is_view else self.values.nbytes) + self.offsets.nbytes + PAGE_OVERHEAD_BYTES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DictionaryPage:
    """The dictionary of a chunk."""

    content: bytes
    """As it lies in the file."""
    memo: dict[str, bytes] = field(default_factory=dict)
    """What the source keeps of it, see `PageRun.memo`."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return len(self.content) + sum(map(len, self.memo.values()))


class SourcePages:
    """Decodes pages of one source; not for several threads at once."""

    def __init__(
        self,
        catalog: SourceCatalog,
        decoder: Source,
        files: OpenFiles,
        dictionaries: PageCache[tuple[str, int], DictionaryPage],
    ) -> None:
        """Nothing is read yet; `dictionaries` keeps dictionary pages, by source and chunk, of all sources."""
        self.catalog = catalog
        self._decoder = decoder
        self._files = files
        self._dictionaries = dictionaries
        self.mapped = MappedFiles(catalog, files)
        self.pages_decoded = 0
        self.bytes_decoded = 0
        self.read_s = 0.0
        self.decode_s = 0.0

    @property
    def bytes_read(self) -> int:
        """Bytes of pages and dictionaries that were read from files."""
        return self._files.bytes_read

    def planned_bytes(self, page: int) -> int:
        """Memory that a page will take decoded, if its ids fit int32 and are not narrower in the file."""
        place = self.catalog.pages.place(np.array([page]))
        first, num_rows = int(place.first_row[0]), int(place.num_rows[0])
        num_tokens = int(self.catalog.sizes.tokens[first : first + num_rows].sum(dtype=np.int64))
        return 4 * num_tokens + 8 * (num_rows + 1) + PAGE_OVERHEAD_BYTES

    def will_need(self, pages: NDArray[np.int64]) -> None:
        """Let the kernel read pages of mapped files ahead of need.

        Raises:
            SourceChanged: A file is not the indexed one.
        """
        place = self.catalog.pages.place(pages)
        files = self.catalog.pages.file_of_chunk[place.chunk]
        for file in np.unique(files).tolist():
            starts, num_bytes = place.offset[files == file].tolist(), place.num_bytes[files == file].tolist()
            self._files.will_need(file, zip(starts, num_bytes, strict=True))

    def wanted(self, pages: Iterable[int]) -> list[Wanted]:
        """What `decode` of these pages will read from stores, in its order."""
        objects = self._files.objects
        if objects is None:
            return []
        table, wanted = self.catalog.pages, list[Wanted]()
        dictionaries: set[int] = set()
        for of_file in self._files_of(pages):
            file = int(table.file_of_chunk[of_file.place.chunk[0]])
            for run in self._runs(of_file) if self._files.is_in_store(file) else ():
                chunk = int(run.place.chunk[0])
                if chunk not in dictionaries and (self.catalog.name, chunk) not in self._dictionaries:
                    dictionaries.add(chunk)
                    wanted.append(Wanted(objects, file, int(table.dict_offset[chunk]), int(table.dict_bytes[chunk])))
                wanted += [Wanted(objects, file, *span) for span in _ranges(run.place)]
        return wanted

    def decode(self, pages: Iterable[int], fetch: RangeFetch | None = None) -> Iterator[DecodedPage]:
        """Read and decode pages, one run after the other.

        Args:
            pages: Ascending numbers, each once.
            fetch: Requests for what they `wanted`; without it, each range of a store is one request, when it is due.

        Yields:
            The pages, in that order.

        Raises:
            SourceChanged, SourceUnreadable: A file is not the indexed one, or cannot be read.
            CorruptPage: A page does not decode, or to other documents than were indexed.
        """
        for of_file in self._files_of(pages):
            mapped = self.mapped.files_of_pages(of_file.numbers)
            yield from self._decode_runs(of_file, fetch) if mapped is None else self._views(of_file, mapped[0][1])

    def _files_of(self, pages: Iterable[int]) -> Iterator[_Pages]:
        """The pages of each file."""
        numbers = np.fromiter(pages, np.int64)
        asked = _Pages(numbers, self.catalog.pages.place(numbers))
        files = self.catalog.pages.file_of_chunk[asked.place.chunk]
        starts = np.flatnonzero(np.diff(files, prepend=-1)).tolist()
        for start, stop in pairwise([*starts, len(numbers)]):
            yield asked.part(start, stop)

    def _decode_runs(self, pages: _Pages, fetch: RangeFetch | None) -> Iterator[DecodedPage]:
        for run in self._runs(pages):
            try:
                documents = self._decode_run(run, fetch)
            except CorruptPage:
                if len(run.numbers) == 1:
                    raise
                for i in range(len(run.numbers)):  # alone, the damaged one is named
                    yield from self._decode_runs(run.part(i, i + 1), None)
                continue
            ends = np.cumsum(np.append(0, run.place.num_rows)).tolist()
            for start, stop in pairwise(ends):
                decoded = _cut(documents, slice(start, stop))
                self.pages_decoded += 1
                self.bytes_decoded += decoded.values.nbytes
                yield decoded

    def _views(self, pages: _Pages, tokens: NDArray[np.integer[Any]]) -> Iterator[DecodedPage]:
        """Pages of a mapped file."""
        lengths = self.catalog.sizes.tokens
        for begin, rows in zip((pages.place.offset // tokens.itemsize).tolist(), pages.rows, strict=True):
            offsets = np.zeros(rows.stop - rows.start + 1, np.int64)
            np.cumsum(lengths[rows], out=offsets[1:])
            values = tokens[begin : begin + int(offsets[-1])]
            yield DecodedPage(values=values, offsets=offsets.data, is_view=True)

    def _runs(self, pages: _Pages) -> Iterator[_Pages]:
        """Pages of one chunk, which share a dictionary: of at most RUN_BYTES, or one page.

        What a page begins with, or its tail, belongs to its neighbours; so where rows are split over pages, a run has
        none but neighbours.
        """
        numbers, place = pages
        may_join = np.diff(place.chunk) == 0
        may_join &= (np.diff(numbers) == 1) | ((place.tail_bytes[:-1] == 0) & ~place.begins_inside_row[1:])
        start, run_bytes = 0, 0
        for i, num_bytes in enumerate(place.num_bytes.tolist()):
            if i > start and (not may_join[i - 1] or run_bytes + num_bytes > RUN_BYTES):
                yield pages.part(start, i)
                start, run_bytes = i, 0
            run_bytes += num_bytes
        yield pages.part(start, len(numbers))

    def _decode_run(self, run: _Pages, fetch: RangeFetch | None) -> Documents:
        table, place = self.catalog.pages, run.place
        chunk = int(place.chunk[0])
        file = int(table.file_of_chunk[chunk])
        began = time.perf_counter()
        dictionary = self._dictionary(file, chunk, fetch)
        planned = np.concatenate([self.catalog.sizes.tokens[rows] for rows in run.rows])
        ranges = _ranges(place)
        parts = [self._read(file, offset, num_bytes, fetch) for offset, num_bytes in ranges]
        if len(table.page_crc):
            self._check_pages(run, ranges, parts, file)
        read = time.perf_counter()
        documents = self._decoder.decode(
            PageRun(
                pages=parts[0] if len(parts) == 1 else b"".join(parts),
                dictionary=b"" if dictionary is None else dictionary.content,
                memo=None if dictionary is None else dictionary.memo,
                schema=self.catalog.schemas[self.catalog.files[file].schema],
                codec=int(table.codec[chunk]),
                num_rows=len(planned),
                path=self._files.path(file),
                offset=int(place.offset[0]),
                first_row=int(place.first_row[0]) - self.catalog.files[file].first_row,
                tokens=planned,
                begins_inside_row=bool(place.begins_inside_row[0]),
                rows_behind=int(table.place(run.numbers[-1:] + 1).num_rows[0]) if place.tail_bytes[-1] else 0,
            )
        )
        if dictionary is not None:  # with what was made of it
            self._dictionaries.keep((self.catalog.name, chunk), dictionary, dictionary.num_bytes)
        self._check_lengths(documents, planned, run, file)
        self.read_s += read - began
        self.decode_s += time.perf_counter() - read
        return documents

    def _read(self, file: int, offset: int, num_bytes: int, fetch: RangeFetch | None) -> bytes:
        if fetch is not None and self._files.objects is not None:
            content = fetch.take(self._files.objects, file, offset, num_bytes)
            if content is not None:
                return content
        return self._files.read(file, offset, num_bytes)

    def _dictionary(self, file: int, chunk: int, fetch: RangeFetch | None) -> DictionaryPage | None:
        num_bytes = int(self.catalog.pages.dict_bytes[chunk])
        if not num_bytes:
            return None
        dictionary = self._dictionaries.use((self.catalog.name, chunk))
        if dictionary is None:
            offset = int(self.catalog.pages.dict_offset[chunk])
            dictionary = DictionaryPage(content=self._read(file, offset, num_bytes, fetch))
            if len(self.catalog.pages.dict_crc):
                self._check_bytes(dictionary.content, int(self.catalog.pages.dict_crc[chunk]), file, offset)
        return dictionary

    def _check_pages(self, run: _Pages, ranges: list[tuple[int, int]], parts: list[bytes], file: int) -> None:
        """Compare the checksum of each page; `parts` are the bytes of `ranges`, in which the pages lie in order."""
        checksums = self.catalog.pages.page_crc[run.numbers].tolist()
        left = list(zip(ranges, parts, strict=True))
        for offset, num_bytes, checksum in zip(
            run.place.offset.tolist(), run.place.num_bytes.tolist(), checksums, strict=True
        ):
            while offset >= sum(left[0][0]):
                left.pop(0)
            (start, _), part = left[0]
            self._check_bytes(memoryview(part)[offset - start : offset - start + num_bytes], checksum, file, offset)
        if tail_bytes := int(run.place.tail_bytes[-1]):
            behind = run.numbers[-1:] + 1
            if int(self.catalog.pages.place(behind).num_bytes[0]) == tail_bytes:  # else it is a part of that page
                checksum = int(self.catalog.pages.page_crc[behind[0]])
                self._check_bytes(memoryview(parts[-1])[-tail_bytes:], checksum, file, offset + num_bytes)

    def _check_bytes(self, content: bytes | memoryview, checksum: int, file: int, offset: int) -> None:
        if checksum and (found := zlib.crc32(content)) != checksum:
            raise CorruptPage(
                f"source {self.catalog.name!r}: {self._files.path(file)}: the page at bytes [{offset}, "
                f"{offset + len(content)}) has checksum {found:08x}, it was indexed with {checksum:08x}; the file was "
                "altered after it was indexed, or its disk fails: put it back, or run torchmix index"
            )

    def _check_lengths(self, documents: Documents, planned: NDArray[np.int32], run: _Pages, file: int) -> None:
        found = np.diff(documents.offsets)
        if np.array_equal(planned, found):
            return
        if len(found) != len(planned):
            row, what = run.rows[0].start, f"decode to {len(found)} documents, the catalog says {len(planned)}"
        else:
            i = int(np.argmax(planned != found))
            row = int(np.concatenate([np.arange(span.start, span.stop) for span in run.rows])[i])
            what = f"give row {row} {found[i]} tokens, the catalog says {planned[i]}"
        page = int(self.catalog.pages.page_of_rows(np.array([row]))[0])
        raise CorruptPage(
            f"source {self.catalog.name!r}: pages {run.numbers[0]} to {run.numbers[-1]} in {self._files.path(file)} "
            f"{what} (page {page}, row {row - self.catalog.files[file].first_row} of the file). The file was altered "
            "after it was indexed: put it back, or run torchmix index"
        )


class _Pages(NamedTuple):
    """Some pages of the source, by ascending number."""

    numbers: NDArray[np.int64]
    place: PlacedPages

    def part(self, start: int, stop: int) -> _Pages:
        """Those from `start` to before `stop`."""
        return _Pages(self.numbers[start:stop], self.place.part(start, stop))

    @property
    def rows(self) -> list[slice]:
        """Rows of each page."""
        first, num = self.place.first_row.tolist(), self.place.num_rows.tolist()
        return [slice(row, row + count) for row, count in zip(first, num, strict=True)]


def _ranges(place: PlacedPages) -> list[tuple[int, int]]:
    """(offset, bytes) to read for a run: pages that lie end to end are one range, and the last one has its tail."""
    ranges: list[tuple[int, int]] = []
    for offset, num_bytes in zip(place.offset.tolist(), place.num_bytes.tolist(), strict=True):
        if ranges and sum(ranges[-1]) == offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + num_bytes)
        else:
            ranges.append((offset, num_bytes))
    ranges[-1] = (ranges[-1][0], ranges[-1][1] + int(place.tail_bytes[-1]))
    return ranges


def _cut(documents: Documents, rows: slice) -> DecodedPage:
    """Some documents of a run; a copy unless they are all, so that a page alone does not hold the run's memory."""
    offsets = documents.offsets[rows.start : rows.stop + 1]
    found = documents.values[offsets[0] : offsets[-1]]
    values = found.astype(_width(found), copy=len(found) < len(documents.values))
    return DecodedPage(values=values, offsets=(offsets - offsets[0]).data)


def _width(values: NDArray[np.integer[Any]]) -> np.dtype[np.integer[Any]]:
    """The dtype that keeps ids of a page: one width for nearly all, so that most pages are copied by plain memory."""
    if values.dtype.itemsize < 4 or values.dtype == np.int32:
        return values.dtype
    if not len(values) or (values.min() >= INT32.min and values.max() <= INT32.max):
        return np.dtype(np.int32)
    return np.dtype(np.int64)
