"""Pages of one source, decoded: bytes of runs of pages -> one `DecodedPage` each.

In: numbers of pages, ascending. Out: their documents. Must hold: every page has exactly the documents, and they the
lengths, that the catalog holds; otherwise an error names source, file, page and row. Adjacent pages of a chunk are read
by one `pread` and decoded together, up to RUN_BYTES; nothing else is read than these pages and the chunk's dictionary.
Cost: that of decoding, and about 50 microseconds a run; a copy at 0.3 ns a token where several pages were one run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.catalog.store import SourceCatalog
from torchmix.errors import CorruptPage
from torchmix.sources.open_files import OpenFiles
from torchmix.sources.page_cache import PageCache
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
    cells: memoryview
    """The same memory; a slice of it costs half of numpy's."""
    offsets: memoryview
    """[rows + 1] int64, where each document begins in `values`."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.values.nbytes + self.offsets.nbytes + PAGE_OVERHEAD_BYTES


class SourcePages:
    """Decodes pages of one source; not for several threads at once."""

    def __init__(
        self, catalog: SourceCatalog, decoder: Source, files: OpenFiles, dictionaries: PageCache[tuple[str, int], bytes]
    ) -> None:
        """Nothing is read yet; `dictionaries` keeps dictionary pages, by source and chunk, of all sources."""
        self.catalog = catalog
        self._decoder = decoder
        self._files = files
        self._dictionaries = dictionaries
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
        first, stop = self._rows(page, page + 1)
        num_tokens = int(self.catalog.sizes.tokens[first:stop].sum(dtype=np.int64))
        return 4 * num_tokens + 8 * (stop - first + 1) + PAGE_OVERHEAD_BYTES

    def decode(self, pages: Iterable[int]) -> Iterator[DecodedPage]:
        """Read and decode pages, one run after the other.

        Args:
            pages: Ascending numbers, each once.

        Yields:
            The pages, in that order.

        Raises:
            SourceChanged, SourceUnreadable: A file is not the indexed one, or cannot be read.
            CorruptPage: A page does not decode, or to other documents than were indexed.
        """
        for start, stop in self._runs(pages):
            documents = self._decode_run(start, stop)
            first_row, _ = self._rows(start, stop)
            for page in range(start, stop):
                rows = slice(*(row - first_row for row in self._rows(page, page + 1)))
                decoded = _cut(documents, rows)
                self.pages_decoded += 1
                self.bytes_decoded += decoded.values.nbytes
                yield decoded

    def _runs(self, pages: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Ranges of pages that lie end to end in one chunk, of at most RUN_BYTES or one page."""
        table = self.catalog.pages
        start = stop = -1
        run_bytes = end_offset = chunk = 0
        for page in pages:
            offset, num_bytes = int(table.offset[page]), int(table.num_bytes[page])
            adjacent = page == stop and offset == end_offset and int(table.chunk_of_page[page]) == chunk
            if not adjacent or run_bytes + num_bytes > RUN_BYTES:
                if stop > start:
                    yield start, stop
                start, run_bytes, chunk = page, 0, int(table.chunk_of_page[page])
            stop, run_bytes, end_offset = page + 1, run_bytes + num_bytes, offset + num_bytes
        if stop > start:
            yield start, stop

    def _decode_run(self, start: int, stop: int) -> Documents:
        table = self.catalog.pages
        chunk = int(table.chunk_of_page[start])
        file = int(table.file_of_chunk[chunk])
        first_row, stop_row = self._rows(start, stop)
        began = time.perf_counter()
        dictionary = self._dictionary(file, chunk)
        offset = int(table.offset[start])
        pages = self._files.read(file, offset, int(table.num_bytes[start:stop].sum()))
        read = time.perf_counter()
        run = PageRun(
            pages=pages,
            dictionary=dictionary,
            schema=self.catalog.schemas[self.catalog.files[file].schema],
            codec=int(table.codec[chunk]),
            num_rows=stop_row - first_row,
            path=str(self._files.path(file)),
            offset=offset,
            first_row=first_row - self.catalog.files[file].first_row,
        )
        documents = self._decoder.decode(run)
        self._check_lengths(documents, start, stop, file)
        self.read_s += read - began
        self.decode_s += time.perf_counter() - read
        return documents

    def _dictionary(self, file: int, chunk: int) -> bytes:
        num_bytes = int(self.catalog.pages.dict_bytes[chunk])
        if not num_bytes:
            return b""
        key = (self.catalog.name, chunk)
        dictionary = self._dictionaries.use(key)
        if dictionary is None:
            dictionary = self._files.read(file, int(self.catalog.pages.dict_offset[chunk]), num_bytes)
            self._dictionaries.keep(key, dictionary, num_bytes)
        return dictionary

    def _check_lengths(self, documents: Documents, start: int, stop: int, file: int) -> None:
        first_row, stop_row = self._rows(start, stop)
        planned = self.catalog.sizes.tokens[first_row:stop_row]
        found = np.diff(documents.offsets)
        if np.array_equal(planned, found):
            return
        if len(found) != len(planned):
            row, what = first_row, f"decode to {len(found)} documents, the catalog says {len(planned)}"
        else:
            i = int(np.argmax(planned != found))
            row, what = first_row + i, f"give row {first_row + i} {found[i]} tokens, the catalog says {planned[i]}"
        page = int(self.catalog.pages.page_of_rows(np.array([row]))[0])
        raise CorruptPage(
            f"source {self.catalog.name!r}: pages {start} to {stop - 1} in {self._files.path(file)} {what} (page "
            f"{page}, row {row - self.catalog.files[file].first_row} of the file). The file was altered after it was "
            "indexed: put it back, or run torchmix index"
        )

    def _rows(self, start: int, stop: int) -> tuple[int, int]:
        """Rows of a range of pages."""
        first_row = self.catalog.pages.first_row
        return int(first_row[start]), int(first_row[stop])


def _cut(documents: Documents, rows: slice) -> DecodedPage:
    """Some documents of a run; a copy unless they are all, so that a page alone does not hold the run's memory."""
    offsets = documents.offsets[rows.start : rows.stop + 1]
    found = documents.values[offsets[0] : offsets[-1]]
    values = found.astype(_width(found), copy=len(found) < len(documents.values))
    return DecodedPage(values=values, cells=values.data, offsets=(offsets - offsets[0]).data)


def _width(values: NDArray[np.integer[Any]]) -> np.dtype[np.integer[Any]]:
    """The dtype that keeps ids of a page: one width for nearly all, so that most pages are copied by plain memory."""
    if values.dtype.itemsize < 4 or values.dtype == np.int32:
        return values.dtype
    if not len(values) or (values.min() >= INT32.min and values.max() <= INT32.max):
        return np.dtype(np.int32)
    return np.dtype(np.int64)
