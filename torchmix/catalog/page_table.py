"""Where the pages of a source lie: a struct of arrays, memory-mapped from the catalog.

In: tables of single files, as a scan found them. Out: one `PageTable` over all files of a source. Must hold: pages are
in file order, then row order; the pages of a chunk are consecutive, and so are the chunks of a file; the rows of a page
are consecutive, and counted over all files. So page, chunk and file of a row are each one binary search. Cost: 28 bytes
a page and 33 a column chunk.

P is pages, C column chunks, F files of one source. A format without chunks or dictionaries has one chunk per file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from torchmix.errors import CatalogError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageTable:
    """Pages and chunks of one source, or of one file of it."""

    chunk_of_page: NDArray[np.int32]
    """[P] chunk of each page, in 0 ... C - 1, never falls."""
    offset: NDArray[np.int64]
    """[P] first byte of the page in its file."""
    num_bytes: NDArray[np.int64]
    """[P] bytes of the page in its file, 1 or more."""
    first_row: NDArray[np.int64]
    """[P + 1] first row of each page, counted over the source's files; the last entry is the number of rows."""
    file_of_chunk: NDArray[np.int32]
    """[C] file of each chunk, in 0 ... F - 1, never falls."""
    dict_offset: NDArray[np.int64]
    """[C] first byte of the chunk's dictionary in its file, -1 if it has none."""
    dict_bytes: NDArray[np.int64]
    """[C] bytes of the dictionary in its file, 0 if there is none."""
    codec: NDArray[np.int8]
    """[C] how the chunk is compressed, in numbers of the file format."""

    @property
    def num_pages(self) -> int:
        """P."""
        return len(self.offset)

    @property
    def num_chunks(self) -> int:
        """C."""
        return len(self.codec)

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return int(self.first_row[-1])

    def page_of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Page of each row, [n] int64; rows must be in [0, num_rows)."""
        return np.searchsorted(self.first_row, rows, side="right") - 1

    def of_file(self, file: int) -> PageTable:
        """The table of one file alone, with rows, chunks and files counted from 0; copies, O(its pages)."""
        chunk, chunk_stop = np.searchsorted(self.file_of_chunk, [file, file + 1])
        page, page_stop = np.searchsorted(self.chunk_of_page, [chunk, chunk_stop])
        first_row = np.asarray(self.first_row[page : page_stop + 1])
        return PageTable(
            chunk_of_page=self.chunk_of_page[page:page_stop] - np.int32(chunk),
            offset=np.array(self.offset[page:page_stop]),
            num_bytes=np.array(self.num_bytes[page:page_stop]),
            first_row=first_row - first_row[0],
            file_of_chunk=np.zeros(chunk_stop - chunk, np.int32),
            dict_offset=np.array(self.dict_offset[chunk:chunk_stop]),
            dict_bytes=np.array(self.dict_bytes[chunk:chunk_stop]),
            codec=np.array(self.codec[chunk:chunk_stop]),
        )

    def arrays(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Name and array of each field, in the order above."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)

    def check(self) -> None:
        """Check every invariant above, in O(P + C).

        Raises:
            CatalogError: Naming the one that is broken.
        """
        pages, chunks = self.num_pages, self.num_chunks
        lengths = {name: len(array) for name, array in self.arrays()}
        per_page, per_chunk = ("chunk_of_page", "offset", "num_bytes"), ("file_of_chunk", "dict_offset", "dict_bytes")
        wanted = dict.fromkeys(per_page, pages) | dict.fromkeys((*per_chunk, "codec"), chunks)
        wanted["first_row"] = pages + 1
        if lengths != wanted:
            raise CatalogError(f"arrays of a page table have lengths {lengths}, not {wanted}")
        for name in ("chunk_of_page", "first_row", "file_of_chunk"):
            array = getattr(self, name)
            if len(array) and (array[0] < 0 or (np.diff(array) < 0).any()):
                raise CatalogError(f"{name} of a page table is negative, or falls")
        if self.first_row[0] != 0:
            raise CatalogError(f"the first page starts at row {self.first_row[0]}, not 0")
        if pages and self.chunk_of_page[-1] >= chunks:
            raise CatalogError(f"a page is of chunk {self.chunk_of_page[-1]}, there are {chunks}")
        if pages and (self.offset.min() < 0 or self.num_bytes.min() < 1):
            raise CatalogError(f"a page lies at byte {self.offset.min()} or has {self.num_bytes.min()} bytes")
        if ((self.dict_offset < 0) != (self.dict_bytes == 0)).any():
            raise CatalogError("a chunk has a dictionary's offset without its size, or its size without its offset")


def join_tables(tables: Sequence[PageTable]) -> PageTable:
    """One table over the files of a source.

    Args:
        tables: [F] the table of each file alone, in the order of the manifest; a file may have no page.

    Returns:
        Rows, chunks and files counted over all of them; O(P + C) time and memory.
    """
    chunk_base = np.cumsum([0, *(table.num_chunks for table in tables)])
    row_base = np.cumsum([0, *(table.num_rows for table in tables)])
    numbered = list(enumerate(tables))
    first_row = [table.first_row[:-1] + row_base[file] for file, table in numbered]
    return PageTable(
        chunk_of_page=np.concatenate([table.chunk_of_page + np.int32(chunk_base[file]) for file, table in numbered]),
        offset=np.concatenate([table.offset for table in tables]),
        num_bytes=np.concatenate([table.num_bytes for table in tables]),
        first_row=np.concatenate([*first_row, row_base[-1:]]).astype(np.int64),
        file_of_chunk=np.repeat(np.arange(len(tables), dtype=np.int32), [table.num_chunks for table in tables]),
        dict_offset=np.concatenate([table.dict_offset for table in tables]),
        dict_bytes=np.concatenate([table.dict_bytes for table in tables]),
        codec=np.concatenate([table.codec for table in tables]),
    )
