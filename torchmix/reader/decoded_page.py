"""A decoded page, and a companion: what the reader keeps, with the memory that it takes.

In: documents of a run of pages. Out: one `DecodedPage` for each page. Must hold: a page holds no memory but its own, so
that the bytes counted are the bytes kept. Cost: a copy at 0.3 ns a token where several pages were one run or ids become
narrower, else none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchmix.formats.source import Documents

PAGE_OVERHEAD_BYTES = 512
"""Bytes of the Python objects around a decoded page."""

NO_ID = -1
"""Stands for each token of a page that could not be read: no file holds it as an id."""
INT32 = np.iinfo(np.int32)


class DecodedPage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The documents of one page."""

    values: NDArray[np.integer[Any]]
    """[tokens] its documents end to end: the file's integers if those are narrower than 32 bits, else uint16 where the
    index has seen no larger id in the source, else int32, or int64 where an id needs it. Of rows that are yet to be
    encoded, bytes of texts, or ids."""
    offsets: memoryview
    """[rows + 1] int64, where each document begins in `values`."""
    is_view: bool = False
    """Whether `values` is the kernel's memory, and not this process's."""
    is_blank: bool = False
    """Whether it replaces a page that could not be read."""
    is_part: bool = False
    """Whether it holds the rows that are used alone; the others have no tokens here."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return (0 if self.is_view else self.values.nbytes) + self.offsets.nbytes + PAGE_OVERHEAD_BYTES


class Companion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The companion of a chunk, as Parquet's dictionary."""

    content: bytes
    """The dictionary page as it lies in the file."""
    memo: dict[str, bytes] = msgspec.field(default_factory=dict)
    """What the source keeps of the dictionary, see `PageRun.memo`."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return len(self.content) + sum(map(len, self.memo.values()))


def blank_page(offsets: NDArray[np.int64]) -> DecodedPage:
    """The page that replaces one that could not be read; `offsets` [rows + 1] as the catalog has them."""
    return DecodedPage(values=np.full(offsets[-1], NO_ID, np.int32), offsets=offsets.data, is_blank=True)


def cut_documents(documents: Documents, rows_of_page: Sequence[int], *, is_narrow: bool = False) -> list[DecodedPage]:
    """The pages of a run, each in memory of its own.

    Args:
        documents: Of the run.
        rows_of_page: Rows of each page.
        is_narrow: Whether all ids are known to be at least 0 and below 65,536.
    """
    if len(rows_of_page) == 1:
        return [_page(documents.values, documents.offsets, is_narrow=is_narrow)]
    pages, start = [], 0
    for num_rows in rows_of_page:
        offsets = documents.offsets[start : start + num_rows + 1]
        values = documents.values[offsets[0] : offsets[-1]]
        pages.append(_page(values, offsets - offsets[0], is_narrow=is_narrow, is_part=True))
        start += num_rows
    return pages


def _page(
    values: NDArray[np.integer[Any]], offsets: NDArray[np.int64], *, is_narrow: bool, is_part: bool = False
) -> DecodedPage:
    return DecodedPage(values=values.astype(_width(values, is_narrow=is_narrow), copy=is_part), offsets=offsets.data)


def _width(values: NDArray[np.integer[Any]], *, is_narrow: bool) -> np.dtype[np.integer[Any]]:
    """The dtype that keeps ids of a page: one width for nearly all pages of a source, so that most are copied by plain
    memory."""
    if values.dtype.itemsize <= 2:
        return values.dtype
    if is_narrow:
        return np.dtype(np.uint16)
    if values.dtype.itemsize < 4 or values.dtype == np.int32:
        return values.dtype
    if not len(values) or (values.min() >= INT32.min and values.max() <= INT32.max):
        return np.dtype(np.int32)
    return np.dtype(np.int64)
